"""TCP sockets of this process, so that connections that a library has made can be ended without the library.

gloo's ``abort`` does not end a blocked all_reduce (torch 2.13); shutting its sockets down does, even if forked
processes hold duplicates of them.

    before = listening()
    device = make_device()
    end_connections(listening() - before, {("10.0.0.2", 40123)})      # connections to this device, and to that address
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
_PROBES = 3  # the byte of tcp_info that counts tries in a row that never went out, or found no room at the other end
_AGAIN_MS, _LONGEST_MS = 5_000, 120_000
_KEPT_S = 925.0  # how long the kernel keeps a connection without any answer, by its usual settings


def listening() -> set[End]:
    """The addresses and ports on which this process listens."""
    return {_end(s.getsockname()) for s in _sockets() if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def end_connections(own: Collection[End], others: Collection[End]) -> None:
    """Shut down the connections that others have made to ``own``, where this process listens, and that this process has
    made to ``others``; threads that wait in them wake up."""
    for found in _sockets():
        with contextlib.suppress(OSError):  # it is not connected, or has ended meanwhile
            peer = _end(found.getpeername())
            if peer in others or _end(found.getsockname()) in own:
                found.shutdown(socket.SHUT_RDWR)


def send_again_soon(peers: Collection[str], kept_s: float) -> int:
    """Make connections with ``peers`` retransmit unanswered data every five seconds; return how many were changed. To
    be called again every few seconds.

    The kernel's pauses double, up to two minutes: after a cut of a minute the connection would stay idle for about
    another minute once the link is back. The kernel counts tries, so with short pauses it would give up after a minute: these
    connections are kept for ``kept_s``, or longer if the kernel would keep them longer. For that time the other end may
    also read nothing of what it has been sent. The time does not apply to data that never went out because this host's
    own card was down: the kernel gives up after fifteen such tries. So their pauses stay long, and each call here is
    one more try. Before Linux 6.15 these tries are all that is done. Connections that already have a shorter limit,
    such as those of optimizer nodes, are left alone.
    """
    count = 0
    for found in _sockets() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # not connected, or the kernel does not know the option
            address = found.getpeername()[0].removeprefix("::ffff:")
            limit_ms = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            if address not in peers or 0 < limit_ms < int(1e3 * _KEPT_S):
                continue
            if found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _PROBES + 1)[_PROBES]:
                # sends pending data; gloo and the store set this option, too
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, _LONGEST_MS)
            elif found.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS) > _AGAIN_MS:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * max(kept_s, _KEPT_S)))
                found.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, _AGAIN_MS)
                count += 1
    return count


def _sockets() -> Iterator[socket.socket]:
    """Yield each TCP socket of this process, as a duplicate that is closed afterwards."""
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
