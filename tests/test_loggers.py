"""The records that RunRecord writes during a run."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from plans import plan_of

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.loggers import RunRecord, WandbLogger
from lightning_holmes.plan.groups import GroupPlan


def test_every_logger_gets_the_groups_with_their_transports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reason = "ethernet: the interface that reaches the master"
    group = GroupPlan(name="world", axis="world", ranks=(0, 1), transport="gloo on eth0", reason=reason)
    plan = plan_of((0,), (1,), stages=(2, 2), groups=(group,))
    monkeypatch.setenv("WANDB_MODE", "offline")
    tables: dict[str, Any] = {}
    wandb = WandbLogger(save_dir=tmp_path, offline=True)
    monkeypatch.setattr(wandb, "log_table", lambda key, columns, data: tables.update({key: [columns, *data]}))
    config: dict[str, Any] = {}
    fake = SimpleNamespace(config=SimpleNamespace(update=lambda facts, **_: config.update(facts)))
    monkeypatch.setattr(WandbLogger, "experiment", fake)
    loggers = [TensorBoardLogger(tmp_path, "board"), CSVLogger(tmp_path, "csv"), wandb]
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(plan=plan), loggers=loggers, fast_dev_run=False, is_global_zero=True
    )
    record = RunRecord()
    record.on_fit_start(trainer, None)  # type: ignore[arg-type]
    record.on_train_batch_end(trainer, None)  # type: ignore[arg-type]
    row = ["world", "gloo on eth0", reason, "ranks 0-1"]
    assert tables["groups"] == [["for", "transport", "reason", "ranks"], row] and "plan" in tables
    assert config["plan"]["groups"][0]["reason"] == reason
    saved = yaml.safe_load((Path(str(loggers[1].log_dir)) / "plan.yaml").read_text())
    assert saved["groups"][0]["transport"] == "gloo on eth0"
    loggers[0].experiment.flush()  # type: ignore[attr-defined]
    events = accumulator.EventAccumulator(str(loggers[0].log_dir))
    events.Reload()
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "|" + "|".join(row) + "|" in texts["groups/text_summary"].splitlines()
    assert "plan/text_summary" in texts


def test_without_wandb_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"WandbLogger needs .*pip install 'lightning-holmes\[wandb\]'"):
        WandbLogger(project="mine")
