"""NCCL groups that can be moved (movable.py): the host, not a stream, waits for their operations.

``wait`` of NCCL's works only makes a stream wait, and later kernels would compute with whatever an aborted communicator
has left. So the host polls whether the kernel has ended, and only then goes on: that is the price. All works of an
aborted communicator look as if they had ended well, so each is queried for the last time before the abort. Based on
torch's sources (2.13), and tried with an imitation of NCCL; it has not been run on GPUs.

    register()
    options = NcclOptions(junction, device, net_name=lambda: transports.net_name(ranks))
    group = dist.new_group(ranks, backend=NCCL, pg_options=options)
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_holmes.comm.answer import answer_within
from lightning_holmes.comm.gloo import CONNECT_AGAIN
from lightning_holmes.comm.movable import Junction, MovableGroup
from lightning_holmes.comm.on_host import OnHost
from lightning_holmes.comm.user_settings import WAITED_BY_HOST, WAITS_BY_HOST, set_own
from lightning_holmes.errors import ConnectionLostError, UnreachableError
from lightning_holmes.torch_private import is_backend_registered, nccl_error, nccl_group, plain_group

NCCL = "holmes_nccl"
_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3  # between two queries of a kernel
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class NcclOptions:
    """A group's options for the backend; ``net_name()`` gives the network module that is chosen now, "IB" or "Socket",
    for each communicator that is made."""

    junction: Junction
    device: torch.device
    net_name: Callable[[], str | None]


def register() -> None:
    """Register the backend with torch; may be called again."""
    if not is_backend_registered(NCCL):
        dist.Backend.register_backend(NCCL, _create, extended_api=True, devices=["cuda"])


def is_nccl(group: dist.ProcessGroup | None) -> bool:
    """Whether a group's backend is NCCL, so that its tensors are on CUDA; None: WORLD."""
    return dist.get_backend(group) in ("nccl", NCCL)


def _create(options: Any, given: NcclOptions) -> Any:
    def connect(store: Any) -> Any:
        made = NcclConnection(_make(options, given, store or options.store), given.device, options.timeout)
        if store is not None:
            _use(made, options.group_rank, options.group_size)
        return made

    side = OnDevice(given.device)
    return MovableGroup(connect, options.group_rank, options.group_size, options.timeout, given.junction, side)


def _make(options: Any, given: NcclOptions, store: Any) -> Any:
    rank, size, ranks = options.group_rank, options.group_size, options.global_ranks_in_group
    with _without_watchdog():
        backend = nccl_group(
            store, rank, size, options.timeout, net_name=given.net_name(), name=options.group_id, ranks=ranks
        )
    return plain_group(store, rank, size, backend, given.device)


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Groups made inside have no thread that ends the process, at once or after minutes, when a communicator has
    failed. torch (2.13) gives groups with blocking wait no such thread, and reads the variable when it makes a group:
    so one thread at a time. The variable is not removed afterwards, so that the environment does not move under threads
    that read other variables meanwhile."""
    with _making:
        if any(os.environ.get(name, "0") != "0" for name in (WAITS_BY_HOST, WAITED_BY_HOST)):
            yield  # the user's setting; one that keeps the watchdog is refused (group_transports.py)
            return
        set_own({WAITS_BY_HOST: "1"})
        try:
            yield
        finally:
            set_own({WAITS_BY_HOST: "0"})


def _use(connection: "NcclConnection", rank: int, size: int) -> None:
    """Use a connection for the first time: NCCL then connects, and blocks, and groups first used in different orders on
    two ranks would wait for each other. Two members also send, which uses a separate communicator. The wait for a
    member that does not come is limited here, not by NCCL.

    NCCL reads the list of cards once per process (NCCL_IB_HCA): it may still try a card that is down although another
    one was chosen. Moves then tries without fast cards.
    """

    def use() -> None:
        with _stream_apart(connection.device):
            number = torch.zeros(1, device=connection.device)
            connection.allreduce([number]).wait(CONNECT_AGAIN)
            if size == 2:
                work = connection.send([number], 1, 0) if rank == 0 else connection.recv([number], 0, 0)
                work.wait(CONNECT_AGAIN)

    try:
        answer_within(use, timeout_s=CONNECT_AGAIN.total_seconds())
    except Exception as error:
        connection.abort_apart([])
        if not isinstance(error, ConnectionLostError):
            raise
        raise UnreachableError(
            f"NCCL has not connected a group of {size} ranks within {CONNECT_AGAIN.total_seconds():.0f} s"
        ) from error


def _stream_apart(device: torch.device) -> AbstractContextManager[Any]:
    """A new, empty stream: kernels of other groups that wait for a rank which in turn waits for this one block only the work queued behind them."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class NcclConnection:
    """A group's communicators. Operations that are started on them return works that the host can wait for.

    Args:
        group: the NCCL group.
        device: of its tensors.
        timeout: of operations.
    """

    def __init__(self, group: Any, device: torch.device, timeout: timedelta) -> None:
        self.device, self.timeout = device, timeout
        self.lock = threading.Lock()
        self.is_ending = self.is_left = False  # works are queried for the last time; works are not queried any more
        self._group = group

    def __getattr__(self, name: str) -> Callable[..., "NcclWork"]:
        start = getattr(self._group, name)

        def begin(*args: Any, **kwargs: Any) -> NcclWork:
            for options in (*args, *kwargs.values()):
                if hasattr(options, "asyncOp"):
                    options.asyncOp = True  # else torch returns no work
                    if hasattr(options, "device"):
                        options.device = self.device  # for a barrier: torch does not find the group's device
            return NcclWork(self, start(*args, **kwargs))

        return begin

    def on_device(self) -> AbstractContextManager[Any]:
        """Make the group's device current: another thread would create a context on the first device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def abort_apart(self, works: list[Any]) -> None:
        """Abort operations under way, in a thread that is not waited for: when NCCL frees memory it may wait for
        kernels of other groups, and these for ranks that wait for the move. Until then it keeps ``works``, whose
        tensors kernels may still read and fill."""

        def abort() -> None:
            with self.lock:  # no work is queried from now on: a query would wait for the end of the abort
                self.is_left = True
            with contextlib.suppress(Exception), self.on_device():
                self._group.abort()
            works.clear()

        threading.Thread(target=abort, name="holmes-abort", daemon=True).start()

    def close(self) -> None:
        """Shut the group down, when all members are done with it."""
        self._group.shutdown()


class NcclWork:
    """An operation on the device."""

    def __init__(self, connection: NcclConnection, work: Any) -> None:
        self._connection, self._work = connection, work

    def has_ended(self) -> bool:
        """Whether the operation's kernel has ended well. Raises the operation's error, or DistBackendError if the
        communicator was aborted before it ended."""
        connection = self._connection
        with connection.lock, connection.on_device():
            ended = not connection.is_left and self._work.is_completed()
            error = nccl_error(self._work) if ended else None
        if error is not None:
            raise error
        if not ended and connection.is_ending:
            raise dist.DistBackendError("NCCL's communicator was aborted")
        return ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block the host until the operation has ended, no longer than ``timeout`` (None: the group's)."""
        limit, pause_s = timeout or self._connection.timeout, _PAUSE_S
        end = time.monotonic() + limit.total_seconds()
        while not self.has_ended():
            if time.monotonic() > end:
                raise dist.DistBackendError(f"NCCL: Timed out waiting {limit.total_seconds():.0f} s for an operation")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True


class OnDevice(OnHost):
    """The parts of a movable group that depend on where its tensors are, for tensors on a device."""

    backend_name = "nccl"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    @contextlib.contextmanager
    def after(self, mark: Any, *, waits: bool = False) -> Iterator[None]:
        with _stream_apart(self._device):
            if mark is None:
                yield
                return
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(mark)
            yield
            if waits:
                stream.synchronize()

    def has_ended(self, work: Any) -> bool:
        try:
            return isinstance(work, NcclWork) and work.has_ended()
        except Exception:  # the caller that waits for it gets the error
            return False

    def begin_end(self, connection: Any) -> None:
        if connection is not None:  # it is None if an earlier move has failed
            connection.is_ending = True

    def end(self, connection: Any, works: list[Any]) -> None:
        if connection is not None:
            connection.abort_apart(works)

    def close(self, connection: Any) -> None:
        connection.close()
