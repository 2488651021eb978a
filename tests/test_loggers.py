"""What RunRecord writes while a run goes on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from lightning.pytorch.loggers import CSVLogger

from lightning_holmes.loggers import RunRecord
from lightning_holmes.plan.sync_choice import SyncChoice


def test_each_choice_of_a_collective_is_recorded(tmp_path: Path) -> None:
    choices: list[SyncChoice] = []
    logger = CSVLogger(tmp_path)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(gradient_sync_choices=choices), loggers=[logger], fast_dev_run=False
    )
    record = RunRecord()
    record.on_train_batch_end(trainer, None)  # type: ignore[arg-type]
    path = Path(logger.log_dir) / "gradient_sync.yaml"
    assert not path.exists()
    for step, name in ((0, "all_reduce"), (40, "hierarchical")):
        choices.append(
            SyncChoice(
                stages=(1,),
                ranks=(2, 3),
                collective=name,
                seconds={"all_reduce": 0.5, "hierarchical": 0.25},
                num_bytes=4_000_000,
                reason="the fastest",
                step=step,
            )
        )
        record.on_train_batch_end(trainer, None)  # type: ignore[arg-type]
        lines = yaml.safe_load(path.read_text())
        assert len(lines) == len(choices)
        assert lines[-1] == (
            f"before batch {step}: gradients of stage 1 over ranks 2, 3: {name} (all_reduce 500 ms, hierarchical 250 ms "
            f"for 4 MB); the fastest"
        )
