"""Checks that a saved plan was made for this topology and this model.

check_plan(Plan.load("plan.yaml"), topology=topology, layers="layers", num_layers=48, source="plan.yaml")
"""

from __future__ import annotations

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.made_for import MadeFor, cluster_facts
from lightning_holmes.plan.placement import Placement, clusters_of, make_placement
from lightning_holmes.plan.plan import Plan


def place_again(plan: Plan, topology: Topology, world_size: int) -> Placement | None:
    """Place the plan's sizes on this topology; None unless plan, topology and run (``world_size``) have the same number of ranks."""
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
    """Raise ConfigurationError if the plan was made for another topology or model; the message lists all differences.

    Args:
        placement: of this run (see place_again), instead of the plan's own: a launcher may have numbered the same hosts in another order.
        layers, num_layers: the model's layer list and its length; None if the model is not known yet.
        module, num_parameters: the model's class name and size; None if not known yet. They, and the clusters' hosts and network cards,
            are compared only if the plan file has them; older files do not.
        source: the name of the plan in messages.
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
