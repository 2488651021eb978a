"""TCP sockets of this process, so that connections which a library has made can be ended without it.

gloo's ``abort`` leaves a blocked all_reduce blocked (torch 2.13); the end of its sockets ends it, also where processes that were forked
hold duplicates of them.

    before = listening()
    device = make_device()
    end_connections(listening() - before, {("10.0.0.2", 40123)})      # to this one, and from here to that one
"""

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator
from typing import TypeAlias

End: TypeAlias = tuple[str, int]
"""Address and port."""

_OPEN = "/proc/self/fd"


def listening() -> set[End]:
    """Where this process listens."""
    return {_end(s.getsockname()) for s in _sockets() if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def end_connections(own: Collection[End], others: Collection[End]) -> None:
    """End the connections that others have made to ``own``, where this process listens, and it to ``others``; who waits in one is woken."""
    for found in _sockets():
        with contextlib.suppress(OSError):  # it is not connected, or has ended meanwhile
            peer = _end(found.getpeername())
            if peer in others or _end(found.getsockname()) in own:
                found.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Each of this process's, as a duplicate for a moment."""
    for name in os.listdir(_OPEN):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                        yield found


def _end(name: tuple[str, int]) -> End:
    return name[0], name[1]
