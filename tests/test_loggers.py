"""The records that RunRecord writes during a run."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.loggers import RunRecord, WandbLogger
from lightning_holmes.plan.groups import GroupPlan
from lightning_holmes.plan.partition import make_uniform_partition
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.plan import Plan


def test_every_logger_gets_the_groups_with_their_transports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reason = "ethernet: the interface that reaches the master"
    plan = Plan(
        pipeline_parallel_size=2,
        data_parallel_size=1,
        num_microbatches=4,
        eval_num_microbatches=1,
        schedule="1f1b",
        num_chunks=1,
        layers="layers",
        partition=make_uniform_partition(4, 2),
        placement=Placement(((0,), (1,))),
        clusters=("a", "b"),
        groups=(GroupPlan(name="world", axis="world", ranks=(0, 1), transport="gloo on eth0", reason=reason),),
    )
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
