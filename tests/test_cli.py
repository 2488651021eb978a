"""lightning-holmes: the parser, the recipe's files, check's arguments and exit codes, and error messages."""

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import lightning_holmes
from lightning_holmes.cli import main
from lightning_holmes.commands import REMOVED
from recipes.gpt import GPT

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/gpt_tiny/config.yaml"
SMALL = ["--model.init_args.hidden_size=16", "--model.init_args.num_layers=2", "--data.init_args.max_bytes=50000"]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning-holmes"])


def run(capsys, *args: str) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of one command."""
    code = 0
    try:
        main(list(args))
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def done(capsys, *args: str) -> str:
    """Run a command that succeeds, and return its stdout."""
    code, out, err = run(capsys, *args)
    assert code == 0, err
    return out


def refused(capsys, *args: str, says: Sequence[str] = ()) -> str:
    """Run a command that is refused with a message that contains all of ``says``; return the message."""
    code, _, err = run(capsys, *args)
    assert code == 2 and "Traceback" not in err and all(words in err for words in says), err
    return err


def planned(capsys, *args: str) -> dict[str, Any]:
    """Run a command that succeeds, and return its JSON."""
    out = done(capsys, *args)
    return json.loads(out[out.index("{") :])


@pytest.fixture
def checked(monkeypatch):
    """Replace lightning_holmes.check by a function that records its arguments."""
    calls = []

    def check(module, batch, **kwargs):
        calls.append((module, batch, kwargs))
        return SimpleNamespace(ok=kwargs["num_microbatches"] != 3, print=lambda: print("THE TABLE"))

    monkeypatch.setattr(lightning_holmes, "check", check, raising=False)
    return calls


def test_version_and_help(capsys):
    assert done(capsys, "--version").strip() == f"lightning-holmes {version('lightning-holmes')}"
    shown = done(capsys, "--help")
    assert all(f"  {command} " in shown for command in ("fit", "validate", "test", "predict", "check")), shown
    shown = done(capsys, "check", "--help")
    assert "--pipeline_parallel_size" in shown and "--num_microbatches" in shown


def test_wrong_options_are_named(capsys):
    assert len(refused(capsys, "fit", "--no_such_option=1", says=["no_such_option"]).splitlines()) < 6
    # Lightning's own refusals, too
    refused(capsys, "fit", "--config", RECIPE, "--trainer.enable_progress_bar=false", says=["TQDMProgressBar"])
    refused(capsys, "train", says=["train"])


@pytest.mark.parametrize("gone", REMOVED)
def test_what_is_gone_is_refused_with_what_to_do_instead(gone, capsys):
    said = f"ConfigurationError: lightning-holmes {gone} is gone: {REMOVED[gone]}"
    refused(capsys, *gone.split(), "--config", RECIPE, says=[said])


def test_errors_of_ours_are_one_message(capsys):
    args = ["fit", "--config", RECIPE, "--model.init_args.hidden_size=30"]
    refused(capsys, *args, says=["ConfigurationError: hidden_size=30"])


def test_recipe_trains_in_plain_lightning(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = yaml.safe_load((ROOT / RECIPE).read_text())
    config["trainer"].update(strategy="auto", devices=1, max_steps=4, val_check_interval=2, limit_val_batches=1)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    out = done(capsys, "fit", "--config", "config.yaml", *SMALL)
    assert "A text by the model" in out and "tokens/s, mean" in out and "offline-run-" in out
    assert Path("runs/gpt_tiny/checkpoints/last.ckpt").exists()
    assert Path("runs/gpt_tiny/config.yaml").is_file()


def test_check_takes_the_strategys_arguments(capsys, checked):
    assert "THE TABLE" in done(capsys, "check", "--config", RECIPE, *SMALL)
    ((module, batch, kwargs),) = checked
    assert isinstance(module, GPT)
    assert batch["input_ids"].shape == (16, 128)
    assert kwargs == {
        "pipeline_parallel_size": 2,  # the topology has two clusters
        "num_microbatches": 4,
        "schedule": "1f1b",
        "num_chunks": 1,
        "layers": "auto",
        "partition": "self_adapting",  # the strategy's own default
    }


def test_check_options_win_and_a_difference_is_exit_code_1(capsys, checked):
    options = ["--num_microbatches=3", "--pipeline_parallel_size=1", "--schedule=gpipe"]
    code, out, err = run(capsys, "check", "--config", RECIPE, *SMALL, *options)
    assert code == 1, err
    assert "THE TABLE" in out
    kwargs = checked[0][2]
    assert [kwargs[name] for name in ("num_microbatches", "pipeline_parallel_size", "schedule")] == [3, 1, "gpipe"]


def test_check_of_a_checkpoint(capsys, checked, tmp_path):
    model = GPT(hidden_size=16, num_layers=2)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "some.ckpt")
    options = ["--trainer.strategy=holmes", f"--ckpt_path={tmp_path / 'some.ckpt'}"]
    done(capsys, "check", "--config", RECIPE, *SMALL, *options)
    torch.testing.assert_close(checked[0][0].state_dict(), model.state_dict())
    assert checked[0][2]["num_microbatches"] == 2  # only a name was given
    command, said = ["check", "--config", RECIPE, *SMALL], "it lacks layers.2.attention_norm.weight"
    refused(capsys, *command, *options, "--model.init_args.num_layers=3", says=[said])
    said = "another model than this GPT: size mismatch for embedding.weight"
    refused(capsys, *command, *options, "--model.init_args.hidden_size=32", says=[said])
    refused(capsys, *command, "--ckpt_path=none.ckpt", says=["none.ckpt"])


def test_check_without_a_model_is_named(capsys, checked):
    refused(capsys, "check", says=["model"])
