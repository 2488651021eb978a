"""Sharded parameters on each of two pipeline ranks: what is done between and after steps works as with one pipeline rank.

Four processes, two stages with two replicas. Baseline: plain Lightning in one process, 1e-5 (fp32) of the largest entry.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_same, state_of
from launch import launch
from quiet import saves
from sharded_parameter_cases import LAYERED, Data, Watching, build, make_trainer, run_late

from lightning_holmes.checkpoint import read_state_dict

STAGES = {"sharding": "parameters", "pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS = {"shards": STAGES, "chunks": {**STAGES, "num_chunks": 2}, "one stage": LAYERED}


class Reading(Watching):
    """Reads and changes weights of both stages, on all ranks."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Do not sample: a rank can run the layers of its own stages only."""


def watched(folder: Path, epochs: int, **strategy: Any) -> Any:
    """Train with a callback that reads and changes weights; return the weights, the norms that the callback read, and the validation loss."""
    module, trainer, reading = build(), make_trainer(folder, epochs, **strategy), Reading()
    trainer.callbacks.append(reading)  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=Data())
    return state_of(module), reading.norms, float(trainer.callback_metrics["val_loss"])


def run(name: str) -> dict[str, Any]:
    """Return what each of the four processes finds, by name."""
    folder = Path(name)
    found: dict[str, Any] = {}
    for kind, folders in (("folder", True), ("file", False)):
        module, trainer = build(), make_trainer(folder, save_distributed_checkpoint=folders, **STAGES)
        trainer.callbacks.append(saves(folder / f"{kind}.ckpt"))  # type: ignore[attr-defined]
        trainer.fit(module, datamodule=Data())
        found[f"fit {kind}"] = state_of(module)
        found[f"validate {kind}"] = trainer.validate(module, datamodule=Data(), verbose=False)[0]["val_loss"]
    for source in ("folder", "file", "plain"):
        for kind, layout in LAYOUTS.items() if source == "folder" else [("shards", STAGES)]:
            module, trainer = build(), make_trainer(folder, 2, **layout)
            trainer.fit(module, datamodule=Data(), ckpt_path=folder / f"{source}.ckpt")
            found[f"{source} to {kind}"] = state_of(module)
    found["watched"] = watched(folder, 2, **STAGES)
    (folder / "late").mkdir(exist_ok=True)
    found["late"] = run_late(folder / "late", "adamw", **STAGES)
    return found


def test_checkpoints_evaluation_and_hooks_are_those_of_plain_lightning(tmp_path: Path) -> None:
    module, trainer = build(), make_trainer(tmp_path)
    trainer.fit(module, datamodule=Data())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    fit, loss = state_of(module), trainer.validate(module, datamodule=Data(), verbose=False)[0]["val_loss"]
    module = build()
    make_trainer(tmp_path, 2).fit(module, datamodule=Data())
    two_epochs, (state, norms, watched_loss) = state_of(module), watched(tmp_path, 2)
    alone = tmp_path / "alone"
    alone.mkdir()
    late = run_late(alone, "adamw", num_microbatches=2)
    late.pop("blank")
    ranks = launch(4, f"{__name__}:run", str(tmp_path), timeout_s=240)
    for rank in ranks:
        for kind in ("folder", "file"):
            assert_same(rank[f"fit {kind}"], fit)
            assert rank[f"validate {kind}"] == pytest.approx(loss, rel=1e-5)
        for name in rank:
            if " to " in name:
                assert_same(rank[name], two_epochs)
        assert_same(rank["watched"][0], state)
        assert rank["watched"][1] == pytest.approx(norms, rel=1e-5)
        assert rank["watched"][2] == pytest.approx(watched_loss, rel=1e-5)
        assert rank["late"].pop("blank") == len(list(build().parameters())), "no rank has a parameter after the fit"
        values = {name: value for name, value in late.items() if "predicted" not in name}
        assert {name: rank["late"][name] for name in values} == pytest.approx(values, rel=1e-5)
    written = read_state_dict(tmp_path / "late" / "folder-evaluated.ckpt")
    assert_same(written, torch.load(alone / "file.ckpt", weights_only=True)["state_dict"] | {"seen": written["seen"]})
    loaded = torch.load(tmp_path / "file.ckpt", weights_only=True)["state_dict"]
    assert_same(loaded, fit)
