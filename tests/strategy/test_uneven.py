"""Data that end at different places on different ranks, and a rank that stops alone: every rank raises the error, and all end soon."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from launch import Worker, launch_raw
from quiet import quiet_trainer

LIMIT_S = 90.0  # for a process with its start, which takes 20 s on a busy machine; far below the timeout of 30 minutes
# by case: the number of pipeline ranks, the batches of each of the two ranks, and words of the error
CASES: dict[str, tuple[int, tuple[int, int], tuple[str, ...]]] = {
    "stages, iterable": (2, (5, 4), ("data for training_step end unevenly", "pipeline rank 1 has no other")),
    "stages, in validation": (2, (3, 2), ("data for validation_step end unevenly", "pipeline rank 1 has no other")),
    "replicas, iterable": (1, (5, 4), ("end unevenly", "rank 0: has another batch", "rank 1: has no other batch")),
    "replicas, last epoch": (1, (4, 5), ("end unevenly", "rank 0: has no other batch", "limit_train_batches")),
    "one leaves a batch": (1, (9, 9), ("rank 1 has left a training batch", "on_train_batch_start must return -1")),
    "one stops": (1, (9, 9), ("stop at different places", "should_stop set", "reduce_boolean_decision")),
}


def train(payload: dict[str, Any]) -> None:
    """Train with the data of a case."""
    import torch
    from tanh_net import TanhNet
    from torch import Tensor
    from torch.utils.data import DataLoader, IterableDataset

    from lightning_holmes import HolmesStrategy

    case, rank = payload["case"], int(os.environ["RANK"])
    size, lengths, _ = CASES[case]

    class Batches(IterableDataset[Tensor]):
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Iterator[Tensor]:
            generator = torch.Generator().manual_seed(1)
            yield from (torch.randn(4, 8, generator=generator) for _ in range(self.count))

    class Module(TanhNet):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("loss", self.training_step(batch, batch_idx))

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            if case.endswith("leaves a batch") and batch_idx == 3:
                return -1 if self.current_epoch == 0 or rank == 1 else None
            return None

        def on_train_batch_end(self, *_: Any) -> None:
            if case.endswith("stops") and rank == 1 and self.global_step == 3:
                self.trainer.should_stop = True

    torch.manual_seed(0)
    trainer = quiet_trainer(
        HolmesStrategy(pipeline_parallel_size=size, num_microbatches=2),
        devices=2,
        max_epochs=1 if case.endswith("last epoch") else 2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    validation = DataLoader(Batches(lengths[rank] if case.endswith("in validation") else 2), batch_size=None)
    count = 2 if case.endswith("in validation") else lengths[rank]
    print("BEGINS", time.time(), flush=True)
    trainer.fit(Module(8, 8, 8), DataLoader(Batches(count), batch_size=None), validation)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Worker]]:
    def run(case: str) -> list[Worker]:
        folder = tmp_path_factory.mktemp("uneven")
        return launch_raw(2, "test_uneven:train", {"case": case}, timeout_s=LIMIT_S, folder=folder)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


@pytest.mark.xdist_group("strategy_uneven")
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_and_say_whose_data_end_where(case: str, ended: dict[str, list[Worker]]) -> None:
    for rank, worker in enumerate(ended[case]):
        print(f"rank {rank}: exit {worker.exit_code} after {worker.seconds:.1f} s\n{worker.output[-1500:]}")
        assert worker.exit_code not in (0, None)
        assert "UnevenDataError" in worker.output
    for words in CASES[case][2]:
        assert any(words in worker.output for worker in ended[case]), words
