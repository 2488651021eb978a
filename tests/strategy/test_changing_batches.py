"""Whether a batch may be split is asked again after the first batch: "auto" then goes on with one microbatch, or the run is refused; a
number that the user has set is used, with a warning. Baseline: plain Lightning. Tolerance: 1e-5 relative for what is logged, which is fp32,
and 1e-9 for weights: runs in double precision, since a norm over eight samples enlarges rounding, on some processors above 1e-5."""

import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launch import launch, launch_raw
from quiet import quiet_trainer
from tanh_net import ByGradient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy

IGNORED = -100
ENDS = {  # by case: how many batches run, and why the split ends
    "a term that ramps up": (12, "step 4 .* the loss depends"),
    "ignored targets from the second batch on": (4, "step 1 .* the loss depends"),
    "class weights with sorted labels": (4, "step 1 .* the loss depends"),
    "a norm that is in eval mode in the first epoch": (8, "step 4 .* batch normalisation"),
    "a norm that a hook sets to train mode": (8, "step 2 .* batch normalisation"),
    "a log from the second epoch on": (8, "step 4 .* logs as inverse"),
    "a gradient that ramps up": (8, "step 4 .* the gradients depend"),
    "an attribute from the second epoch on": (8, "step 4 .* leaves self.latest"),
    "a part that fails": (4, "step 1 .* the loss depends"),
}
NEEDS = "a step that needs six samples"
ONE_REPLICA = "one replica has a target without a class"


class Changing(ByGradient):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.embed = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if "norm" in case else nn.Identity()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 3)
        self.seen: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.norm.train(self.current_epoch > 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if "a hook" in self.case and batch_idx == 2:
            self.norm.train()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.norm(self.layers(self.embed(x)))
        weight = torch.tensor([1.0, 4.0, 9.0], dtype=x.dtype) if "weights" in self.case else None
        loss = F.cross_entropy(self.head(hidden), y, weight, ignore_index=IGNORED)
        if "a term" in self.case:
            loss = loss + 0.1 * self.current_epoch * hidden.mean(0).square().sum()
        if "gradient" in self.case:
            pull = 0.1 * self.current_epoch * self.head(hidden).mean(0).square().sum()
            loss = loss + pull - pull.detach()
        if "attribute" in self.case and self.current_epoch:
            self.latest = loss.item()
        if "log" in self.case and self.current_epoch:
            self.log("inverse", 1 / loss)
        if len(x) < (6 if self.case == NEEDS else 4 if "fails" in self.case and batch_idx else 0):
            raise ValueError(f"{len(x)} samples")
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))
        if hasattr(self, "latest"):
            self.seen.append(self.latest)
        if "inverse" in self.trainer.callback_metrics:
            self.seen.append(float(self.trainer.callback_metrics["inverse"]))


def batches(case: str) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(32, 8, generator=generator), torch.randint(0, 3, (32,), generator=generator)
    if "ignored" in case:  # the first is ignored, of which every trial has a sample
        y[(16 if "third" in case else 8) :: 8] = IGNORED
    if "sorted" in case:  # the first batch has one class
        y = y.sort().values
    if case == ONE_REPLICA:  # in its second batch, by DistributedSampler
        y[torch.randperm(32, generator=generator.manual_seed(3))[17]] = IGNORED
    return DataLoader(TensorDataset(x, y), batch_size=16 if case == NEEDS else 8)


def fit(case: str, strategy: Any, **options: Any) -> tuple[Changing, list[str]]:
    pl.seed_everything(3, verbose=False)
    module, epochs = Changing(case), -(-ENDS.get(case, (4, ""))[0] // 4)
    trainer = quiet_trainer(strategy, max_epochs=epochs, deterministic=True, precision="64-true", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, batches(case))
    return module, [str(warning.message) for warning in caught]


def fit_all(_: Any) -> dict[str, Any]:
    found = {}
    for case in (*ENDS, NEEDS):
        strategy = HolmesStrategy(pipeline_parallel_size=2, num_microbatches=2 if case == NEEDS else "auto")
        module, said = fit(case, strategy, devices=2)
        found[case] = module.seen, module.state_dict(), said, strategy.plan.num_microbatches
    return found


def fit_one(case: str) -> None:
    fit(case, HolmesStrategy(pipeline_parallel_size=2), devices=2)


def test_auto_goes_on_with_one_microbatch_from_the_batch_on_that_cannot_be_split() -> None:
    for case, (seen, state, said, num_microbatches) in launch(2, "test_changing_batches:fit_all")[0].items():
        plain, _ = fit(case, "auto")
        count, why = ENDS.get(case, (2, ""))
        assert num_microbatches == (2 if case == NEEDS else 1) and len(seen) >= count, case
        torch.testing.assert_close(seen, plain.seen, rtol=1e-5, atol=1e-6, msg=lambda t, case=case: f"{case}: {t}")
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10, msg=f"{case}: {name}")
        reasons = [text for text in said if text.startswith("num_microbatches: 1 from ")]
        assert len(reasons) == bool(why) and all(re.search(why, reason) for reason in reasons), said


def test_a_batch_between_two_trials_is_refused_by_what_its_loss_divides_by(tmp_path: Path) -> None:
    case = "ignored targets from the third batch on"
    workers = launch_raw(2, "test_changing_batches:fit_one", case, timeout_s=100, folder=tmp_path)
    assert all(worker.exit_code for worker in workers)
    said = r"UnsupportedModuleError: training_step of Changing: the loss of this batch divides by 0, 1, .*num_microbatches=1"
    assert any(re.search(said, worker.output) for worker in workers), workers


def fit_replicas(strategy: str) -> tuple[list[float], dict[str, Tensor], list[str]]:
    shards = HolmesStrategy(pipeline_parallel_size=2, sharding="parameters")
    module, said = fit(ONE_REPLICA, shards if strategy == "holmes" else strategy, devices=2 if strategy == "ddp" else 4)
    return module.seen, module.state_dict(), said


def test_replicas_that_bring_parameters_together_try_as_often_where_one_finds_a_difference() -> None:
    plain, found = (
        launch(size, "test_changing_batches:fit_replicas", name)[0] for size, name in ((2, "ddp"), (4, "holmes"))
    )
    torch.testing.assert_close(found[:2], plain[:2], rtol=1e-5, atol=1e-6)
    assert any(re.search("num_microbatches: 1 from step 1 .* the loss depends", text) for text in found[2]), found[2]


@pytest.mark.parametrize("options", [{"schedule": "breadth_first"}, {"sharding": "parameters"}], ids=str)
def test_a_number_that_the_user_has_set_is_used_with_a_warning(options: dict[str, Any]) -> None:
    for case in ("a term that ramps up", "ignored targets from the third batch on"):
        plain, _ = fit(case, "auto")
        found, said = fit(case, HolmesStrategy(**options, num_microbatches=2))
        reasons = [text for text in said if "the loss of" in text]
        assert 1 <= len(reasons) <= 2 and all("num_microbatches=1" in text for text in reasons), said
        differ = [abs(one - other) > 1e-4 for one, other in zip(plain.seen, found.seen, strict=True)]
        first = differ.index(True)
        assert first == (4 if "ramps" in case else 2), "what was exact stays exact"
