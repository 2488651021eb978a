"""CommQueue: runs the collectives of one group one after the other, beside the computation.

On the host a separate thread runs them, since a collective in several parts has to wait between them; on CUDA they are
put into a separate stream. They run in the order in which they were started, on all members.

    work = queue.start(lambda: collective.sum(bucket))
    ...
    work.wait()                # on CUDA: later work of the current stream waits
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_holmes.comm.label import labelled


class Work(Protocol):
    """A function that runs, or has run, in a queue."""

    def wait(self) -> None:
        """Wait until it is done; raise what it raised."""


WorkKind = Literal["bucket_reduce", "bucket_gather"]


class CommQueue(Protocol):
    """Runs functions in the order in which they are started."""

    def start(self, function: Callable[[], None], name: WorkKind | None = None, *, of: str = "") -> Work:
        """Run ``function`` after what was started before.

        Args:
            name: the kind of work, for its label in profiles.
            of: what it is done for, a stage or parameters, for the label, too.
        """

    def close(self) -> None:
        """End the queue: nothing may be started any more. Does not wait for work that runs."""


def use_here(tensor: Tensor) -> None:
    """Keep the memory of a tensor that was made in another stream until the current stream is done with it: an exception may let go of the tensor
    before the work is waited for. For functions that run in a queue."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def make_comm_queue(device: torch.device) -> CommQueue:
    """The queue for collectives on tensors of ``device``."""
    return StreamQueue(device) if device.type == "cuda" else ThreadQueue()


class _StreamOrder:
    """Runs a function in ``stream`` from a thread: after the work that the current stream has been given until now, and
    before the work that it is given after :meth:`wait`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._home = torch.cuda.current_stream(stream.device)
        self._ready = self._home.record_event()
        self.ended = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run(self, function: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            function()
            self.ended.record(self._stream)

    def wait(self) -> None:
        _hold_back(self._home, self.ended)


def _hold_back(home: Any, ended: Any) -> None:
    """Let the current stream wait for an event, and ``home``, the stream that started the work, too: where another stream is the first to read
    what arrived, the reads of ``home`` after it, which do not wait any more, must not be early."""
    current = torch.cuda.current_stream(home.device)
    for stream in (home,) if current == home else (home, current):
        stream.wait_event(ended)


class _ThreadWork:
    def __init__(self, function: Callable[[], None], order: _StreamOrder | None = None) -> None:
        self._function: Callable[[], None] | None = function
        self._order = order
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            if self._order is None:
                function()
            else:
                self._order.run(function)
        except BaseException as error:  # raised by wait()
            self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._order is not None:
            self._order.wait()


class ThreadQueue:
    """Runs functions in a thread, which is made at the first start.

    Args:
        device: of the tensors that its functions copy to the host, or from there. On CUDA they do so in a stream of the
            queue's own.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        on_cuda = device is not None and device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._works: queue.SimpleQueue[_ThreadWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, function: Callable[[], None], name: WorkKind | None = None, *, of: str = "") -> Work:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._works,), name="holmes_comm", daemon=True)
            self._thread.start()
        order = None if self._stream is None else _StreamOrder(self._stream)
        work = _ThreadWork(_labelled(function, name, of), order)
        self._works.put(work)
        return work

    def close(self) -> None:
        if self._thread is not None:
            self._works.put(None)
            self._thread = None


def _labelled(function: Callable[[], None], name: WorkKind | None, of: str) -> Callable[[], None]:
    def run() -> None:
        with labelled(lambda: f"holmes: {(name or 'collective').replace('_', ' ')} {of}".rstrip()):
            function()

    return run


def _serve(works: "queue.SimpleQueue[_ThreadWork | None]") -> None:
    failed: BaseException | None = None
    while True:
        work = works.get()
        if work is None:
            return
        if failed is not None:  # else members would be at different places of the queue
            work._function = _raiser(failed)
        work.run()
        failed = failed or work._error


def _raiser(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


class _StreamWork:
    def __init__(self, ended: Any, home: Any) -> None:
        self._ended = ended
        self._home = home

    def wait(self) -> None:
        _hold_back(self._home, self._ended)


class StreamQueue:
    """Runs functions in a CUDA stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, function: Callable[[], None], name: WorkKind | None = None, *, of: str = "") -> Work:
        home = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(home)
        with torch.cuda.stream(self._stream):
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            _labelled(function, name, of)()
            ended.record()
        return _StreamWork(ended, home)

    def close(self) -> None:
        """Do nothing: a stream needs no end."""
