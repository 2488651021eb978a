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
import sys
from collections.abc import Collection, Iterator
from typing import TypeAlias

End: TypeAlias = tuple[str, int]
"""Address and port."""

TCP_RTO_MAX_MS = 44
"""The longest pause between two tries: linux/tcp.h since Linux 6.15; not yet in the socket module."""

_OPEN = "/proc/self/fd"
_PROBES = 3  # of tcp_info's bytes: how often in a row something was tried that has never gone out, or for which the other end had no room
_AGAIN_MS, _LONGEST_MS = 5_000, 120_000
_KEPT_S = 925.0  # as long as the kernel keeps a connection that nothing is answered on, by its usual settings


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


def send_again_soon(peers: Collection[str], kept_s: float) -> int:
    """Let connections with these addresses send again every five seconds what is not answered; how many there are that did not before.
    To be called again every few seconds.

    The kernel's pauses double, up to two minutes: a link that was cut for a minute would have to be waited for once more after its return. It
    counts tries, so that with short pauses it would give up after a minute: they are kept for ``kept_s``, or longer where the kernel would. So
    long the other end may also read nothing of what it has been sent. That time does not count for what has never gone out, since this host's own card was
    down: these tries the kernel leaves after fifteen of them. So their pauses stay long, and each call here is a try of its own. Before Linux 6.15 that is all
    that is done. Whoever has given a connection a limit of its own, as those of optimizer nodes have, is left alone.
    """
    count = 0
    for found in _sockets() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # not connected, or the kernel does not know the option
            address = found.getpeername()[0].removeprefix("::ffff:")
            limit_ms = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            if address not in peers or 0 < limit_ms < int(1e3 * _KEPT_S):
                continue
            if found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _PROBES + 1)[_PROBES]:
                # sends what waits; gloo and the store have set it, too
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, _LONGEST_MS)
            elif found.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS) > _AGAIN_MS:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * max(kept_s, _KEPT_S)))
                found.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, _AGAIN_MS)
                count += 1
    return count


def _sockets() -> Iterator[socket.socket]:
    """Each of this process's, as a duplicate for a moment."""
    for name in os.listdir(_OPEN):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with _duplicate(int(name)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                        yield found


def _duplicate(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except (
        OSError
    ):  # closed meanwhile, and the number is something else's: a pipe that stays open would never end for its reader
        os.close(copy)
        raise


def _end(name: tuple[str, int]) -> End:
    return name[0], name[1]
