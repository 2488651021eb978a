"""What a run records in its loggers: its configuration and its plan; and a WandbLogger that works without an account or network.

    Trainer(logger=WandbLogger(project="mine"), callbacks=[RunRecord()])

This module decides which facts go to loggers and whether W&B goes online. Metrics are logged by `self.log`; W&B collects
the metrics of the machine (CPU, memory, GPUs) by itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import yaml

from lightning_holmes.errors import needs_extra
from lightning_holmes.lightning_package import fabric, pl
from lightning_holmes.lightning_private import has_experiment, log_offline, without_anonymous
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.tables import group_rows, plan_table

_ANSWER_TIMEOUT_S = 5.0


class WandbLogger(pl.loggers.WandbLogger):
    """Lightning's WandbLogger, offline unless someone is logged in and the server answers.

    The logger never prompts and never hangs: without a key, or if the server does not answer within five seconds, the
    run is kept in `save_dir`, and `wandb sync` uploads it later. If WANDB_MODE is set, or `offline` is not None, that
    decides instead. Further options are those of Lightning's WandbLogger and of `wandb.init`. Needs the extra `wandb`.

    Rank 0 decides when the run begins.
    """

    def __init__(self, offline: bool | None = None, **options: Any) -> None:
        with needs_extra("WandbLogger", "wandb"):
            import wandb  # noqa: F401
        super().__init__(offline=bool(offline), **options)
        without_anonymous(self)
        self._is_decided = offline is not None

    @property
    @fabric.loggers.logger.rank_zero_experiment
    def experiment(self) -> Any:
        if not has_experiment(self) and not self._is_decided:
            self._is_decided = True
            reason = None if "WANDB_MODE" in os.environ else why_offline()
            if reason is not None:
                pl.utilities.rank_zero_info(
                    f"W&B: {reason}; the run stays offline in {self.save_dir}, `wandb sync` uploads it later"
                )
                if not log_offline(self):
                    pl.utilities.rank_zero_warn("W&B: log_model is left out, since the run is offline")
        if not has_experiment(self) and self.save_dir is not None:
            Path(self.save_dir).mkdir(parents=True, exist_ok=True)  # wandb warns if the folder does not exist yet
        return super().experiment


def why_offline() -> str | None:
    """Return why a run cannot be uploaded; None if it can."""
    import requests  # which wandb needs
    import wandb

    settings = wandb.setup().settings
    # never prompts: the key is in the environment, or where `wandb login` keeps it
    key = settings.api_key or os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(settings.base_url)
    if key is None:
        return "nobody is logged in"
    if not _answers(settings.base_url):
        return f"{settings.base_url} does not answer"
    return None


def _answers(url: str) -> bool:
    """Whether the server answers within _ANSWER_TIMEOUT_S, even with an error page; resolving the name is included in the time."""
    import requests  # which wandb needs

    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(requests.RequestException):
            requests.head(url, timeout=_ANSWER_TIMEOUT_S)
            answered.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_TIMEOUT_S)
    return answered.is_set()


class RunRecord(pl.Callback):
    """Record the configuration in every logger when fit begins, and the plan when it is made.

    W&B gets both in its config, and the plan and its groups as tables; TensorBoard gets both as text, with the groups and
    their transports; CSVLogger's folder gets plan.yaml (config.yaml is there). `lightning-holmes fit` does this by itself.
    The plan is known once the first batch has run.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = config
        self._awaits_plan = False

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._awaits_plan:
            self._awaits_plan = False
            self._record_plan(trainer, getattr(trainer.strategy, "plan", None))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._awaits_plan = trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if self.config is None or not self._awaits_plan:
            return
        for logger in trainer.loggers:
            if isinstance(logger, pl.loggers.WandbLogger):
                logger.experiment.config.update({"config": self.config}, allow_val_change=True)
            elif isinstance(logger, pl.loggers.TensorBoardLogger):
                writer: Any = logger.experiment
                text = yaml.safe_dump(self.config, sort_keys=False)
                writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()))

    def _record_plan(self, trainer: pl.Trainer, plan: Plan | None) -> None:
        if plan is None:
            return
        for logger in trainer.loggers:
            if isinstance(logger, pl.loggers.WandbLogger):
                logger.experiment.config.update({"plan": yaml.safe_load(plan.to_yaml())}, allow_val_change=True)
                for name, (columns, *rows) in _tables(plan).items():
                    logger.log_table(name, columns=columns, data=rows)
            elif isinstance(logger, pl.loggers.TensorBoardLogger):
                writer: Any = logger.experiment
                for name, (columns, *rows) in _tables(plan).items():
                    lines = [columns, ["---"] * len(columns), *rows]
                    writer.add_text(name, "\n".join("|" + "|".join(line) + "|" for line in lines))
            elif isinstance(logger, pl.loggers.CSVLogger):
                Path(logger.log_dir).mkdir(parents=True, exist_ok=True)
                plan.save(Path(logger.log_dir) / "plan.yaml")


def _tables(plan: Plan) -> dict[str, list[list[str]]]:
    """The tables by name, each as a row of column names and the rows. A run of one process has no table of groups."""
    printed, groups = plan_table(plan), [list(row) for row in group_rows(plan)]
    rows = zip(*(column.cells for column in printed.columns), strict=True)
    found = {
        "plan": [[str(column.header) for column in printed.columns], *([str(cell) for cell in row] for row in rows)]
    }
    return found | ({"groups": [["for", "transport", "reason", "ranks"], *groups]} if groups else {})
