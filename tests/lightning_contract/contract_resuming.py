"""Checkpoints: what they contain, what a fit or an evaluation restores from them, and how modules are made from them."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from comparing import state_of
from contract import PLAIN, Run, each
from contract_models import Batches, Net, batches
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch.optim.lr_scheduler import ExponentialLR


def one_file(run: Run) -> dict[str, Any]:
    """Return Trainer options with which a checkpoint is one file, as plain Lightning writes it."""
    return {} if run.layout == PLAIN else {"strategy": run.strategy(save_distributed_checkpoint=False)}


class Full(Net):
    """A module with hyper-parameters, a scheduler, a buffer, and its own entries in checkpoints."""

    def __init__(self, size: int = 3, word: str = "one") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("seen", torch.zeros(()))
        self.loaded: list[Any] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["mine"] = {"seen": float(self.seen)}

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.loaded.append((checkpoint["mine"]["seen"], checkpoint["epoch"], checkpoint["global_step"]))


def fitted(run: Run, **options: Any) -> tuple[Full, Path]:
    """Train one epoch; return the module and its checkpoint, a single file."""
    module = Full()
    trainer = run.fit(module, **one_file(run), **options)
    trainer.save_checkpoint(run.folder / "full.ckpt")
    run.meet()
    return module, run.folder / "full.ckpt"


def case_a_checkpoint_holds_the_run(run: Run):
    module, path = fitted(run)
    found = torch.load(path, weights_only=True)
    keys = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks", "optimizer_states"}
    assert keys | {"lr_schedulers", "hparams_name", "hyper_parameters", "mine"} <= found.keys()
    assert (found["epoch"], found["global_step"]) == (1, 4)
    assert found["hyper_parameters"] == {"size": 3, "word": "one"}
    assert list(found["state_dict"]) == list(module.state_dict())
    assert len(found["optimizer_states"]) == len(found["lr_schedulers"]) == 1
    return found["state_dict"], found["optimizer_states"], found["lr_schedulers"], found["loops"], found["mine"]


@each(one_file=True, as_by_default=False)
def case_a_fit_goes_on_where_it_was(run: Run, plain_file: bool):
    """Two epochs in one fit equal one epoch and a second one that is resumed from a checkpoint."""
    options = one_file(run) if plain_file else {}
    whole, half, rest = Full(), Full(), Full()
    for other in (half, rest):
        other.load_state_dict(whole.state_dict())
    run.fit(whole, max_epochs=2, **(one_file(run) if plain_file else {}))
    trainer = run.fit(half, **options)
    trainer.save_checkpoint(run.folder / "half.ckpt")
    run.meet()
    trainer = run.trainer(max_epochs=2, **(one_file(run) if plain_file else {}))
    trainer.fit(rest, batches(), batches(2), ckpt_path=run.folder / "half.ckpt")
    assert (trainer.current_epoch, trainer.global_step) == (2, 8)
    assert rest.loaded == [(4.0, 1, 4)] and float(rest.seen) == 8
    for name, value in state_of(whole).items():
        torch.testing.assert_close(state_of(rest)[name], value)
    return state_of(rest), trainer.optimizers[0].param_groups[0]["lr"]


def case_a_fit_goes_on_within_an_epoch(run: Run):
    checkpoint = ModelCheckpoint(run.folder / "kept", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    run.fit(Full(), callbacks=[checkpoint], max_epochs=1)
    seen = Batches()
    module = Full()
    trainer = run.fit(module, callbacks=[seen], ckpt_path=run.folder / "kept" / "step=2.ckpt", max_epochs=1)
    assert trainer.global_step == 4
    assert len(seen.train) == 2
    return seen.train, state_of(module)


@each(last="last", best="best")
def case_checkpoints_are_found_by_a_word(run: Run, word: str):
    checkpoint = ModelCheckpoint(run.folder / "kept", monitor="val_loss", save_last=True)
    trainer = run.fit(Full(), batches(), batches(2), callbacks=[checkpoint], max_epochs=2)
    module = Full()
    if word == "last":
        again = ModelCheckpoint(run.folder / "kept", save_last=True)
        trainer = run.fit(module, batches(), batches(2), callbacks=[again], ckpt_path="last", max_epochs=3)
        assert trainer.global_step == 12
    else:
        results = trainer.validate(module, batches(2), ckpt_path="best", verbose=False)
        assert results[0]["val_loss"] == pytest.approx(float(checkpoint.best_model_score), rel=1e-5)
        assert trainer.ckpt_path == checkpoint.best_model_path


@each(validate="validate", test="test", predict="predict")
def case_an_evaluation_takes_the_weights(run: Run, entry: str):
    module, path = fitted(run)
    fresh = Full()
    results = getattr(run.trainer(), entry)(fresh, batches(2), ckpt_path=path)
    for name, value in state_of(module).items():
        torch.testing.assert_close(state_of(fresh)[name], value)
    return results


def case_weights_of_another_module_are_refused(run: Run):
    _, path = fitted(run)
    with pytest.raises(Exception, match="seen"):
        run.trainer().validate(Net(), batches(1), ckpt_path=path)


def case_a_lax_module_takes_what_there_is(run: Run):
    module, path = fitted(run)
    lax = Net()
    lax.strict_loading = False
    run.trainer().validate(lax, batches(1), ckpt_path=path, verbose=False)
    torch.testing.assert_close(state_of(lax)["layers.0.weight"], state_of(module)["layers.0.weight"])


class Data(pl.LightningDataModule):
    """A data module whose state is a word."""

    def __init__(self, word: str = "") -> None:
        super().__init__()
        self.word = word

    def train_dataloader(self) -> Any:
        return batches(2)

    def state_dict(self) -> dict[str, Any]:
        return {"word": self.word}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.word = state["word"]


def case_a_data_module_s_state_goes_through(run: Run):
    trainer = run.trainer()
    trainer.fit(Net(), datamodule=Data("kept"))
    trainer.save_checkpoint(run.folder / "data.ckpt")
    run.meet()
    data = Data()
    trainer = run.trainer(max_epochs=2)
    trainer.fit(Net(), datamodule=data, ckpt_path=run.folder / "data.ckpt")
    assert data.word == "kept"


class Counting(TorchCheckpointIO):
    """A checkpoint plugin that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        self.calls.append("save")
        super().save_checkpoint(*args, **options)

    def load_checkpoint(self, *args: Any, **options: Any) -> Any:
        self.calls.append("load")
        return super().load_checkpoint(*args, **options)

    def remove_checkpoint(self, *args: Any) -> None:
        self.calls.append("remove")
        super().remove_checkpoint(*args)


def case_a_plugin_writes_and_reads(run: Run):
    plugin = Counting()
    checkpoint = ModelCheckpoint(run.folder / "kept", filename="{epoch}")
    run.fit(Net(), callbacks=[checkpoint], plugins=[plugin], max_epochs=2)
    assert plugin.calls == (["save", "save", "remove"] if run.is_first else [])
    run.meet()
    run.fit(Net(), plugins=[plugin], max_epochs=3, ckpt_path=run.folder / "kept" / "epoch=1.ckpt")
    assert plugin.calls[-1] == "load"


def case_a_plugin_may_write_in_the_background(run: Run):
    checkpoint = ModelCheckpoint(run.folder / "kept", filename="{epoch}")
    run.fit(Net(), callbacks=[checkpoint], plugins=[AsyncCheckpointIO()])
    assert run.files("kept/*.ckpt") == ["kept/epoch=0.ckpt"]
    run.meet()
    assert torch.load(run.folder / "kept" / "epoch=0.ckpt", weights_only=True)["global_step"] == 4
