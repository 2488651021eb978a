"""Metrics over replicas: torchmetrics gather over all ranks, but within a replica every rank has the same state.

with replica_metrics(module, group, run.lifted): ...
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_holmes.replacements import Replacements


@contextmanager
def replica_metrics(
    module: nn.Module, replicas: Any, lifted: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Inside, the module's metrics gather over replicas.

    Args:
        module: the module whose metrics are changed; a metric that has a process group of its own keeps it.
        replicas: the data-parallel process group of this rank, or None if there is one replica.
        lifted: a context for a collective inside of a hook, which all ranks come to (Tripwires.lifted).
    """
    from torchmetrics import Metric

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        with lifted():
            found: list[Tensor] = gather_all_tensors(value, group)
            return found

    with Replacements() as run:
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                if replicas is None:  # the state is whole on each rank
                    run.replace(metric, distributed_available_fn=_never)
                else:
                    own = {} if metric.dist_sync_fn is not None else {"dist_sync_fn": gather}
                    run.replace(metric, process_group=replicas, **own)
        yield


def _never() -> bool:
    return False
