"""BareSockets: transfers bytes over plain TCP during a training without communication, to measure the cost of the transfers alone.

A control for optimizer nodes and for sharded parameters. The other end, on the node's host, receives the bytes sent to it and sends
the number of bytes requested:

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
"""The environment variable with the other end's HOST:PORT."""
_COME_S = 120.0  # seconds to wait for each connection of a process
_CONNECT_S = 60.0
_PIECE_BYTES = 1 << 20
_ORDER = struct.Struct("!?Q")  # whether bytes follow (True) or are requested (False); how many


class BareSockets(Callback):
    """In each step, sends and receives bytes concurrently with computation; the step ends when all bytes have arrived.

    Args:
        sent_bytes, received_bytes: per step.
        batches: the number of batches of a step.
        port: the port at which this process is the other end of another process; None: it is no other end.
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
        """Start the transfers at the first batch of a step."""
        if batch_idx % self._batches == 0:
            sent, received = self._num_bytes
            self._works = [
                self._threads.submit(send, self._out, sent),
                self._threads.submit(ask, self._in, received),
            ]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Wait for the transfers at the last batch of a step."""
        if (batch_idx + 1) % self._batches == 0:
            for work in self._works:
                work.result()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the connections, which ends the other end."""
        self._threads.shutdown()
        self._out.close()
        self._in.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait until the process that uses this one as its other end has finished its last step."""
        if self._port is not None:
            self._serving.join()


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect to the other end, which may still be starting.

    Raises:
        OSError: the other end does not accept connections within _CONNECT_S.
    """
    for _ in range(int(_CONNECT_S / 0.5)):
        try:
            return socket.create_connection(address, timeout=None)
        except ConnectionRefusedError:
            threading.Event().wait(0.5)
    return socket.create_connection(address)


def send(connection: socket.socket, num_bytes: int) -> None:
    """Send bytes, which the other end discards, and wait until it confirms that it has received them.

    Raises:
        ConnectionError: the other end is gone.
    """
    connection.sendall(_ORDER.pack(True, num_bytes))
    give(connection, num_bytes)
    take(connection, 1)


def ask(connection: socket.socket, num_bytes: int) -> None:
    """Request bytes and receive them.

    Raises:
        ConnectionError: the other end is gone.
    """
    connection.sendall(_ORDER.pack(False, num_bytes))
    take(connection, num_bytes)


def give(connection: socket.socket, num_bytes: int) -> None:
    """Send num_bytes zeros."""
    piece = bytes(_PIECE_BYTES)
    for start in range(0, num_bytes, _PIECE_BYTES):
        connection.sendall(memoryview(piece)[: num_bytes - start])


def take(connection: socket.socket, num_bytes: int) -> None:
    """Receive and discard num_bytes bytes.

    Raises:
        ConnectionError: the connection ends before.
    """
    piece = bytearray(_PIECE_BYTES)
    while num_bytes:
        count = connection.recv_into(piece, min(num_bytes, _PIECE_BYTES))
        if not count:
            raise ConnectionError("the other end has closed the connection")
        num_bytes -= count


def serve(address: tuple[str, int], num_processes: int) -> None:
    """Run the other end until all processes, which have two connections each, have closed them."""
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
