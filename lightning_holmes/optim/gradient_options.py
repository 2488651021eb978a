"""The user's options for gradients: checked by themselves, and against the placement of the ranks.

    options = GradientOptions(gradient_sync="hierarchical")
    options.notes(placement, clusters)

strategy/gradients.py uses them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.collective_choice import check_collective
from lightning_holmes.plan.placement import Placement, cluster_levels


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOptions:
    """How gradients are accumulated and summed; the arguments of HolmesStrategy with the same names.

    Raises:
        ConfigurationError: one of them is impossible by itself.
    """

    gradient_sync: str = "auto"
    compression: str | None = None

    def __post_init__(self) -> None:
        check_collective(self.gradient_sync)

    def notes(self, placement: Placement, clusters: Sequence[str]) -> list[str]:
        """Return a line for each option that has no effect on this placement. ``clusters``: the cluster of each global rank.

        Raises:
            ConfigurationError: no group of the placement can use the collective that is asked for.
        """
        tensor_ranks = range(placement.tensor_parallel_size)
        groups = [
            placement.data_parallel_group(s, t) for s in range(placement.pipeline_parallel_size) for t in tensor_ranks
        ]
        if self.gradient_sync == "hierarchical" and not any(cluster_levels(ranks, clusters)[0] for ranks in groups):
            raise ConfigurationError(
                'gradient_sync="hierarchical" needs a data-parallel group that has as many ranks, two or more, in each of '
                'several clusters, and here is none; use "auto", or a pipeline_parallel_size with which groups cross'
            )
        found = []
        if self.gradient_sync != "auto" and placement.data_parallel_size == 1:
            found.append(f"gradient_sync={self.gradient_sync!r} has nothing to do: there is one replica")
        return found
