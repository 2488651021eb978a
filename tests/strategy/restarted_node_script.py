"""A user's script for a job that torchrun starts again: python restarted_node_script.py OPTIONS, as JSON; see snapshot_cases.train.

What it is told to kill is killed in the first attempt only. Snapshots beside nodes are taken before every step, whatever that costs.
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
    """Writes down with which weights a fit begins, which hooks see."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.path.write_text(digest_of(module))


def run(options: dict[str, Any]) -> None:
    """One start of a worker, or of a node."""
    snapshots._PAUSE_SHARE = float("inf")
    SnapshotManager.is_writing = False
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0":
        options.pop("kill", None)
    at_start = AtStart(Path(options["folder"], f"start.{options['name']}.{os.environ['RANK']}"))
    digest = train(options, [at_start])
    Path(options["folder"], f"digest.{options['name']}.{os.environ['RANK']}").write_text(digest)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
