"""Channel: messages of plain values and tensors over one TCP connection, between workers and optimizer nodes.

A message is a JSON header and the bytes of its tensors. Nothing is ever unpickled. Both ends prove that they know the job's secret
before anything else is read; later messages are neither signed nor encrypted.

    channel = Channel.connect(("127.0.0.1", 4000), secret, {"kind": "pull"}, peer="optimizer node 0")
    channel.send({"ask": "fetch", "unit": 3})
    channel.receive(into=[buffer])

Plain sockets are used instead of gloo: they need no store (a single worker has none), detect the end of a peer at once, and a blocking
wait can be interrupted.
"""

import contextlib
import hashlib
import hmac
import json
import math
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.errors import ConfigurationError, ConnectionLostError

_PREFIX = struct.Struct("!I")
_LARGEST_HELLO = 1 << 16
_LARGEST_HEADER = 1 << 30
_HELLO_S = 20.0
_LOST_S = 20  # seconds without an answer after which a host counts as lost
_SAME_SECRET = "set HOLMES_NODE_SECRET to the same value on all hosts"
_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS of linux/tcp.h since Linux 6.15; not yet in the socket module
_AGAIN_S = 2  # most seconds between TCP retries, so that a restored link is used soon; without a limit they double: none within _LOST_S after 13 s
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}

Address = tuple[str, int]
"""Host and port."""


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """Convert ``value`` to JSON types; its tensors are appended to ``tensors``.

    Raises:
        TypeError: something in it is neither plain data nor a tensor.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value) is list:
        return [encode(entry, tensors) for entry in value]
    if type(value) is tuple:
        return {"tuple": [encode(entry, tensors) for entry in value]}
    if type(value) is dict:
        return {"dict": [[encode(k, tensors), encode(v, tensors)] for k, v in value.items()]}
    raise TypeError(f"{type(value).__name__} is no plain data")


def decode(value: Any, tensors: Sequence[Tensor | None]) -> Any:
    """The inverse of :func:`encode`."""
    if isinstance(value, list):
        return [decode(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    ((tag, held),) = value.items()
    if tag == "tensor":
        return tensors[held]
    if tag == "tuple":
        return tuple(decode(entry, tensors) for entry in held)
    assert tag == "dict"
    return {decode(k, tensors): decode(v, tensors) for k, v in held}


class Channel:
    """One end of a connection. At any time at most one thread may send, and one receive.

    Args:
        peer: a name for the other end, for messages.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self.num_sent = self.num_received = 0
        """The bytes of tensors that were sent and received."""
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", _LOST_S - 5)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_S * 1000)
            with contextlib.suppress(OSError):  # before Linux 6.15
                connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, _AGAIN_S * 1000)
        self._ends = ""
        with contextlib.suppress(OSError):  # the connection has ended already
            (here, *_), (there, port, *_) = connection.getsockname(), connection.getpeername()
            self._ends = f" at {there}:{port}, from {here}"

    @classmethod
    def connect(cls, address: Address, secret: str, hello: Mapping[str, Any], *, peer: str) -> "Channel":
        """Connect to the process that listens at ``address``, and send ``hello``.

        Raises:
            ConnectionLostError: no process listens there, or it does not know the secret, or it refuses this process.
        """
        try:
            connection = socket.create_connection(address, timeout=_HELLO_S)
        except OSError as error:
            raise ConnectionLostError(f"{peer} at {address[0]}:{address[1]} cannot be reached: {error}") from error
        channel = cls(connection, peer)
        theirs = channel.receive(largest=_LARGEST_HELLO)["nonce"]
        mine = secrets.token_hex(16)
        said = json.dumps(encode(dict(hello), []))
        proof = _proof(secret, "connects", theirs, mine, said)
        channel.send({"nonce": mine, "hello": said, "proof": proof})
        try:
            answer = channel.receive(largest=_LARGEST_HELLO)["proof"]
        except ConnectionLostError as error:
            raise ConnectionLostError(f"{error}. If it refused this process: {_SAME_SECRET}") from error
        if not hmac.compare_digest(answer, _proof(secret, "listens", theirs, mine)):
            raise ConnectionLostError(
                f"{peer} at {address[0]}:{address[1]} does not know this job's secret: {_SAME_SECRET}"
            )
        connection.settimeout(None)
        return channel

    @classmethod
    def accept(cls, connection: socket.socket, secret: str, *, peer: str) -> tuple["Channel", dict[str, Any]]:
        """Accept a connection made by :meth:`connect`; returns the channel, and the ``hello`` of the other end.

        Raises:
            ConnectionLostError: the other end does not know the secret, or sends nothing.
        """
        connection.settimeout(_HELLO_S)
        channel = cls(connection, peer)
        mine = secrets.token_hex(16)
        channel.send({"nonce": mine})
        said = channel.receive(largest=_LARGEST_HELLO)
        theirs, hello = said["nonce"], said["hello"]
        if not hmac.compare_digest(said["proof"], _proof(secret, "connects", mine, theirs, hello)):
            raise ConnectionLostError(f"{peer} does not know this job's secret: {_SAME_SECRET}")
        channel.send({"proof": _proof(secret, "listens", mine, theirs)})
        connection.settimeout(None)
        return channel, decode(json.loads(hello), [])

    @property
    def local_host(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    def wait_at_most(self, seconds: float | None) -> None:
        """Raise ConnectionLostError from now on if sending or receiving blocks for longer; None: no limit."""
        self._socket.settimeout(seconds)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message of plain values, which may contain tensors at any place."""
        found: list[Tensor] = []
        header: dict[str, Any] = {"message": encode(dict(message), found)}
        tensors = [tensor.detach().to("cpu").contiguous() for tensor in found]
        header["tensors"] = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        text = json.dumps(header).encode()
        try:
            self._socket.sendall(_PREFIX.pack(len(text)) + text)
            for tensor in tensors:
                self._socket.sendall(_bytes_of(tensor))
                self.num_sent += tensor.nbytes
        except OSError as error:
            raise self._lost(error) from error

    def receive(
        self,
        *,
        into: Sequence[Tensor] | None = None,
        allocate: Callable[[Any, int], Tensor | None] = lambda message, num_bytes: None,
        largest: int = _LARGEST_HEADER,
    ) -> dict[str, Any]:
        """Return the next message.

        Args:
            into: tensors of the same shapes and types to receive the message's tensors in.
            allocate: if a message has exactly one tensor, is called with the message (None in place of the tensor) and the number of
                bytes, and returns memory, uint8, to receive it in; None: a new tensor is made.
            largest: the largest header that is accepted, in bytes.

        Raises:
            ConnectionLostError: the other end is gone.
        """
        try:
            (length,) = _PREFIX.unpack(self._read(bytearray(_PREFIX.size)))
            if length > largest:
                raise ConnectionLostError(f"{self.peer} sent a header of {length} bytes, which is none of ours")
            header = json.loads(self._read(bytearray(length)))
            tensors = []
            for index, (dtype, shape) in enumerate(header["tensors"]):
                if largest == _LARGEST_HELLO:
                    raise ConnectionLostError(f"{self.peer} sent a tensor before it has said who it is")
                if into is not None:
                    tensor = into[index]
                else:
                    numel, kind = math.prod(shape), _DTYPES[dtype]
                    alone = len(header["tensors"]) == 1
                    memory = allocate(decode(header["message"], [None]), numel * kind.itemsize) if alone else None
                    if memory is None:
                        tensor = torch.empty(shape, dtype=kind)
                    else:
                        tensor = memory[: numel * kind.itemsize].view(kind).view(shape)
                assert str(tensor.dtype).removeprefix("torch.") == dtype and list(tensor.shape) == shape
                self._read(_bytes_of(tensor))
                self.num_received += tensor.nbytes
                tensors.append(tensor)
        except OSError as error:
            raise self._lost(error) from error
        found: dict[str, Any] = decode(header["message"], tensors)
        return found

    def _read(self, buffer: Any) -> Any:
        left = memoryview(buffer)
        while left.nbytes:
            count = self._socket.recv_into(left)
            if not count:
                raise ConnectionResetError("it has closed the connection")
            left = left[count:]
        return buffer

    def _lost(self, error: OSError) -> ConnectionLostError:
        return ConnectionLostError(f"connection lost to {self.peer}{self._ends}: {error}")

    def close(self) -> None:
        """Close the connection; a thread that waits in :meth:`receive`, at either end, gets a ConnectionLostError."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end has done it
        self._socket.close()


def _bytes_of(tensor: Tensor) -> Any:
    """Return the memory of a tensor, which must be contiguous and on the host."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _proof(secret: str, role: str, *said: str) -> str:
    return hmac.new(secret.encode(), "\n".join((role, *said)).encode(), hashlib.sha256).hexdigest()


def check_plain(value: Any, what: str) -> None:
    """Refuse a value that cannot be sent as plain data, or contains a tensor.

    Raises:
        ConfigurationError: names the value by ``what``.
    """
    tensors: list[Tensor] = []
    try:
        encode(value, tensors)
    except TypeError as error:
        raise ConfigurationError(f"{what} = {value!r}: {error}, and nothing else is sent to optimizer nodes") from None
    if tensors:
        raise ConfigurationError(f"{what} is a tensor, and only plain numbers are sent to optimizer nodes; use a float")
