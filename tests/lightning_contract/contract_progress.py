"""Progress bars: how far they get, what they show, and when there is none."""

import contextlib
import io
from typing import Any

from contract import Run, each
from contract_models import Net, batches
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar


class Counts(ProgressBar):
    """Draws nothing; records its progress, the total, and the metrics that it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.train: list[Any] = []
        self.validation: list[Any] = []
        self.shown: list[str] = []
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train.append((batch_idx + 1, self.total_train_batches))
        self.shown = sorted(self.get_metrics(trainer, module))

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validation.append((batch_idx + 1, trainer.sanity_checking))


class Shows(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("shown", loss, prog_bar=True)
        return loss


def case_a_bar_is_told_of_each_batch(run: Run):
    bar = Counts()
    run.fit(Net(), batches(3), batches(2), callbacks=[bar], enable_progress_bar=True, num_sanity_val_steps=1)
    assert bar.train == [(1, 3), (2, 3), (3, 3)]
    assert bar.validation == [(1, True), (1, False), (2, False)]


@each(tqdm=TQDMProgressBar, rich=RichProgressBar)
def case_a_bar_is_drawn_by_the_first_process(run: Run, kind: Any):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        run.fit(Shows(), batches(2), batches(1), callbacks=[kind()], enable_progress_bar=True, num_sanity_val_steps=1)
    printed = out.getvalue() + err.getvalue()
    assert ("shown" in printed and "2/2" in printed) == run.is_first


@each(validate="validate", test="test", predict="predict")
def case_bars_of_evaluations_reach_their_end(run: Run, entry: str):
    bar = TQDMProgressBar()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        getattr(run.trainer(callbacks=[bar], enable_progress_bar=True), entry)(Net(), batches(3))
        drawn = {"validate": "val", "test": "test", "predict": "predict"}[entry]
        assert getattr(bar, f"{drawn}_progress_bar").total == 3
        assert getattr(bar, f"{drawn}_progress_bar").n == 3 or not run.is_first
