"""What lies between a strategy's runs: what an ended fit still tells, and what a set-up that failed leaves behind."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import HolmesError


class Stack(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = batch[0]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Broken(Stack):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        raise RuntimeError("planned failure")


def make_trainer(strategy: HolmesStrategy) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)


def saved(trainer: pl.Trainer, path: Path) -> dict[str, Any]:
    trainer.save_checkpoint(path)
    checkpoint: dict[str, Any] = torch.load(path, weights_only=False)
    return checkpoint


def test_an_ended_fit_is_saved_also_after_an_evaluation(tmp_path: Path) -> None:
    strategy = HolmesStrategy()
    trainer, module = make_trainer(strategy), Stack()
    with pytest.raises(HolmesError, match="the plan is made when"):
        _ = strategy.plan
    trainer.fit(module, loader())
    once = saved(trainer, tmp_path / "fit.ckpt")
    plan = strategy.plan
    trainer.validate(module, loader(), verbose=False)
    again = saved(trainer, tmp_path / "validate.ckpt")
    assert strategy.plan.partition == plan.partition
    assert len(once["optimizer_states"][0]["state"]) == len(again["optimizer_states"][0]["state"]) == 8
    assert all(torch.equal(value, again["state_dict"][name]) for name, value in once["state_dict"].items())


def test_a_module_that_was_never_run_is_saved_as_lightning_does(tmp_path: Path) -> None:
    trainer, module = make_trainer(HolmesStrategy()), Stack()
    trainer.strategy.connect(module)
    assert set(saved(trainer, tmp_path / "new.ckpt")["state_dict"]) == set(module.state_dict())


def test_a_set_up_that_fails_half_way_is_undone_and_the_next_run_is_a_whole_one() -> None:
    strategy = HolmesStrategy()
    trainer, module = make_trainer(strategy), Broken()
    with pytest.raises(RuntimeError, match="planned failure"):
        trainer.fit(module, loader())
    assert not any("forward" in vars(layer) for layer in module.layers)
    again = Stack()
    trainer.fit(again, loader())
    assert trainer.global_step == 4 and strategy.plan.num_stages == 1
