"""ReplicaMetrics: while a run lasts, torchmetrics of the module gather over replicas, not over all ranks."""

from typing import Any

from torch import nn


class ReplicaMetrics:
    """Within a replica every rank is given the same state, so that only replicas have something to gather.

    Args:
        module: whose metrics; one that has a process group of its own keeps it.
        group: of this rank's replicas, or None where there is one.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._module = module
        self._group = group
        self._before: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Change the metrics."""
        from torchmetrics import Metric

        for metric in self._module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                self._before.append((metric, metric.distributed_available_fn))
                if self._group is None:
                    metric.distributed_available_fn = _never
                else:
                    metric.process_group = self._group

    def uninstall(self) -> None:
        """Leave them as they were."""
        for metric, available in self._before:
            metric.process_group, metric.distributed_available_fn = None, available
        self._before.clear()


def _never() -> bool:
    """torchmetrics' ``distributed_available_fn`` where a metric's state is whole on each rank."""
    return False
