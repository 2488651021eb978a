"""A saved plan that a run follows: what it asks for in place of the arguments, and whether it fits this topology and this model.

asked = asked_by(plan, Asked(), source="plan.yaml")
check_plan(plan, topology=topology, layers="layers", num_layers=48, source="plan.yaml")
"""

from __future__ import annotations

from dataclasses import fields, replace

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.placement import Placement, clusters_of, make_placement
from lightning_holmes.plan.plan import WHOLE_MODULE, Plan

_BESIDE_A_PLAN = ("optimizer_nodes", "master_weights", "compression")  # a plan leaves these to the arguments


def asked_by(plan: Plan, given: Asked, *, source: str) -> Asked:
    """What a saved plan asks for: every choice of it, and what ``given`` says beside.

    Args:
        source: the plan's file, for messages.

    Raises:
        ConfigurationError: an argument is given that the plan decides, or one that does not go with the plan.
    """
    choices = [entry.name for entry in fields(Asked) if entry.name not in _BESIDE_A_PLAN]
    twice = [name for name in choices if getattr(given, name) != getattr(Asked(), name)]
    if twice:
        shown = ", ".join(f"{name}={getattr(given, name)!r}" for name in twice)
        raise ConfigurationError(f"plan={source!r} decides the layout, so leave out {shown}; or leave out the plan")
    if given.master_weights and plan.sharding == "none" and plan.data_parallel_size > 1:
        raise ConfigurationError(
            f"master_weights=True keeps fp32 weights in the shards of the optimizer, but plan={source!r} has sharding: none; leave "
            f"master_weights out, or write sharding: optimizer in that file"
        )
    whole = plan.layers == WHOLE_MODULE
    return replace(
        given,
        pipeline_parallel_size=plan.pipeline_parallel_size,
        tensor_parallel_size=plan.tensor_parallel_size,
        num_microbatches=plan.num_microbatches,
        eval_num_microbatches=plan.eval_num_microbatches,
        schedule=plan.schedule,
        num_chunks=plan.num_chunks,
        partition="uniform" if whole else list(plan.partition.layer_counts),
        layers="auto" if whole else plan.layers,
        sharding=plan.sharding,
        gradient_sync=plan.collectives or "auto",
    )


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
    source: str = "the plan",
) -> None:
    """Raise ConfigurationError if the plan does not fit this topology or model; the message lists all differences.

    Args:
        placement: of this run (see place_again), instead of the plan's own: a launcher may have numbered the same hosts in another order.
        layers, num_layers: the model's layer list and its length; None if the model is not known yet.
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
                differences.append(f"its pipeline rank {rank} is on cluster {plan.clusters[rank]}, here on {place}")
    if layers is not None and plan.layers != layers:
        differences.append(f"it splits the layer list {plan.layers!r}, this model's is {layers!r}")
    if num_layers is not None and plan.partition.num_layers != num_layers:
        differences.append(f"it assigns {plan.partition.num_layers} layers, this model has {num_layers}")
    if differences:
        raise ConfigurationError(
            f"{source} is not for this run: {'; '.join(differences)}. Take the plan.yaml of a run like this one, have "
            "lightning-holmes plan --output make one, or leave it out"
        )
