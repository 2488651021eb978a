"""RunContext: what a run is made from, in addition to its trainer; and the context managers in which its steps run."""

from dataclasses import dataclass
from typing import Any

from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.plan.plan import Plan
from lightning_holmes.replacements import Replacements
from lightning_holmes.strategy.building import ModuleBuilder
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.loaded_state import LoadedState
from lightning_holmes.strategy.module_shards import ModuleShards
from lightning_holmes.strategy.options import Options
from lightning_holmes.strategy.snapshots import Snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a run is made from, in addition to its trainer.

    Attributes:
        builder: builds the module, which may have no memory yet.
        loaded_state: the states that were loaded from a checkpoint.
        splitter: splits batches; it learns from the batches of all runs.
        former: the plan of the previous run, whose layout is kept if it fits.
        module_shards: the shards of a module that stays sharded between runs.
        snapshots: the snapshots of a fit; None if it takes none.
        undo: undoes the run's changes, last change first, even if its set-up fails half-way.
    """

    job: Job
    options: Options
    builder: ModuleBuilder
    loaded_state: LoadedState
    splitter: BatchSplitter
    former: Plan | None
    module_shards: ModuleShards
    undo: Replacements
    snapshots: Snapshots | None = None


def step_context(trainer: "pl.Trainer", step_name: str) -> Any:
    """Return the context manager of the precision plugin under which a step runs."""
    plugin = trainer.precision_plugin
    contexts = {
        "training_step": plugin.train_step_context,
        "validation_step": plugin.val_step_context,
        "test_step": plugin.test_step_context,
        "predict_step": plugin.predict_step_context,
    }
    return contexts[step_name]()
