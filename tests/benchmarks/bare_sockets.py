"""BareSockets: transfers bytes over plain TCP during a training without communication, to measure the cost of the transfers alone."""

import os
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

NEXT_HOST, PORT = "HOLMES_BENCH_NEXT_HOST", 29400
"""The environment variable with the next process's address, and the port at which each process listens."""
_CONNECT_S = 60.0
_PIECE_BYTES = 1 << 20


class BareSockets(Callback):
    """In each step, sends bytes to the next process concurrently with computation; the step ends when that process has them.

    Args:
        num_bytes: per step.
        batches: the number of batches of a step.
    """

    def __init__(self, num_bytes: int, *, batches: int) -> None:
        self._num_bytes, self._batches = num_bytes, batches
        self._threads = ThreadPoolExecutor(2)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen for the process before this one, and connect to the next one."""
        listener = socket.create_server(("", PORT))
        self._serving = self._threads.submit(serve, listener, self._num_bytes)
        self._connection = connect((os.environ[NEXT_HOST], PORT))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the transfer at the first batch of a step."""
        if batch_idx % self._batches == 0:
            self._sending: Future[None] = self._threads.submit(send, self._connection, self._num_bytes)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Wait for the transfer at the last batch of a step."""
        if (batch_idx + 1) % self._batches == 0:
            self._sending.result()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the connection, and wait until the process before this one has done so, too."""
        self._connection.close()
        self._serving.result()
        self._threads.shutdown()


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect to a process that may still be starting. Raises OSError if it does not accept connections within _CONNECT_S."""
    until = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection(address, timeout=None)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def send(connection: socket.socket, num_bytes: int) -> None:
    """Send zeros, which the other end discards, and wait until it has received them all. Raises OSError if it is gone."""
    piece = memoryview(bytes(_PIECE_BYTES))
    for start in range(0, num_bytes, _PIECE_BYTES):
        connection.sendall(piece[: num_bytes - start])
    if not connection.recv(1):
        raise ConnectionError("the other end has closed the connection")


def serve(listener: socket.socket, num_bytes: int) -> None:
    """Accept one connection and discard what comes until it is closed, with an answer after each num_bytes bytes."""
    piece, received = bytearray(_PIECE_BYTES), 0
    with listener, listener.accept()[0] as connection:
        while count := connection.recv_into(piece, min(_PIECE_BYTES, num_bytes - received)):
            received += count
            if received == num_bytes:
                connection.sendall(b".")
                received = 0
