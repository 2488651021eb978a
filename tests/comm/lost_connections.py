"""Connections that are lost, real ones and simulated ones, and users' errors with similar messages."""

import os
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradient
from torch.utils.data import DataLoader, Dataset

from lightning_holmes.comm.lost import is_lost
from lightning_holmes.comm.p2p import DistributedP2P, TensorSpec
from lightning_holmes.comm.queue import make_comm_queue


def raise_in(module: ModuleType, said: str) -> None:
    """Raise a RuntimeError whose traceback ends in code of ``module``."""
    found: dict[str, Any] = {}
    exec(compile("def fail(said):\n    raise RuntimeError(said)", str(module.__file__), "exec"), found)
    found["fail"](said)


def _queued(group: dist.ProcessGroup) -> None:
    queue = make_comm_queue(torch.device("cpu"))
    try:
        queue.start(lambda: dist.all_reduce(torch.ones(1), group=group)).wait()
    finally:
        queue.close()


def _handed_on(group: dist.ProcessGroup) -> None:
    p2p = DistributedP2P(
        [0, 1], 0, outgoing={1: group}, incoming={1: group}, messages=group, device=torch.device("cpu")
    )
    receive = p2p.prepare(1, [TensorSpec((1,), torch.float32, False)])
    receive.post()
    receive.wait()


CASES: dict[str, Callable[..., None]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "barrier": lambda group: dist.barrier(group),
    "objects": lambda group: dist.all_gather_object([None, None], 1, group=group),
    "a queue": _queued,
    "a stage's activations": _handed_on,
    "a backward": lambda group: None,
}


def lose(_: Any) -> dict[str, bool | str]:
    """On rank 0, return for each case whether its error counts as a lost connection, after rank 1 has ended."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    groups = {name: dist.new_group([0, 1]) for name in CASES}
    for name, group in groups.items():
        for _ in range(2 if name == "a backward" and rank == 1 else 1):  # the second call matches the forward of rank 0
            dist.all_reduce(torch.ones(1), group=group)
        if name == "a backward" and rank == 0:
            loss = all_reduce_with_gradient(torch.ones(1, requires_grad=True), group=group).sum()
    found: dict[str, bool | str] = {}
    for name, group in groups.items() if rank == 0 else ():
        try:
            loss.backward() if name == "a backward" else CASES[name](group)
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = is_lost(error) or f"{type(error).__name__}: {error}"
    return found


# errors that users' code raises

SAID = "[data base] Connection reset, timed out; Socket closed by peer"


class Fails(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise RuntimeError(SAID)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(SAID)


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(SAID)


def _raise(error: Exception) -> None:
    raise error


USERS: dict[str, Callable[[], Any]] = {
    "a step": lambda: _raise(RuntimeError(SAID)),
    "a socket": lambda: _raise(ConnectionResetError(SAID)),
    "a layer": lambda: torch.nn.Sequential(Layer())(torch.ones(1)),
    "a backward": lambda: Failing.apply(torch.ones(1, requires_grad=True)).sum().backward(),
    "a data loader": lambda: next(iter(DataLoader(Fails()))),
    "a worker": lambda: next(iter(DataLoader(Fails(), num_workers=1))),
}
