"""BareSockets: bytes over plain TCP beside a training that communicates nothing: what a step costs whatever is made of the bytes.

A control for optimizer nodes and for shards. The other end, on the node's host, takes what comes and sends what is asked for:

    python -m lightning_holmes.commands.benchmark.bare_sockets HOST:PORT PROCESSES
"""

import os
import socket
import struct
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

FAR_END = "HOLMES_BENCH_FAR_END"
"""The environment variable that has the other end's HOST:PORT."""
_COME_S = 120.0  # in which all processes have connected
_CONNECT_S = 60.0
_PIECE_BYTES = 1 << 20
_ORDER = struct.Struct("!?Q")  # whether bytes follow, or are asked for; how many


class BareSockets(Callback):
    """In each step sends so many bytes and receives so many, both at once and beside what computes; the step ends when they are there.

    Args:
        sent_bytes, received_bytes: of a step, which has so many ``batches``.
        port: on which this process is the other end of one other; None: of none.
    """

    def __init__(self, sent_bytes: int, received_bytes: int, *, batches: int, port: int | None = None) -> None:
        self._num_bytes, self._batches, self._port = (sent_bytes, received_bytes), batches, port
        self._works: list[Future[None]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Connect, once for each direction."""
        if self._port is not None:
            self._serving = threading.Thread(target=serve, args=(("", self._port), 1), daemon=True)
            self._serving.start()
        host, _, port = os.environ[FAR_END].rpartition(":")
        self._out, self._in = (connect((host, int(port))) for _ in range(2))
        self._threads = ThreadPoolExecutor(2)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        if batch_idx % self._batches == 0:
            sent, received = self._num_bytes
            self._works = [
                self._threads.submit(send, self._out, sent),
                self._threads.submit(ask, self._in, received),
            ]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End it."""
        if (batch_idx + 1) % self._batches == 0:
            for work in self._works:
                work.result()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The other end is told by the closed connections."""
        self._threads.shutdown()
        self._out.close()
        self._in.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The process before this one may have a step to go."""
        if self._port is not None:
            self._serving.join()


def connect(address: tuple[str, int]) -> socket.socket:
    """To the other end, which may still be starting.

    Raises:
        OSError: it has not come.
    """
    for _ in range(int(_CONNECT_S / 0.5)):
        try:
            return socket.create_connection(address, timeout=None)
        except ConnectionRefusedError:
            threading.Event().wait(0.5)
    return socket.create_connection(address)


def send(connection: socket.socket, num_bytes: int) -> None:
    """So many bytes, which the other end throws away, and says when it has them.

    Raises:
        ConnectionError: the other end is gone.
    """
    connection.sendall(_ORDER.pack(True, num_bytes))
    give(connection, num_bytes)
    take(connection, 1)


def ask(connection: socket.socket, num_bytes: int) -> None:
    """For so many bytes, which come.

    Raises:
        ConnectionError: the other end is gone.
    """
    connection.sendall(_ORDER.pack(False, num_bytes))
    take(connection, num_bytes)


def give(connection: socket.socket, num_bytes: int) -> None:
    """So many bytes."""
    piece = bytes(_PIECE_BYTES)
    for start in range(0, num_bytes, _PIECE_BYTES):
        connection.sendall(memoryview(piece)[: num_bytes - start])


def take(connection: socket.socket, num_bytes: int) -> None:
    """What comes, as many bytes.

    Raises:
        ConnectionError: it ends before.
    """
    piece = bytearray(_PIECE_BYTES)
    while num_bytes:
        count = connection.recv_into(piece, min(num_bytes, _PIECE_BYTES))
        if not count:
            raise ConnectionError("the other end has closed the connection")
        num_bytes -= count


def serve(address: tuple[str, int], num_processes: int) -> None:
    """The other end, until all processes, with two connections each, have closed them."""
    with socket.create_server(address, backlog=2 * num_processes) as listener:
        listener.settimeout(_COME_S)
        threads = []
        for _ in range(2 * num_processes):
            connection, _ = listener.accept()
            connection.settimeout(None)
            threads.append(threading.Thread(target=_follow, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join()


def _follow(connection: socket.socket) -> None:
    with connection:
        while order := connection.recv(_ORDER.size, socket.MSG_WAITALL):
            takes, num_bytes = _ORDER.unpack(order)
            (take if takes else give)(connection, num_bytes)
            if takes:
                connection.sendall(b".")


if __name__ == "__main__":
    host, _, port = sys.argv[1].rpartition(":")
    serve((host, int(port)), int(sys.argv[2]))
