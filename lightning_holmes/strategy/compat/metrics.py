"""Metrics over replicas: torchmetrics gather over all ranks, but within a replica every rank has the same state.

with replica_metrics(trainer, module, group, run.lifted, is_split=True): ...
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.pipeline.shadow import never
from lightning_holmes.replacements import Replacements


@contextmanager
def replica_metrics(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    replicas: Any,
    lifted: Callable[[], AbstractContextManager[None]],
    *,
    is_split: bool,
) -> Iterator[None]:
    """Inside, every metric of this process gathers over replicas, whoever holds it; one that has a process group of its own keeps it.

    Args:
        replicas: the data-parallel process group of this rank, or None if there is one replica.
        lifted: a context for a collective inside of a hook, which all ranks come to (Tripwires.lifted).
        is_split: several ranks are one replica. Then the metrics of module and callbacks do as inside after the run, too, until
            another trainer runs the module.
    """
    sync: Any = Metric.sync

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        with lifted():
            found: list[Tensor] = gather_all_tensors(value, group)
            return found

    def sync_replicas(
        metric: Metric,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        if process_group is None and metric.process_group is None:
            process_group = replicas
            if replicas is None:  # the state is whole on each rank
                distributed_available = never
            elif dist_sync_fn is None or isinstance(dist_sync_fn, _AfterRun):
                dist_sync_fn = gather
        sync(metric, dist_sync_fn, process_group, should_sync, distributed_available)

    with Replacements() as run:
        run.replace(Metric, sync=sync_replicas)
        yield
    if is_split:
        held = [module, *(v for c in trainer.callbacks for v in vars(c).values() if isinstance(v, nn.Module))]  # type: ignore[attr-defined]
        for metric in (part for each in held for part in each.modules()):
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.distributed_available_fn = _Available(trainer, module, replicas, metric.distributed_available_fn)
                metric.dist_sync_fn = _Gather(trainer, module, replicas, metric.dist_sync_fn)


class _AfterRun:
    """What a metric calls after a run: over replicas for the run's trainer; for another one, and once pickled, ``own``, what it had."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, replicas: Any, own: Any) -> None:
        self._trainer, self._module, self._replicas = weakref.ref(trainer), weakref.ref(module), replicas
        self.own: Any = own.own if isinstance(own, _AfterRun) else own

    @property
    def _holds(self) -> bool:
        module = self._module()
        return module is not None and trainer_of(module) is self._trainer()

    def __reduce__(self) -> Any:
        return copy.copy, (self.own,)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class _Available(_AfterRun):
    def __call__(self) -> bool:
        return bool(self.own()) and not (self._holds and self._replicas is None)


class _Gather(_AfterRun):
    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        group = self._replicas if group is None and self._holds else group
        found: list[Tensor] = (self.own or gather_all_tensors)(value, group)
        return found
