"""A user's script for a job that torchrun starts again: python restarted_node_script.py OPTIONS, as JSON; see
snapshot_cases.train.

A process that OPTIONS names is killed in the first attempt only. With optimizer nodes, snapshots are taken before every
step, whatever they cost.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from snapshot_cases import digest_of, train

from lightning_holmes.checkpoint.snapshot_folder import SnapshotManager
from lightning_holmes.strategy import snapshots


class AtStart(Callback):
    """Writes down the digest of the weights that hooks see when a fit begins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.path.write_text(digest_of(module))


def run(options: dict[str, Any]) -> None:
    """Run one start of a worker or of an optimizer node."""
    snapshots._PAUSE_SHARE = float("inf")
    SnapshotManager.is_writing = False
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0":
        options.pop("kill", None)
    at_start = AtStart(Path(options["folder"], f"start.{options['name']}.{os.environ['RANK']}"))
    digest = train(options, [at_start])
    Path(options["folder"], f"digest.{options['name']}.{os.environ['RANK']}").write_text(digest)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
