"""Whether a saved plan is one for this topology and this model.

check_plan(Plan.load("plan.yaml"), topology=topology, layers="layers", num_layers=48, source="plan.yaml")
"""

from __future__ import annotations

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.made_for import MadeFor, cluster_facts
from lightning_holmes.plan.placement import Placement, clusters_of, make_placement
from lightning_holmes.plan.plan import Plan


def place_again(plan: Plan, topology: Topology, world_size: int) -> Placement | None:
    """Where a run of ``world_size`` ranks puts the plan's layout here; None where their numbers differ."""
    if not topology.num_devices == plan.world_size == world_size:
        return None
    return make_placement(
        topology,
        world_size=world_size,
        pipeline_parallel_size=plan.pipeline_parallel_size,
        tensor_parallel_size=plan.tensor_parallel_size,
    )


def check_plan(
    plan: Plan,
    *,
    topology: Topology,
    placement: Placement | None = None,
    layers: str | None = None,
    num_layers: int | None = None,
    module: str | None = None,
    num_parameters: int | None = None,
    source: str = "the plan",
) -> None:
    """Raise ConfigurationError with every difference between what a plan was made for and what is here.

    Args:
        placement: of the run that begins (place_again), if it is made: a launcher may have numbered the same hosts in another order.
        layers, num_layers: the model's layer list and its length; None where the model is not known yet.
        module, num_parameters: its class and size, likewise. They, and what the plan's file says of the clusters' hosts and cards,
            are compared where it says so; older files do not.
        source: what messages call the plan.
    """
    differences = []
    if plan.world_size != topology.num_devices:
        differences.append(f"it has {plan.world_size} ranks, {topology.described} has {topology.num_devices} devices")
    else:
        placed = placement or plan.placement
        for rank in range(plan.pipeline_parallel_size):
            place = "+".join(clusters_of(placed, topology, rank))
            if plan.clusters[rank] != place:
                differences.append(
                    f"its pipeline rank {rank} is on cluster {plan.clusters[rank]}, here that is {place}"
                )
    if plan.made_for is not None:
        here = MadeFor(module=module, num_parameters=num_parameters, clusters=cluster_facts(topology))
        differences += plan.made_for.differences(here)
    if layers is not None and plan.layers != layers:
        differences.append(f"it splits the layer list {plan.layers!r}, this model's is {layers!r}")
    if num_layers is not None and plan.partition.num_layers != num_layers:
        differences.append(f"it assigns {plan.partition.num_layers} layers, this model has {num_layers}")
    if differences:
        raise ConfigurationError(
            f"{source} is not for this run: {'; '.join(differences)}. Take the plan.yaml of a run like this one, have "
            "lightning-holmes plan --output make one, or leave it out"
        )
