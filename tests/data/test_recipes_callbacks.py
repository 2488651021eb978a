"""Throughput, RunSummary and SampleText in plain Lightning."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from quiet import quiet_trainer

from lightning_holmes.errors import ConfigurationError
from recipes import callbacks as run_report
from recipes.callbacks import RunSummary, SampleText, Throughput
from recipes.gpt import GPT
from recipes.text import FileBytes


def fit(tmp_path, callbacks: list[Callback], model: LightningModule | None = None, **kwargs) -> Trainer:
    data = None
    if model is None:
        (tmp_path / "text.txt").write_bytes(b"the cat sat on the mat. " * 40)
        data = FileBytes(str(tmp_path / "text.txt"), sequence_length=16, batch_size=4)
        model = GPT(hidden_size=16, num_layers=1, num_heads=2, sequence_length=16)
    options = {"max_steps": 4, "val_check_interval": 2}
    trainer = quiet_trainer(
        devices=1, callbacks=callbacks, default_root_dir=tmp_path, log_every_n_steps=1, **{**options, **kwargs}
    )
    trainer.fit(model, data)
    return trainer


class Clock(Callback):
    """The clock that Throughput reads: steps of one length, a slow first step, and slow validation."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now_s += 0.5 if trainer.global_step == 0 else 0.02

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now_s += 0.2


def test_throughput_counts_tokens_over_steps_alone(tmp_path, monkeypatch):
    throughput, clock = Throughput(window=2), Clock()
    monkeypatch.setattr(run_report, "time", clock)
    trainer = fit(tmp_path, [throughput, clock], max_steps=6)
    assert throughput.mean_per_s == pytest.approx(4 * 16 / 0.02), "neither the first step nor validation is in it"
    assert trainer.callback_metrics["tokens_per_s"] == pytest.approx(4 * 16 / 0.02)


def test_throughput_of_samples_and_through_a_second_fit(tmp_path):
    throughput = Throughput()
    for _ in range(2):
        trainer = fit(tmp_path, [throughput], BoringModel(), max_steps=3)
        assert throughput.unit == "samples" and throughput.mean_per_s > 0
        assert trainer.callback_metrics["samples_per_s"] > 0


def test_summary_names_checkpoints_loggers_and_losses(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("WANDB_SILENT", "true")
    loggers = [
        WandbLogger(save_dir=tmp_path / "w", offline=True),
        CSVLogger(tmp_path / "c"),
        TensorBoardLogger(tmp_path / "t"),
    ]
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "ckpt", filename="best", monitor="val_loss", save_last=True)
    fit(tmp_path, [RunSummary(), Throughput(), checkpoint], logger=loggers, enable_checkpointing=True)
    out = capsys.readouterr().out
    whole = "".join(c for c in out if c.isalnum() or c in "/._-")  # the table wraps long paths over several lines
    for text in ("train_loss", "val_loss", "tokens/s, mean", "seconds", "offline-run-", "lightning_logs"):
        assert text in out or text in whole
    assert str(tmp_path / "ckpt" / "best.ckpt") in whole
    assert str(tmp_path / "ckpt" / "last.ckpt") in whole
    for folder in "wct":
        assert str(tmp_path / folder) in whole


def test_sample_text_is_written_by_the_checkpoint(tmp_path, capsys):
    class Forget(Callback):
        """Makes the weights on this rank useless: the text must come from the file."""

        def on_train_end(self, trainer, pl_module):
            torch.nn.init.constant_(pl_module.head.weight, float("nan"))

    checkpoint = ModelCheckpoint(dirpath=tmp_path / "ckpt", save_last=True, every_n_train_steps=2)
    sample = SampleText(prompt="the ", num_bytes=30)
    trainer = fit(tmp_path, [sample, checkpoint, Forget()], enable_checkpointing=True)
    assert "last.ckpt" in capsys.readouterr().out
    text, source = sample.sample(trainer, trainer.lightning_module)
    assert text.startswith("the ") and len(text) > 4
    assert source.endswith("last.ckpt")


def test_sample_text_from_memory(tmp_path, capsys):
    fit(tmp_path, [SampleText(num_bytes=10)])
    assert "from memory" in capsys.readouterr().out


def test_sample_text_never_ends_a_run(tmp_path):
    with pytest.warns(UserWarning, match="BoringModel has no method generate"):
        fit(tmp_path, [SampleText()], BoringModel(), max_steps=1)

    class Broken(GPT):
        def generate(self, *args):
            raise RuntimeError("broken inside")

    (tmp_path / "text.txt").write_bytes(b"abc" * 100)
    model = Broken(hidden_size=16, num_layers=1, num_heads=2, sequence_length=16)
    data = FileBytes(str(tmp_path / "text.txt"), sequence_length=16, batch_size=4)
    data.setup()
    model.train_dataloader = data.train_dataloader
    with pytest.warns(UserWarning, match="broken inside"):
        fit(tmp_path, [SampleText()], model, max_steps=1, val_check_interval=1.0)


def test_bad_options_are_named():
    with pytest.raises(ConfigurationError, match="window=0"):
        Throughput(window=0)
    with pytest.raises(ConfigurationError, match="prompt=''"):
        SampleText(prompt="")
