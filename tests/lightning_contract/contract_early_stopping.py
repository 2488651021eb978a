"""EarlyStopping: what it monitors, when it stops a fit, and what it reports."""

from typing import Any

from contract import Run, each
from contract_models import Net, batches
from lightning.pytorch.callbacks import EarlyStopping


class Levels(Net):
    """Logs the given values as "level", one an epoch."""

    def __init__(self, *levels: float) -> None:
        super().__init__()
        self.levels = levels

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("level", self.levels[self.current_epoch])


FALLS_AND_RISES = (3.0, 2.0, 1.0, 1.5, 1.2, 1.7)


@each(
    patient=({"patience": 2}, FALLS_AND_RISES, 5),
    at_once=({"patience": 1}, FALLS_AND_RISES, 4),
    of_a_maximum=({"patience": 1, "mode": "max"}, (1.0, 2.0, 1.5, 3.0), 3),
    of_small_gains=({"patience": 1, "min_delta": 0.5}, (3.0, 2.0, 1.8, 1.0), 3),
    at_a_threshold=({"stopping_threshold": 1.4}, FALLS_AND_RISES, 3),
    at_divergence=({"divergence_threshold": 4.0}, (3.0, 5.0, 1.0), 2),
    at_nothing_finite=({"check_finite": True}, (3.0, float("nan"), 1.0), 2),
    not_at_nothing_finite=({"check_finite": False, "patience": 5}, (3.0, float("inf"), 1.0, 1.0, 1.0, 1.0), 6),
    never=({"patience": 9}, FALLS_AND_RISES, 6),
)
def case_stops(run: Run, value: Any):
    options, levels, epochs = value
    stopping = EarlyStopping("level", **options)
    trainer = run.fit(Levels(*levels), batches(1), batches(1), callbacks=[stopping], max_epochs=6)
    assert trainer.current_epoch == epochs
    assert stopping.stopped_epoch == (epochs - 1 if epochs < 6 else 0)
    return float(stopping.best_score), stopping.wait_count, stopping.stopping_reason.value


def case_waits_for_min_epochs(run: Run):
    stopping = EarlyStopping("level", patience=1)
    trainer = run.fit(
        Levels(*FALLS_AND_RISES), batches(1), batches(1), callbacks=[stopping], max_epochs=6, min_epochs=5
    )
    assert trainer.current_epoch == 5


def case_needs_no_validation(run: Run):
    stopping = EarlyStopping("loss", stopping_threshold=100.0)
    trainer = run.fit(Net(), batches(2), callbacks=[stopping], max_epochs=3)
    assert trainer.current_epoch == 1


def case_its_state_goes_through_checkpoints(run: Run):
    first, second = EarlyStopping("level", patience=4), EarlyStopping("level", patience=4)
    trainer = run.fit(Levels(*FALLS_AND_RISES), batches(), batches(2), callbacks=[first], max_epochs=5)
    trainer.save_checkpoint(run.folder / "kept.ckpt")
    run.meet()
    run.fit(
        Levels(*FALLS_AND_RISES),
        batches(),
        batches(2),
        callbacks=[second],
        ckpt_path=run.folder / "kept.ckpt",
        max_epochs=6,
    )
    assert (first.wait_count, second.wait_count) == (2, 3)
    assert float(second.best_score) == 1.0
