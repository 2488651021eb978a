"""schedule="auto" measures a split backward in the first batches, and continues with the schedule that all ranks have chosen."""

from typing import Any

import pytest
from launch import launch


def fit(options: dict[str, Any]) -> dict[str, Any]:
    """Train in each process; the choice that is ``forced`` is taken whatever was measured."""
    import lightning.pytorch as pl
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_holmes import HolmesStrategy
    from lightning_holmes.plan.split_choice import SplitChoice, choose_split
    from lightning_holmes.strategy import split_trial

    class Stack(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            hidden = batch[0]
            for layer in self.layers:
                hidden = torch.tanh(layer(hidden))
            return hidden.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    measured: list[Any] = []

    def choose(stages: Any, **sizes: Any) -> SplitChoice:
        measured.extend(stages)
        choice = choose_split(stages, **sizes)
        forced = options["forced"]
        return choice if forced is None else SplitChoice(schedule=forced, reason=f"{forced}: forced; {choice.reason}")

    split_trial.choose_split = choose  # type: ignore[attr-defined]
    pl.seed_everything(1, verbose=False)
    module, losses = Stack(), []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    strategy: Any = "auto"
    if options["pipeline"]:
        strategy = HolmesStrategy(pipeline_parallel_size=2, num_microbatches=4, num_chunks=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if options["pipeline"] else 1,
        strategy=strategy,
        max_epochs=1,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(48, 16, generator=torch.Generator().manual_seed(2))
    plan = None
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=8))
    if isinstance(trainer.strategy, HolmesStrategy):
        plan = trainer.strategy.plan
    return {
        "losses": losses,
        "weights": [float(p.detach().double().sum()) for p in module.parameters()],
        "schedule": None if plan is None else plan.schedule,
        "notes": [] if plan is None else list(plan.notes),
        "ratios": [None if stage is None else stage.ratio for stage in measured],
    }


@pytest.mark.parametrize("forced", ["zero_bubble", None])
def test_the_first_batches_measure_and_the_run_goes_on_by_the_choice_with_the_same_numbers(forced: str | None) -> None:
    plain = fit({"pipeline": False, "forced": None})
    for found in launch(2, "test_split_trial:fit", {"pipeline": True, "forced": forced}, timeout_s=100):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert found["weights"] == pytest.approx(plain["weights"], rel=1e-5)
        chosen = {"1f1b", "eager_1f1b", "zero_bubble", "eager_zero_bubble"} if forced is None else {forced}
        assert found["schedule"] in chosen
        assert any(n.startswith(f"schedule: {found['schedule']}") and "whole one" in n for n in found["notes"])
        assert found["ratios"][0] == pytest.approx(1.0) and found["ratios"][1] > 0
