"""ReplicaMetrics: inside, torchmetrics of the module gather over replicas, not over all ranks.

with ReplicaMetrics(module, group): ...
"""

from typing import Any, Self

from torch import nn

from lightning_holmes.strategy.compat.replacements import Replacements


class ReplicaMetrics(Replacements):
    """Inside, the module's metrics gather over replicas: within a replica every rank has the same metric state.

    Args:
        module: the module whose metrics are changed; a metric that has a process group of its own keeps it.
        group: the data-parallel process group of this rank, or None if there is one replica.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        super().__init__()
        self._module = module
        self._group = group

    def __enter__(self) -> Self:
        from torchmetrics import Metric

        for metric in self._module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                if self._group is None:
                    self.replace(metric, distributed_available_fn=_never)
                else:
                    self.replace(metric, process_group=self._group)
        return self


def _never() -> bool:
    """The ``distributed_available_fn`` for metrics whose state is whole on each rank."""
    return False
