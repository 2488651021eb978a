"""NCCL groups that are moved while they are in use, with an imitation of NCCL. Baseline: the same work without a
move, bit for bit."""

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor

from lightning_holmes.comm import nccl
from lightning_holmes.comm.lost import is_lost
from lightning_holmes.comm.movable import Junction, MovableGroup
from lightning_holmes.comm.nccl import NcclConnection, OnDevice
from lightning_holmes.comm.user_settings import WAITS_BY_HOST, UserSettings
from lightning_holmes.errors import UnreachableError


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "payload", [{"seed": 1, "moves": 8}, {"seed": 2, "moves": 3, "cut": 2}], ids=["", "a card that nobody reaches"]
)
def test_what_was_under_way_when_nccls_groups_were_moved_is_repeated_bit_for_bit(payload: dict[str, int]) -> None:
    found = launch(3, "moved_nccl:work", payload, timeout_s=120)
    assert all(rank["same"] for rank in found), found
    assert all(rank["moves"] >= payload["moves"] and rank["left"] == 0 for rank in found), found
    assert all(rank["modules"] == ["IB", "Socket"] for rank in found), found


class Kernel:
    """A work of NCCL whose kernel ends, or fails, when the test says so."""

    def __init__(self) -> None:
        self.has_ended, self.error, self.looks = False, None, 0

    def is_completed(self) -> bool:
        self.looks += 1
        return self.has_ended or self.error is not None

    def wait(self, timeout: Any = None) -> bool:
        raise AssertionError(
            "torch aborts the communicator here where it has failed, and its other works look well then"
        )

    def get_future_result(self) -> Any:
        found: Any = torch.futures.Future()
        if self.error is not None:
            found.set_result(2)
        return found

    def exception(self) -> Exception | None:
        return self.error


class Kernels:
    """An NCCL group with such works, which all look as if they had ended well after its abort."""

    def __init__(self) -> None:
        self.begun: list[Kernel] = []
        self.aborted = threading.Event()

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Kernel:
        assert options is None or options.asyncOp
        self.begun.append(Kernel())
        return self.begun[-1]

    def abort(self) -> None:
        for kernel in self.begun:
            kernel.has_ended, kernel.error = True, None
        self.aborted.set()


def moved_by(kernels: list[Kernels]) -> MovableGroup:
    device, timeout, coming = torch.device("cpu"), timedelta(seconds=60), iter(kernels)

    def connect(store: Any) -> NcclConnection:
        return NcclConnection(next(coming), device, timeout)

    return MovableGroup(connect, 0, 2, timeout, Junction(None), OnDevice(device))


def test_what_an_aborted_communicator_has_left_is_not_taken() -> None:
    """The first work has ended before the abort, the second has not, and the third has failed."""
    kernels = [Kernels(), Kernels()]
    group = moved_by(kernels)
    tensors = [torch.full((2,), float(n)) for n in range(3)]
    options = dist.AllreduceOptions()  # type: ignore[attr-defined]
    options.asyncOp = False
    works = [group.collective("allreduce", ([tensor], options), {}) for tensor in tensors]
    first, _, third = kernels[0].begun
    first.has_ended, third.error = True, dist.DistBackendError("NCCL error")
    waiter = threading.Thread(target=works[1].wait)
    waiter.start()
    group.begin_move()
    group.end()
    assert kernels[0].aborted.wait(60)
    looks = [kernel.looks for kernel in kernels[0].begun]
    assert group.progress() == {"collectives": 1, "received": []}
    assert [work.is_completed() for work in works] == [True, False, False]
    group.reconnect(None)
    group.repeat([group.progress(), {"collectives": 1, "received": []}])
    assert len(kernels[1].begun) == 2 and waiter.is_alive()
    assert looks == [kernel.looks for kernel in kernels[0].begun]  # looking would wait for the end of the abort
    kernels[1].begun[0].has_ended = True
    waiter.join(60)
    assert not waiter.is_alive() and not works[2].is_completed()
    kernels[1].begun[1].has_ended = True
    assert works[2].is_completed() and works[2].wait()


def test_an_error_of_a_kernel_is_raised_and_one_that_takes_longer_than_the_timeout_is_told() -> None:
    kernels = Kernels()
    group = moved_by([kernels])
    work = group.collective("allreduce", ([torch.ones(1)],), {})
    with pytest.raises(dist.DistBackendError, match="Timed out") as told:
        work.wait(timedelta(seconds=0.01))
    assert is_lost(told.value)
    kernels.begun[0].error = dist.DistBackendError("NCCL error: remote process exited")
    assert not work.is_completed()
    work._operation.waiting = None
    with pytest.raises(dist.DistBackendError, match="remote process exited"):
        work.wait()


def test_groups_are_made_without_a_watchdog_and_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (WAITS_BY_HOST, f"HOLMES_SET_{WAITS_BY_HOST}"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with nccl._without_watchdog():
        assert os.environ[WAITS_BY_HOST] == "1" and UserSettings.read(files=()).get(WAITS_BY_HOST) is None
    assert os.environ[WAITS_BY_HOST] == "0" and UserSettings.read(files=()).get(WAITS_BY_HOST) is None
    inside = threading.Event()

    def make_another() -> None:
        with nccl._without_watchdog():
            inside.set()

    other = threading.Thread(target=make_another)
    with nccl._without_watchdog():
        other.start()
        assert not inside.wait(0.1), "the first one that ends would give the other's group a watchdog"
    other.join(60)
    assert inside.is_set() and os.environ[WAITS_BY_HOST] == "0"
    monkeypatch.setenv(WAITS_BY_HOST, "yes")  # the user's value
    with nccl._without_watchdog():
        assert os.environ[WAITS_BY_HOST] == "yes"
    assert UserSettings.read(files=()).get(WAITS_BY_HOST) == "yes"


def test_a_first_use_that_a_member_does_not_come_to_is_left_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "CONNECT_AGAIN", timedelta(seconds=0.05))
    kernels = Kernels()
    blocked = threading.Event()
    kernels.allreduce = lambda tensors: blocked.wait(60)  # type: ignore[assignment]
    connection = NcclConnection(kernels, torch.device("cpu"), timedelta(seconds=60))
    with pytest.raises(UnreachableError, match="has not connected a group of 2 ranks"):
        nccl._use(connection, 0, 2)
    assert kernels.aborted.wait(60)
    blocked.set()
