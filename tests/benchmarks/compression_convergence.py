"""Train a tiny GPT with and without compressed gradients and activations, and print the table of
docs/gradient-sync.md.

    python tests/benchmarks/compression_convergence.py --steps 400 --seeds 3

Two processes, each in its own cluster: two replicas, whose gradients cross the link between clusters, or two stages,
whose activations do. Every row trains on the same windows, from the same weights, with the same number of steps.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "benchmarks")]

from launch import launch  # noqa: E402

ROWS: dict[str, dict[str, Any]] = {
    "gradients as they are": {"pipeline_parallel_size": 1},
    'compression="bf16"': {"pipeline_parallel_size": 1, "compression": "bf16"},
    'compression="fp16"': {"pipeline_parallel_size": 1, "compression": "fp16"},
    'compression="powersgd", rank 1': {"pipeline_parallel_size": 1, "compression": "powersgd", "powersgd_rank": 1},
    'compression="powersgd", rank 4': {"pipeline_parallel_size": 1, "compression": "powersgd", "powersgd_rank": 4},
    'grad_dtype="bf16"': {"pipeline_parallel_size": 1, "grad_dtype": "bf16"},
    "activations as they are": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    'activation_dtype="bf16"': {"pipeline_parallel_size": 2, "num_microbatches": 2, "activation_dtype": "bf16"},
}


def train_all(payload: tuple[int, int]) -> dict[str, list[tuple[float, float]]]:
    """Return, by row and seed, the mean loss of the last tenth of the steps and the validation loss."""
    steps, seeds = payload
    return {name: [train(options, steps, seed) for seed in range(seeds)] for name, options in ROWS.items()}


def train(options: dict[str, Any], steps: int, seed: int) -> tuple[float, float]:
    """Train once in this process, together with the other process."""
    from lightning.pytorch import Callback, Trainer, seed_everything

    from lightning_holmes import HolmesStrategy
    from lightning_holmes.cluster.topology import Cluster, Host, Topology
    from lightning_holmes.data import FileBytes
    from lightning_holmes.models import GPT

    class Losses(Callback):
        """Records the loss of every step."""

        def __init__(self) -> None:
            self.found: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.found.append(float(trainer.callback_metrics["train_loss"]))

    seed_everything(seed, verbose=False)
    clusters = tuple(Cluster(name=name, hosts=(Host(name=name, devices=1),)) for name in ("a", "b"))
    strategy = HolmesStrategy(topology=Topology(clusters=clusters), **options)
    losses = Losses()
    replicas = 2 // options["pipeline_parallel_size"]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        limit_val_batches=16 // replicas,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    module = GPT(hidden_size=64, num_layers=4, num_heads=4, sequence_length=64, learning_rate=3e-3, warmup_steps=20)
    data = FileBytes("stdlib", sequence_length=64, batch_size=16 // replicas, max_bytes=2_000_000)
    trainer.fit(module, datamodule=data)
    tail = losses.found[-max(1, steps // 10) :]
    return statistics.mean(tail), float(trainer.callback_metrics["val_loss"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    first, _ = launch(2, "compression_convergence:train_all", (given.steps, given.seeds), timeout_s=1200)
    print("| setting | loss of the last tenth | validation loss | worst difference of a seed |")
    print("|---|---|---|---|")
    base: list[tuple[float, float]] = []
    for name, runs in first.items():
        if name.endswith("as they are"):
            base = runs
        training, validation = (statistics.mean(values) for values in zip(*runs, strict=True))
        worst = max((mine[1] - theirs[1] for mine, theirs in zip(runs, base, strict=True)), key=abs)
        print(f"| {name} | {training:.4f} | {validation:.4f} | {worst:+.4f} |")


if __name__ == "__main__":
    main()
