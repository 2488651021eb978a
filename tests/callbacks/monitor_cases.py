"""A run with monitor=True, on every rank."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from strategy_cases import Classifier, Setting, build, samples

from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor
from lightning_holmes.optim import bucket_reducer


class MonitorCounter(pl.Callback):
    """Counts the TimelineMonitors of a trainer while it trains."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = sum(isinstance(c, TimelineMonitor) for c in trainer.callbacks)  # type: ignore[attr-defined]


def monitored(payload: Any) -> dict[str, Any]:
    """Train two epochs of four batches, with a validation between unless ``payload["validates"]`` is False; return on rank 0
    what was written, and on every rank the number of monitors."""
    bucket_reducer.LEAST_BUCKET_BYTES = 256  # so that a small module has several buckets
    setting = Setting(folder=Path(payload["folder"]), holmes=payload["holmes"], replicas=payload["replicas"])
    counter = MonitorCounter()
    trainer = setting.trainer(max_epochs=2, callbacks=[counter])
    validation = setting.loader(samples(16, seed=1), 16) if payload.get("validates", True) else None
    trainer.fit(build(Classifier), setting.loader(samples(64), 16), validation)
    path = Path(payload["folder"]) / "timeline.json"
    return {
        "data": json.loads(path.read_text()) if trainer.is_global_zero else None,
        "drawn": path.with_suffix(".png").exists() if trainer.is_global_zero else None,
        "monitors": counter.found,
    }
