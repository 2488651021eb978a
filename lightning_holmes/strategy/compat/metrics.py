"""ReplicaMetrics: inside, torchmetrics of the module gather over replicas, not over all ranks.

with ReplicaMetrics(module, group, lifted=run.lifted): ...
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from torch import Tensor, nn
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_holmes.replacements import Replacements


class ReplicaMetrics(Replacements):
    """Inside, the module's metrics gather over replicas: within a replica every rank has the same metric state.

    Args:
        module: the module whose metrics are changed; a metric that has a process group of its own keeps it.
        group: the data-parallel process group of this rank, or None if there is one replica.
        lifted: a context for a collective inside of a hook, which all ranks come to (Tripwires.lifted).
    """

    def __init__(
        self, module: nn.Module, group: Any, *, lifted: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        super().__init__()
        self._lifted = lifted
        self._module = module
        self._group = group

    def __enter__(self) -> Self:
        from torchmetrics import Metric

        for metric in self._module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                if self._group is None:
                    self.replace(metric, distributed_available_fn=_never)
                else:
                    own = {} if metric.dist_sync_fn is not None else {"dist_sync_fn": self._gather}
                    self.replace(metric, process_group=self._group, **own)
        return self

    def _gather(self, value: Tensor, group: Any = None) -> list[Tensor]:
        with self._lifted():
            found: list[Tensor] = gather_all_tensors(value, group)
            return found


def _never() -> bool:
    """The ``distributed_available_fn`` for metrics whose state is whole on each rank."""
    return False
