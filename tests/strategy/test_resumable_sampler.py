"""A stateful loader with a random order resumes in mid-epoch with the samples that the uninterrupted run has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from quiet import quiet_trainer
from torch.utils.data import TensorDataset

STOP = 5  # of the 8 batches that each of two replicas has in two epochs
CASES: dict[str, dict[str, Any]] = {
    "shuffle": {"shuffle": True},
    "shuffle, workers": {"shuffle": True, "num_workers": 1},
    "torch's sampler": {"sampler": lambda data: torch.utils.data.RandomSampler(data)},
    "from the process's generator": {"sampler": lambda data: torch.utils.data.SubsetRandomSampler(range(len(data)))},
}


def resume_all(folder: str) -> dict[str, Any]:
    """Return by case the batches of a run, and of one that resumes in its middle with another seed; runs in each of two processes."""
    import lightning.pytorch as pl
    from tanh_net import TanhNet
    from torch import Tensor
    from torchdata.stateful_dataloader import StatefulDataLoader

    from lightning_holmes import HolmesStrategy

    seen: list[list[float]] = []

    class Module(TanhNet):
        def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
            seen.append(batch[0].flatten().tolist())

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == STOP and self.trainer.ckpt_path is None:
                self.trainer.save_checkpoint(path)

    def train(seed: int, options: dict[str, Any], ckpt_path: Path | None = None) -> list[list[float]]:
        seen.clear()
        pl.seed_everything(seed, verbose=False)
        data = TensorDataset(torch.arange(32.0)[:, None])
        made = {name: value(data) if callable(value) else value for name, value in options.items()}
        trainer = quiet_trainer(HolmesStrategy(pipeline_parallel_size=1, num_microbatches=1), devices=2, max_epochs=2)
        trainer.fit(Module(1, 4, 4), StatefulDataLoader(data, 4, **made), ckpt_path=ckpt_path)
        return [list(batch) for batch in seen]

    results = {}
    for name, options in CASES.items():
        path = Path(folder) / f"{name}.ckpt"
        results[name] = train(7, options), train(8, options, path)
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch(2, "test_resumable_sampler:resume_all", str(tmp_path_factory.mktemp("resumed")))


@pytest.mark.xdist_group("strategy_resumable_sampler")
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_replica_gets_the_samples_that_were_left(case: str, runs: Any) -> None:
    whole = [result[case][0] for result in runs]
    for batches, resumed in zip(whole, (result[case][1] for result in runs), strict=True):
        assert len(batches) == 8 and batches[:4] != batches[4:]
        assert resumed == batches[STOP:]
    for epoch in (slice(0, 4), slice(4, 8)):
        assert sorted(x for batches in whole for batch in batches[epoch] for x in batch) == list(range(32))
