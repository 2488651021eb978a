"""One rank's host against torch's own clipping and steps. Replicas: tests/parity."""

import copy
from typing import Any

import pytest
import torch
from groups_alone import ALONE
from torch import Tensor, nn

from lightning_holmes.comm.queue import make_comm_queue
from lightning_holmes.errors import AnomalyError
from lightning_holmes.optim.bucket_reducer import BucketReducer
from lightning_holmes.optim.elementwise import test_separability as separability_of
from lightning_holmes.optim.host import LocalHost
from lightning_holmes.optim.loss_weights import start_loss_scales
from lightning_holmes.optim.reducer import LocalReducer
from lightning_holmes.optim.shard_memory import ReplicatedMemory
from lightning_holmes.optim.sharded_host import ShardedHost, ShardedStep
from lightning_holmes.plan.placement import Placement

CPU = torch.device("cpu")
STAGES = {"0": 0, "2": 1}  # of a module with two layers and something between them


class Rank:
    """A module whose two layers are two stages on one rank."""

    def __init__(self, *, flat: bool, master_weights: bool = False, scaler: Any = None) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
        self.plain = copy.deepcopy(self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        named = dict(reversed(list(self.module.named_parameters())))
        self.reducer: Any = LocalReducer(self.module, named)
        if flat:
            self.reducer = BucketReducer(
                named,
                ALONE,
                Placement(((0,),)),
                stages=(0, 1),
                stages_of={name: {STAGES[name.split(".")[0]]} for name in named},
                shared={},
                queue=make_comm_queue(CPU),
                collective=None,
            )
        about: dict[str, Any] = {"is_owner": lambda name: True, "scaler": scaler, "place": "stage 0, 1"}
        if master_weights:
            self.reducer.lay_out()
            step = ShardedStep(
                optimizer=self.optimizer,
                names=[list(dict(self.module.named_parameters()))],
                found=separability_of(self.optimizer, CPU),
                master_weights=True,
            )
            memory = ReplicatedMemory(self.reducer, None, lazily=True)
            self.host: LocalHost = ShardedHost(step, memory, self.reducer, ALONE, **about)
        else:
            self.host = LocalHost(self.reducer, ALONE, **about)

    def batch(self, x: Tensor, *, last: bool, microbatches: int = 3, scale: float = 1.0) -> None:
        """Run a step as GPipe would: the forwards, then the backwards of both stages, with the actions that the
        schedule puts between them."""
        self.reducer.begin(last=last)
        finish = start_loss_scales([1.0] * microbatches, None, accumulated=1, factor=self.host.loss_factor)
        hidden = [self.module[:2](part) for part in x.chunk(microbatches)]
        cut = [h.detach().requires_grad_() for h in hidden]
        for number, (h, loss_scale) in enumerate(zip(cut, finish(), strict=True)):
            if number == microbatches - 1:
                self.reducer.backward(1, first=False, last=True)
            (self.module[2](h).square().mean() * loss_scale * scale).backward()
        self.reducer.reduce(1)
        for number, (h, out) in enumerate(zip(cut, hidden, strict=True)):
            if number == microbatches - 1:
                self.reducer.backward(0, first=False, last=True)
            out.backward(h.grad)
        self.reducer.reduce(0)
        self.reducer.end()
        self.module.zero_grad()  # as Lightning does between a step and its backward
        self.reducer.finish(last=last)
        self.host.take_gradients(last=last)
        (self.plain(x).square().mean() * scale).backward()

    def same_gradients(self) -> None:
        for mine, theirs in zip(self.module.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)

    def close(self) -> None:
        self.host.close()
        self.reducer.close()


@pytest.fixture(params=["autograd's", "flat"])
def rank(request: pytest.FixtureRequest) -> Any:
    made = Rank(flat=request.param == "flat")
    yield made
    made.close()


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_clipping_is_torchs(rank: Rank, limit: float) -> None:
    rank.batch(torch.randn(6, 3), last=True)
    theirs = list(rank.plain.parameters())
    expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
    torch.testing.assert_close(rank.host.norm(rank.module.parameters()), expected)
    rank.host.clip_by_norm(rank.module.parameters(), limit)
    rank.same_gradients()
    torch.nn.utils.clip_grad_value_(theirs, limit / 100)
    rank.host.clip_by_value(rank.module.parameters(), limit / 100)
    rank.same_gradients()


def test_a_norm_counts_only_what_this_rank_owns() -> None:
    rank = Rank(flat=True)
    rank.batch(torch.randn(6, 3), last=True)
    host = LocalHost(rank.reducer, ALONE, is_owner=lambda name: name == "2.bias", scaler=None, place="")
    torch.testing.assert_close(host.norm(rank.module.parameters()), rank.plain[2].bias.grad.norm())
    rank.close()


def test_the_sharded_host_steps_pieces_and_gives_the_same_weights() -> None:
    rank = Rank(flat=True, master_weights=True)
    plain = torch.optim.SGD(rank.plain.parameters(), lr=0.1)
    for _ in range(3):
        rank.batch(torch.randn(6, 3), last=True)
        assert all(parameter.grad is None for parameter in rank.module.parameters()), "pieces have the gradients"
        expected = torch.nn.utils.clip_grad_norm_(rank.plain.parameters(), 0.05)
        torch.testing.assert_close(rank.host.norm(rank.module.parameters()), expected)
        rank.host.clip_by_norm([], 0.05)
        rank.optimizer.step()
        plain.step()
        plain.zero_grad()
    rank.host.settle()
    for mine, theirs in zip(rank.module.parameters(), rank.plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach())
    rank.close()


def test_masters_of_shards_are_compared_with_them_only_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Tensor] = []
    where = torch.where
    monkeypatch.setattr(torch, "where", lambda *a, out: compared.append(out) or where(*a, out=out))
    monkeypatch.setattr(ReplicatedMemory, "is_whole", False)
    rank = Rank(flat=True, master_weights=True)
    host: Any = rank.host

    def step() -> int:
        compared.clear()
        rank.batch(torch.randn(6, 3), last=True)
        host.adopt_values()
        rank.optimizer.step()
        return len(compared)

    assert [step(), step(), step()] == [len(host._tensors), 0, 0]
    piece, master = next(iter(host._tensors.items()))
    host._memory.values(piece).fill_(3.0)  # as a checkpoint or an average does
    assert step() == sum(other.unit == piece.unit for other in host._tensors)
    written = torch.full_like(master, 3.0) - 0.1 * host._memory.gradient(piece).view(master.shape)
    torch.testing.assert_close(master.detach(), written)
    rank.close()


def test_what_overflows_is_named_under_detect_anomaly(rank: Rank) -> None:
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        pytest.raises(AnomalyError, match=r"2\.weight.*stage 0, 1"),
    ):
        rank.batch(torch.full((6, 3), 1.0), last=True, scale=float("inf"))
