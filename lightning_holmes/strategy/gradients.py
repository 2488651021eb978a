"""Gradients of a fit: the functions that make a reducer, which is the exchange that a step's schedule calls, and the optimizer's host together."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_holmes.comm.collectives import COMPRESSIONS, Collective, make_collective
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.comm.queue import make_comm_queue
from lightning_holmes.optim.arriving import can_gather_lazily
from lightning_holmes.optim.bucket_reducer import BucketReducer
from lightning_holmes.optim.host import LocalHost, OptimizerHost
from lightning_holmes.optim.layered import LayeredReducer
from lightning_holmes.optim.node.description import describe_optimizer
from lightning_holmes.optim.reducer import LocalReducer
from lightning_holmes.optim.remote import RemoteHost, RemoteReducer, marks_on
from lightning_holmes.optim.remote_parameters import RemoteParameters, Tree
from lightning_holmes.optim.shard_memory import ReplicatedMemory
from lightning_holmes.optim.sharded_host import ShardedHost, ShardedStep
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.pipeline.parameters import StageParameters
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.plan.node_routes import sums_inside
from lightning_holmes.plan.placement import clusters_of_stages
from lightning_holmes.plan.plan import Plan
from lightning_holmes.strategy.optimizer_nodes import OptimizerNodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients of one fit on one rank: ``reducer`` accumulates and reduces them when the schedule says so, for the optimizer of ``host``."""

    reducer: LocalReducer | BucketReducer | LayeredReducer
    host: OptimizerHost

    def close(self) -> None:
        """Undo the changes to the optimizer and the parameters, and release buffers, hooks and the queue."""
        self.host.close()
        self.reducer.close()


def make_gradients(
    pipeline: PipelineModule,
    groups: ProcessGroups,
    plan: Plan,
    device: torch.device,
    *,
    scaler: Any,
    step: ShardedStep | None,
    compression: str | None,
) -> Gradients:
    """Make the gradients for whole parameters. All ranks must call.

    Args:
        scaler: the GradScaler of ``precision="16-mixed"``, or None.
        step: the optimizer's step, if the plan says that it is sharded.
    """
    about = _about(pipeline, scaler)
    parameters = StageParameters.of(pipeline, plan.rank_of)
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters.by_name.values())
    reduced = plan.placement.data_parallel_size > 1 or bool(parameters.shared) or groups.tensor_parallel is not None
    if step is None and not reduced and not (low and plan.placement.world_size > 1):
        local = LocalReducer(pipeline.module, parameters.by_name)
        return Gradients(reducer=local, host=LocalHost(local, groups, device, **about))
    reducer = BucketReducer(
        parameters.by_name,
        groups,
        plan.placement,
        stages=pipeline.stages,
        stages_of=parameters.stages_of,
        shared=parameters.shared,
        queue=make_comm_queue(device),
        collective=_collective(groups, plan, compression),
    )
    if step is None:
        return Gradients(reducer=reducer, host=LocalHost(reducer, groups, device, **about))
    reducer.lay_out()
    memory = ReplicatedMemory(
        reducer,
        None if groups.gradients is None else groups.gradients.whole,
        lazily=can_gather_lazily(pipeline.module),
    )
    host = ShardedHost(step, memory, reducer, groups, device, **about)
    memory.watch(pipeline.module)
    return Gradients(reducer=reducer, host=host)


def make_stage_shards(pipeline: PipelineModule, groups: ProcessGroups, plan: Plan, device: torch.device) -> StageShards:
    """Make the shards of this rank's stages, not laid out yet. All ranks must call."""
    parameters = StageParameters.of(pipeline, plan.rank_of)
    return StageShards(
        parameters.by_name,
        stages=pipeline.stages,
        stages_of=parameters.stages_of,
        shared=parameters.shared,
        size=plan.placement.data_parallel_size,
        rank=groups.data_parallel_rank,
        queue=make_comm_queue(device),
        collective=_collective(groups, plan),
        absence=pipeline.absence,
        compiled=pipeline.compiled_parameters,
    )


def make_layered_gradients(
    pipeline: PipelineModule,
    groups: ProcessGroups,
    plan: Plan,
    device: torch.device,
    *,
    shards: StageShards,
    scaler: Any,
    step: ShardedStep,
) -> Gradients:
    """Make the gradients for sharded parameters. All ranks must call.

    Args:
        shards: of this rank's stages; they may be laid out already.
        scaler: the GradScaler of ``precision="16-mixed"``, or None.
    """
    shards.lay_out(by_elements=step.by_elements)
    reducer = LayeredReducer(
        shards,
        groups,
        plan.placement,
        device,
        stages=pipeline.stages,
        shared=list(StageParameters.of(pipeline, plan.rank_of).shared),
        queue=shards.queue,
        collective=shards.collective,
    )
    host = ShardedHost(step, shards, reducer, groups, device, **_about(pipeline, scaler))
    return Gradients(reducer=reducer, host=host)


def make_remote_gradients(
    pipeline: PipelineModule,
    groups: ProcessGroups,
    plan: Plan,
    device: torch.device,
    *,
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    nodes: OptimizerNodes,
    clusters: Sequence[str],
    optimizer_states: str,
    state_bytes: float,
    fill: Callable[[RemoteParameters], None],
    master_weights: bool,
    is_eager: bool,
    scaler: Any,
    precision: str,
    with_states: Collection[str],
) -> Gradients:
    """Move parameters and optimizer states to optimizer nodes, and make the gradients for them: from here on a rank holds no parameters. All
    ranks must call.

    Args:
        names: for each of the optimizer's groups, the names of this rank's parameters.
        clusters: the name of each global rank's cluster.
        state_bytes: bytes of the optimizer's states for each element of a parameter.
        master_weights: nodes step fp32 weights, from which parameters are rounded.
        fill: lays out the parameters, which are connected to their nodes by then, and gives the nodes the values.
        is_eager: nodes do not wait for the optimizer's step; the same on all ranks.
        scaler: the GradScaler of ``precision="16-mixed"``, or None.
        precision: the Trainer's precision.
        with_states: the names of parameters whose optimizer states are loaded afterwards.
    """
    parameters = StageParameters.of(pipeline, plan.rank_of)
    places = clusters_of_stages(plan.placement, clusters)
    own = nodes.share(places)[groups.pipeline_rank]
    ranks = plan.placement.data_parallel_group(groups.pipeline_rank, 0)
    sync = groups.gradients
    is_tree = sync is not None and groups.builder.backend == "gloo"
    is_tree = is_tree and sums_inside([clusters[rank] for rank in ranks], nodes.clusters_of(own))
    inside = None if sync is None or not is_tree else sync.inside or sync.whole
    remote = RemoteParameters(
        parameters.by_name,
        stages=pipeline.stages,
        stages_of=parameters.stages_of,
        shared=parameters.shared,
        num_replicas=len(ranks),
        replica=groups.data_parallel_rank,
        device=device,
        num_nodes=len(own),
        tree=Tree(inside, groups.builder.describe),
        absence=pipeline.absence,
        compiled=pipeline.compiled_parameters,
    )
    units = remote.lay_out_units(master_weights=master_weights, with_states=with_states)
    told = describe_optimizer(optimizer, names, marks_on(parameters.by_name, names))
    remote.links = nodes.open(
        {
            "module": type(pipeline.module).__qualname__,
            "precision": precision,
            "optimizer": told | {"state_bytes": 2 * state_bytes if master_weights else state_bytes},
            "states": optimizer_states,
            "share": (remote.tree.place, remote.tree.size),
        },
        clusters=places,
        pipeline_rank=groups.pipeline_rank,
        ranks=ranks,
        worker=groups.data_parallel_rank,
        units=units,
    )
    fill(remote)
    if inside is not None and groups.data_parallel_rank == 0:
        print(f"workers sum gradients for the optimizer nodes in {groups.builder.describe(inside)}", flush=True)
    reducer = RemoteReducer(
        remote,
        groups,
        plan.placement,
        device,
        stages=pipeline.stages,
        shared=list(parameters.shared),
        queue=remote.commands,
        collective=None,
        is_eager=is_eager,
    )
    host = RemoteHost(optimizer, names, remote, reducer, groups, is_owner=pipeline.is_owner, scaler=scaler)
    reducer.on_laid_out = host.prepare
    return Gradients(
        reducer=reducer,
        host=host,
    )


def _collective(groups: ProcessGroups, plan: Plan, compression: str | None = None) -> Collective | None:
    """Return the collective over the replicas of this rank's stages; None if there is one replica."""
    rounded = None if compression is None else COMPRESSIONS[compression]
    name, sync = plan.collective_of(groups.pipeline_rank), groups.gradients
    return None if sync is None else make_collective(name, sync, rounded)


def _about(pipeline: PipelineModule, scaler: Any) -> dict[str, Any]:
    """Return the arguments that every kind of host takes about this rank's part of the module."""
    stages = ", ".join(map(str, pipeline.stages))
    return {"is_owner": pipeline.is_owner, "scaler": scaler, "place": f"stage {stages}"}
