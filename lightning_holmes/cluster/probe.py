"""Connection tests and measurements between hosts, with plain sockets bound to the interfaces' addresses.

A Listener answers on the given NICs of a host; run_tasks connects, measures and reports. measure.py decides which hosts
measure what. Both ends prove that they hold the job's token (HMAC-SHA256 over the random numbers of both ends), and the
listener also proves which host and NIC it is, since a private address may belong to another machine than the intended one.
Every read is limited in bytes and time, and a peer that sends anything unexpected is dropped, so that no other program that
connects can do harm or delay it.

    listener = Listener(host="a", nics=nics, token=token)
    listener.endpoints                          # sent to the other hosts through the store
    run_tasks([ProbeTask(source=..., target=..., ...)], token=token)
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_holmes.cluster.network import Nic
from lightning_holmes.cluster.record import record

_HELLO = b"HOLMES1\n"
_NONCE, _MAC = 16, 32
_REQUEST = struct.Struct(f">{_NONCE}sI{_MAC}s")  # the client's random number, milliseconds of sending, proof
_REPORT = struct.Struct(">dQ")  # seconds, and the bytes that arrived in them
_CHUNK = 1 << 20
MAX_BYTES = 256 << 20  # per measurement
MAX_SECONDS = 5.0
_PINGS = 20
_MAX_PINGS = 64
_CONNECTIONS = 256  # at the same time; further ones wait in the kernel's queue
_HANDSHAKE_S = 2.0
_ANSWER_S = 2.0
_RAMP = 0.25  # the first share of the time, left out of the rate: TCP's slow start and a shaper's burst
_WINDOWS = 32  # number of windows into which the rest is split
_UNSENT_S = 0.04  # seconds of data that may wait in the sender's socket, for when its process is stopped
_SO_BINDTODEVICE = getattr(socket, "SO_BINDTODEVICE", 25)
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address and port at which a host's listener answers for one NIC."""

    host: str
    nic: str
    address: str
    port: int


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTask:
    """Connect from a NIC to an endpoint; send for ``seconds`` (0: only measure latency), starting at ``start_s``."""

    source_host: str
    source_nic: str
    source_address: str
    target: Endpoint
    source_interface: str | None = None
    seconds: float = 0.0
    start_s: float = 0.0

    def failed(self, why: str) -> ProbeResult:
        """Make the result of a failed task; its error names both ends."""
        target = self.target
        source = f"{self.source_host} {self.source_nic} ({self.source_address})"
        return ProbeResult(
            error=f"from {source} to {target.host} {target.nic} ({target.address}) port {target.port}: {why}"
        )


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The result of a task. error is None on success; bandwidth is measured only by tasks that send."""

    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    error: str | None = None


class Listener:
    """Answers tests on the given NICs until it is closed.

    Args:
        host: the name of this host in the job.
        nics: a socket is opened on one IPv4 and one IPv6 address of each NIC that is up.
        token: the job's secret.
    """

    def __init__(self, *, host: str, nics: Sequence[Nic], token: bytes) -> None:
        self._token = token
        self._closed = threading.Event()
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.warnings: list[str] = []
        endpoints: list[Endpoint] = []
        try:
            for nic in nics:
                four = [address for address in nic.addresses if ":" not in address]
                six = [address for address in nic.addresses if ":" in address]
                for address in (*four[:1], *six[:1]) if nic.up else ():
                    opened = self._open(nic, address)
                    if opened is not None:
                        endpoint = Endpoint(host=host, nic=nic.name, address=address, port=opened.getsockname()[1])
                        endpoints.append(endpoint)
                        self._start(opened, endpoint)
        except BaseException:
            self.close()
            raise
        self.endpoints = tuple(endpoints)

    def close(self) -> None:
        """Close the sockets and end the accepting threads."""
        self._closed.set()
        for opened in self._sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)  # wakes accept
            opened.close()
        for thread in self._threads:
            thread.join(timeout=2)

    def _open(self, nic: Nic, address: str) -> socket.socket | None:
        opened = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            opened.bind((address, 0))
            opened.listen(1024)
        except OSError as problem:
            opened.close()
            self.warnings.append(f"cannot listen on {address} ({nic.name}): {problem}")
            return None
        self._sockets.append(opened)
        return opened

    def _start(self, opened: socket.socket, endpoint: Endpoint) -> None:
        thread = threading.Thread(target=self._accept, args=(opened, endpoint), name="holmes-probe", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, opened: socket.socket, endpoint: Endpoint) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = opened.accept()
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.01)  # out of file descriptors, or the peer is gone already
                continue
            self._slots.acquire()
            threading.Thread(target=self._serve, args=(connection, endpoint), daemon=True).start()

    def _serve(self, connection: socket.socket, endpoint: Endpoint) -> None:
        try:
            with connection, contextlib.suppress(OSError, struct.error):
                answer(connection, self._token, endpoint)
        finally:
            self._slots.release()


def answer(connection: socket.socket, token: bytes, endpoint: Endpoint) -> None:
    """Serve one connection: authenticate both ends, then echo or count bytes. Raises OSError for a peer that fails or does not answer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    deadline = time.monotonic() + _HANDSHAKE_S
    nonce = secrets.token_bytes(_NONCE)
    connection.settimeout(_HANDSHAKE_S)
    connection.sendall(_HELLO + nonce)
    theirs, milliseconds, proof = _REQUEST.unpack(_receive(connection, _REQUEST.size, deadline))
    if not hmac.compare_digest(proof, _proof(token, b"client", nonce, theirs, endpoint, milliseconds)):
        raise ConnectionError("wrong proof")
    connection.sendall(_proof(token, b"server", theirs, nonce, endpoint, milliseconds))
    if milliseconds == 0:
        deadline = time.monotonic() + _HANDSHAKE_S
        for _ in range(_MAX_PINGS):
            connection.sendall(_receive(connection, 1, deadline))
        return
    seconds, count = _count(connection, time.monotonic() + min(milliseconds / 1000, MAX_SECONDS) + 1.0)
    connection.sendall(_REPORT.pack(seconds, count))


def run_tasks(tasks: Sequence[ProbeTask], *, token: bytes) -> list[ProbeResult]:
    """Run tasks at the same time, each from its ``start_s`` on, and return their results in the order of the tasks."""
    begin = time.monotonic()
    results: list[ProbeResult | None] = [None] * len(tasks)

    def work(index: int, task: ProbeTask) -> None:
        time.sleep(max(0.0, begin + task.start_s - time.monotonic()))
        results[index] = run_task(task, token=token)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(tasks)]
    for thread in threads:
        thread.start()
    end = begin + max((task.start_s + task.seconds for task in tasks), default=0.0) + 3 * _ANSWER_S + 2
    for thread in threads:
        thread.join(timeout=max(0.0, end - time.monotonic()))
    return [result or task.failed("it did not end in time") for task, result in zip(tasks, results, strict=True)]


def run_task(task: ProbeTask, *, token: bytes, timeout_s: float = _ANSWER_S) -> ProbeResult:
    """Connect and measure. A failure is reported as the result's ``error``, which names both ends."""
    target = task.target
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            if task.source_interface is not None:
                # Without it a host sends by the route to the address, whatever the source address. Linux allows it
                # without root since 5.7; before, only the source address is bound.
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, task.source_interface.encode() + b"\0")
            connection.bind((task.source_address, 0))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.connect((target.address, target.port))
            milliseconds = int(min(task.seconds, MAX_SECONDS) * 1000)
            _introduce(connection, token, target, milliseconds, time.monotonic() + timeout_s + _HANDSHAKE_S)
            connection.settimeout(timeout_s)
            if milliseconds == 0:
                return ProbeResult(latency_s=_ping(connection, timeout_s))
            return ProbeResult(bandwidth_bytes_per_s=_send(connection, milliseconds / 1000, timeout_s))
    except TimeoutError:
        return task.failed(f"no answer within {timeout_s:g} s; is a firewall in the way?")
    except OSError as error:
        return task.failed(error.strerror or str(error))


def _introduce(connection: socket.socket, token: bytes, target: Endpoint, milliseconds: int, deadline: float) -> None:
    greeting = _receive(connection, len(_HELLO) + _NONCE, deadline)
    if greeting[: len(_HELLO)] != _HELLO:
        raise ConnectionError("something else listens there")
    nonce, mine = greeting[len(_HELLO) :], secrets.token_bytes(_NONCE)
    proof = _proof(token, b"client", nonce, mine, target, milliseconds)
    connection.sendall(_REQUEST.pack(mine, milliseconds, proof))
    try:
        theirs = _receive(connection, _MAC, deadline)
    except ConnectionError:
        theirs = b""
    if not hmac.compare_digest(theirs, _proof(token, b"server", mine, nonce, target, milliseconds)):
        raise ConnectionError("another host or another job answered at this address")


def _proof(token: bytes, role: bytes, nonce: bytes, other: bytes, endpoint: Endpoint, milliseconds: int) -> bytes:
    who = f"{endpoint.host}\0{endpoint.nic}\0{milliseconds}".encode()
    return hmac.new(token, role + nonce + other + who, hashlib.sha256).digest()


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Receive exactly ``size`` bytes before the deadline."""
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the other end closed the connection")
        data += part
    return data


def _ping(connection: socket.socket, timeout_s: float) -> float:
    """Measure the one-way latency in seconds: half of the fastest round trip."""
    deadline = time.monotonic() + timeout_s
    fastest = float("inf")
    for _ in range(_PINGS):
        start = time.perf_counter()
        connection.sendall(b"p")
        _receive(connection, 1, deadline)
        fastest = min(fastest, time.perf_counter() - start)
        if time.monotonic() + fastest > deadline - timeout_s / 2:
            break
    return fastest / 2


def _send(connection: socket.socket, seconds: float, timeout_s: float) -> float:
    """Send for ``seconds`` and return the bytes per second that the other end counted."""
    data = memoryview(os.urandom(_CHUNK))
    start, sent, unsent = time.monotonic(), 0, 0
    connection.settimeout(seconds + timeout_s)
    while (elapsed := time.monotonic() - start) < seconds and sent < MAX_BYTES:
        enough = max(_CHUNK // 4, int(_UNSENT_S * sent / elapsed) if elapsed > _RAMP * seconds else 0)
        if enough > 1.5 * unsent:  # limit the unsent data, so that sending ends on time
            unsent = enough
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent)
        sent += connection.send(data[: min(_CHUNK, MAX_BYTES - sent)])
    connection.shutdown(socket.SHUT_WR)
    counted_s, counted = _REPORT.unpack(_receive(connection, _REPORT.size, time.monotonic() + 1.0 + timeout_s))
    elapsed = time.monotonic() - start
    if not (0 < counted_s < float("inf")) or counted == 0:
        counted_s, counted = elapsed, sent
    if counted == 0:
        raise ConnectionError("connected, but no data came through")
    return float(counted / counted_s)


def _count(connection: socket.socket, deadline: float) -> tuple[float, int]:
    """Receive until the sender ends, the deadline or MAX_BYTES; return (seconds, bytes) at the steady rate."""
    buffer = bytearray(_CHUNK)
    samples: list[tuple[float, int]] = []
    total = 0
    while total < MAX_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        connection.settimeout(left)
        try:
            count = connection.recv_into(buffer)
        except TimeoutError:
            break
        if count == 0:
            break
        total += count
        now = time.monotonic()
        if not samples or now - samples[-1][0] > 0.001:  # keep at most a thousand samples per second
            samples.append((now, total))
    return steady_rate(samples)


def steady_rate(samples: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Return (seconds, bytes) of the window with the median rate, weighted by bytes. samples: (time, bytes so far), in order.

    A host whose processes are stopped for a while, for example by a CPU quota, neither sends nor reads, and then reads
    everything that has arrived at once: neither is the link's rate. So the samples after the first quarter (TCP's slow start,
    a shaper's burst) are split into windows of 1/32 of the remaining time and sorted by rate; the window that contains the
    middle byte is returned. (0, 0) for fewer than three samples.
    """
    if len(samples) < 3:
        return 0.0, 0
    (first, _), (last, _) = samples[0], samples[-1]
    begin = next(sample for sample in samples if sample[0] >= first + _RAMP * (last - first))
    windows: list[tuple[float, int]] = []
    for sample in samples:
        if sample[0] - begin[0] >= (1 - _RAMP) * (last - first) / _WINDOWS:
            windows.append((sample[0] - begin[0], sample[1] - begin[1]))
            begin = sample
    windows.sort(key=lambda window: window[1] / window[0])
    left = sum(count for _, count in windows) / 2
    for window in windows:
        left -= window[1]
        if left <= 0:
            return window
    return 0.0, 0
