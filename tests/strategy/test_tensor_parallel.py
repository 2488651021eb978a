"""tensor_parallel_size: modules that shard their layers with parallelize_module train as in one process.

Baseline: the same module, whole, in plain Lightning in one process, fp32. Tolerance, relative: 1e-5 for losses and norms,
1e-4 for weights.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from lightning.pytorch import LightningModule
from tensor_parallel_cases import STEPS, Words, scale_of, train

from lightning_holmes import HolmesStrategy
from lightning_holmes.checkpoint import read_state_dict

REL = 1e-5


class Baseline:
    """A run in one process: its losses, norms and final weights."""

    def __init__(self, strategy: Any = "auto", **options: Any) -> None:
        trainer, watch = train(strategy, **options)
        self.losses, self.norms, self.read = watch.losses, watch.norms, watch.read
        self.val_loss = float(trainer.callback_metrics["val_loss"])
        self.weights = {n: p.detach().clone() for n, p in trainer.lightning_module.named_parameters()}

    def is_met_by(self, ranks: list[dict[str, Any]], *, skip: int = 0) -> None:
        """Compare with what the ranks of a job found; the baseline's losses are means over the replicas' batches."""
        replicas = [found for found in ranks if found["coordinate"][0] == found["coordinate"][2] == 0]
        losses = torch.tensor([found["losses"] for found in replicas]).mean(dim=0).tolist()
        assert losses == pytest.approx(self.losses[skip:], rel=REL)
        val_losses = [found["val_loss"] for found in replicas]
        assert sum(val_losses) / len(val_losses) == pytest.approx(self.val_loss, rel=REL)
        for found in ranks:
            assert found["norms"] == pytest.approx(self.norms[skip:], rel=REL)
            same = [other for other in ranks if other["coordinate"][1] == found["coordinate"][1]]
            assert all(other["losses"] == found["losses"] for other in same)
            same = [other for other in ranks if other["coordinate"][1:] == found["coordinate"][1:]]  # all stages
            assert set().union(*(other["weights"] for other in same)) == set(self.weights)
            self.has_weights(found["weights"])

    def has_weights(self, weights: dict[str, Any]) -> None:
        """Compare full parameters: all of them, or those of one stage if the module is never gathered."""
        for name, weight in weights.items():
            assert type(weight) is torch.Tensor, name
            torch.testing.assert_close(weight, self.weights[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    return Baseline(reads=True)


def test_four_processes(baseline: Baseline, tmp_path: Path) -> None:
    """Pipeline x tensor, whose hooks read parameter by parameter, and tensor x data. Each saves one checkpoint format; both
    are resumed in the other layout, and the file in one process."""
    folder, file = tmp_path / "folder.ckpt", tmp_path / "file.ckpt"
    pipeline = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    data = {"pipeline_parallel_size": 1}
    cases: list[dict[str, Any]] = [
        {"strategy": pipeline, "save": folder, "reads": True},
        {"strategy": data | {"save_distributed_checkpoint": False}, "save": file},
        {"strategy": data, "ckpt_path": folder},
        {"strategy": pipeline, "style": "sequence", "ckpt_path": file},
        {"strategy": pipeline, "style": "dtensor", "refused": True},
    ]
    ranks = launch(4, "tensor_parallel_cases:run_all", [{"devices": 4, **case} for case in cases], timeout_s=150)
    found = [[of_rank[index] for of_rank in ranks] for index in range(len(cases))]
    baseline.is_met_by(found[0])
    assert all(f["weights"].keys() == baseline.weights.keys() for f in found[0]), "built in __init__: whole at the end"
    assert found[0][0]["axes"] == ("pipeline", "data_parallel", "tensor_parallel")
    assert sorted(f["coordinate"] for f in found[0]) == [(p, 0, t) for p in (0, 1) for t in (0, 1)]
    assert found[0][0]["grid"] == ((0, 1), (2, 3)) and found[1][0]["grid"] == ((0, 1, 2, 3),)
    for of_rank in found[0]:  # what a hook reads: the parameters of all stages, each sharded over two ranks
        assert len(of_rank["read"]) == len(baseline.read) == 4 * STEPS
        assert all(
            r == pytest.approx(b, rel=1e-4, abs=1e-6) for r, b in zip(of_rank["read"], baseline.read, strict=True)
        )
    baseline.is_met_by(found[1])
    baseline.is_met_by(found[2], skip=STEPS)
    baseline.is_met_by(found[3], skip=STEPS)

    for refusal in found[4]:
        assert "splitting blocks after layer 1 would lose the layout of output 0 of layer 1, a DTensor" in refusal

    saved = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in saved["state_dict"].values())
    in_folder = read_state_dict(folder)
    assert list(in_folder) == list(saved["state_dict"])
    for name, value in in_folder.items():
        torch.testing.assert_close(value, saved["state_dict"][name], rtol=1e-4, atol=1e-6, msg=name)
    trainer, watch = train("auto", ckpt_path=file)  # plain Lightning resumes from the tensor-parallel file
    assert watch.losses == pytest.approx(baseline.losses[STEPS:], rel=REL) and len(watch.losses) == STEPS
    baseline.has_weights({n: p.detach() for n, p in trainer.lightning_module.named_parameters()})


def test_all_three_axes_at_once(baseline: Baseline) -> None:
    """Pipeline x data x tensor, two ranks on each axis, so that a rank's neighbours differ between axes."""
    case = {"devices": 8, "strategy": {"pipeline_parallel_size": 2, "num_microbatches": 2}, "style": "sequence"}
    found = [of_rank[0] for of_rank in launch(8, "tensor_parallel_cases:run_all", [case], timeout_s=200)]
    assert sorted(f["coordinate"] for f in found) == [(p, d, t) for p in (0, 1) for d in (0, 1) for t in (0, 1)]
    assert found[0]["grid"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    baseline.is_met_by(found)


def test_the_gpt_of_the_recipes_shares_itself_out(tmp_path: Path) -> None:
    """Built without memory: the weights of one process with the strategy. Built in __init__: those of plain Lightning."""
    pipeline = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    folder = tmp_path / "folder.ckpt"
    cases: list[dict[str, Any]] = [
        {"strategy": pipeline, "style": "gpt", "save": folder},
        {"strategy": pipeline, "style": "tied"},
        {"strategy": {"pipeline_parallel_size": 1}, "style": "gpt", "ckpt_path": folder},
    ]
    ranks = launch(4, "tensor_parallel_cases:run_all", [{"devices": 4, **case} for case in cases], timeout_s=150)
    found = [[of_rank[index] for of_rank in ranks] for index in range(len(cases))]
    alone = Baseline(HolmesStrategy(), style="gpt")
    alone.is_met_by(found[0])
    assert all(len(f["weights"]) < len(alone.weights) for f in found[0]), "a stage has all weights"
    Baseline(style="tied").is_met_by(found[1])
    alone.is_met_by(found[2], skip=STEPS)


def test_two_processes(baseline: Baseline) -> None:
    """A tensor-parallel group alone: clipped by norm and by value; dropout; 16-mixed, whose first steps overflow (16-bit sums
    are taken in another order: 1e-3); a module that is sharded wrongly or not at all is refused."""
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    cases: list[dict[str, Any]] = [
        {"strategy": {}},
        {"strategy": {"num_microbatches": 2}, "style": "sequence", **by_value},
        {"strategy": {}, "style": "dtensor", "dropout": 0.1},
        {"strategy": {}, "scale": 2.0**20},
        {"strategy": {}, "style": "wrong", "refused": True},
        {"strategy": {}, "style": "none", "refused": True},
    ]
    ranks = launch(2, "tensor_parallel_cases:run_all", [{"devices": 2, **case} for case in cases], timeout_s=120)
    baseline.is_met_by([found[0] for found in ranks])
    Baseline(**by_value).is_met_by([found[1] for found in ranks])
    Baseline(HolmesStrategy(), dropout=0.1).is_met_by([found[2] for found in ranks])
    scaled, watch = train("auto", scale=2.0**20)
    for *_, found, _, _ in ranks:
        assert found["losses"] == pytest.approx(watch.losses, rel=1e-3) and found["scale"] == scale_of(scaled)
        assert found["norms"] == pytest.approx(watch.norms, rel=1e-3, nan_ok=True)
    assert 0 < sum(map(math.isfinite, watch.norms)) < len(watch.norms), "some steps overflow, and some do not"
    for *_, refusal, nothing in ranks:
        assert "no parameter of Words is sharded" in nothing
        assert "the gradients of blocks.1.norm.bias (and 1 more parameters) differ between the ranks" in refusal
        assert "SequenceParallel()" in refusal


def test_without_a_mesh_the_module_is_whole() -> None:
    module: LightningModule = Words()
    module.configure_model()
    assert all(type(p) is torch.nn.Parameter for p in module.parameters())
