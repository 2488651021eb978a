"""Gradients of a fit: the functions that make a reducer, the exchange that a step's schedule calls, and the optimizer's host together."""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from lightning_holmes.comm.collectives import Collective, make_collective
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.comm.parameter_exchange import ParameterExchange
from lightning_holmes.comm.queue import ThreadQueue, make_comm_queue
from lightning_holmes.optim.elementwise import Separability
from lightning_holmes.optim.exchange import Layered, Replicated, ShardedStates
from lightning_holmes.optim.gradient_options import GradientOptions
from lightning_holmes.optim.host import LocalHost, OptimizerHost, ShardedHost
from lightning_holmes.optim.layered import LayeredReducer
from lightning_holmes.optim.node.description import describe_optimizer
from lightning_holmes.optim.node_route import choose_route
from lightning_holmes.optim.reducer import GradientReducer
from lightning_holmes.optim.remote import RemoteHost, RemoteOptimizer, RemoteReducer, marks_on
from lightning_holmes.optim.remote_parameters import RemoteParameters
from lightning_holmes.optim.sharded import ShardedOptimizer
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.pipeline.parameters import StageParameters
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.plan.placement import clusters_of_stages
from lightning_holmes.plan.plan import Plan
from lightning_holmes.strategy.optimizer_nodes import OptimizerNodes
from lightning_holmes.strategy.sharding import keeps_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients of one fit on one rank: ``reducer`` accumulates and reduces them when the schedule calls ``exchange``, for the optimizer of
    ``host``."""

    reducer: GradientReducer | LayeredReducer
    exchange: ParameterExchange
    host: OptimizerHost
    stage_shards: StageShards | None = None

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
    shard: Callable[[GradientReducer], ShardedOptimizer],
    options: GradientOptions,
    flat: bool,
) -> Gradients:
    """Make the gradients for whole parameters. All ranks must call.

    Args:
        scaler: the GradScaler of ``precision="16-mixed"``, or None.
        shard: shards the optimizer over the replicas; used if the plan says so.
        flat: keep flat buffers even if nothing is reduced.
    """
    parameters = StageParameters.of(pipeline, plan.rank_of)
    reducer = GradientReducer(
        parameters.by_name,
        groups,
        plan.placement,
        device,
        stages=pipeline.stages,
        stages_of=parameters.stages_of,
        shared=parameters.shared,
        collective=plan.collective_of(groups.pipeline_rank),
        options=options,
        flat=flat,
    )
    shards = shard(reducer) if plan.sharding == "optimizer" else None
    host = LocalHost if shards is None else functools.partial(ShardedHost, shards)
    return Gradients(
        reducer=reducer,
        exchange=Replicated(reducer) if shards is None else ShardedStates(reducer, shards),
        host=host(reducer.buffer, groups, device, **_about(pipeline, scaler)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How a rank's parameters are sharded over the replicas: the shards, and the collective that reduces and gathers."""

    shards: StageShards
    collective: Collective | None


def make_sharing(pipeline: PipelineModule, groups: ProcessGroups, plan: Plan, device: torch.device) -> Sharing:
    """Make the shards of this rank's stages, not laid out yet. All ranks must call."""
    parameters = StageParameters.of(pipeline, plan.rank_of)
    sync = groups.gradients
    collective = None if sync is None else make_collective(plan.collective_of(groups.pipeline_rank), sync)
    shards = StageShards(
        parameters.by_name,
        stages=pipeline.stages,
        stages_of=parameters.stages_of,
        shared=parameters.shared,
        size=plan.placement.data_parallel_size,
        rank=groups.data_parallel_rank,
        queue=make_comm_queue(device),
        gather=lambda tensor: None if collective is None else collective.gather(tensor),
        absence=pipeline.absence,
        compiled=pipeline.compiled_parameters,
    )
    return Sharing(shards=shards, collective=collective)


def make_layered_gradients(
    pipeline: PipelineModule,
    groups: ProcessGroups,
    plan: Plan,
    device: torch.device,
    *,
    sharing: Sharing,
    scaler: Any,
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    found: Separability,
    options: GradientOptions,
    master_weights: bool,
) -> Gradients:
    """Make the gradients for sharded parameters. All ranks must call.

    Args:
        sharing: the shards of this rank's stages; they may be laid out already.
        scaler: the GradScaler of ``precision="16-mixed"``, or None.
        names: for each of the optimizer's groups, the names of this rank's parameters.
        found: how the optimizer can be sharded.
    """
    stage_shards = sharing.shards
    shards = ShardedOptimizer(
        optimizer,
        names,
        stage_shards,
        found,
        replicas=groups.data_parallel,
        whole_gradients=False,
        master_weights=master_weights,
    )
    reducer = LayeredReducer(
        stage_shards,
        groups,
        plan.placement,
        device,
        stages=pipeline.stages,
        shared=list(StageParameters.of(pipeline, plan.rank_of).shared),
        queue=stage_shards.queue,
        collective=sharing.collective,
    )
    return Gradients(
        reducer=reducer,
        exchange=Layered(stage_shards, reducer, shards),
        host=ShardedHost(shards, reducer, groups, device, **_about(pipeline, scaler)),
        stage_shards=stage_shards,
    )


def make_remote_gradients(
    pipeline: PipelineModule,
    groups: ProcessGroups,
    plan: Plan,
    device: torch.device,
    *,
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    options: GradientOptions,
    nodes: OptimizerNodes,
    clusters: Sequence[str],
    hosts: Sequence[str],
    optimizer_states: str,
    state_bytes: float,
    keep_parameters: bool | Literal["auto"],
    fill: Callable[[RemoteParameters], None],
    master_weights: bool,
    all_gather: Callable[[Any], list[Any]],
    is_eager: bool,
    scaler: Any,
    precision: str,
    with_states: Collection[str],
) -> Gradients:
    """Move parameters and optimizer states to optimizer nodes, and make the gradients for them: from here on a rank holds no parameters. All
    ranks must call.

    Args:
        names: for each of the optimizer's groups, the names of this rank's parameters.
        clusters, hosts: the names of each global rank's cluster and host.
        state_bytes: bytes of the optimizer's states for each element of a parameter.
        master_weights: nodes step fp32 weights, from which parameters are rounded.
        keep_parameters: whether workers keep parameters from the forward to the backward.
        fill: lays out the parameters, which are connected to their nodes by then, and gives the nodes the values.
        all_gather: all-gathers a Python value over WORLD.
        is_eager: nodes do not wait for the optimizer's step; the same on all ranks.
        scaler: the GradScaler of ``precision="16-mixed"``, or None.
        precision: see OptimizerNodes.open.
        with_states: the names of parameters whose optimizer states are loaded afterwards.
    """
    parameters = StageParameters.of(pipeline, plan.rank_of)
    size, rank = plan.placement.data_parallel_size, groups.data_parallel_rank
    num_bytes = sum(p.numel() * p.itemsize for p in parameters.by_name.values())
    keeps, why = keeps_parameters(keep_parameters, num_bytes, device, all_gather)
    if groups.builder.rank == 0:
        print(f"workers {'keep' if keeps else 'let go of'} parameters between forward and backward: {why}", flush=True)
    places = clusters_of_stages(plan.placement, clusters)
    by_rank = nodes.share(places)
    remote = RemoteParameters(
        parameters.by_name,
        stages=pipeline.stages,
        stages_of=parameters.stages_of,
        shared=parameters.shared,
        num_replicas=size,
        replica=rank,
        device=device,
        queue=ThreadQueue(device),
        num_nodes=len(by_rank[groups.pipeline_rank]),
        keeps=keeps,
        absence=pipeline.absence,
        compiled=pipeline.compiled_parameters,
    )
    units = remote.lay_out_units(master_weights=master_weights, with_states=with_states)
    place_of = remote.place_of(len(by_rank[groups.pipeline_rank]))
    links = nodes.open(
        units,
        place_of,
        describe_optimizer(optimizer, names, marks_on(parameters.by_name, names))
        | {"state_bytes": 2 * state_bytes if master_weights else state_bytes},
        pipeline_rank=groups.pipeline_rank,
        clusters=places,
        num_workers=size,
        worker=rank,
        states=optimizer_states,
        module=type(pipeline.module).__qualname__,
        precision=precision,
    )
    remote.connect(links, place_of)
    fill(remote)
    route = choose_route(
        options.gradient_sync,
        place_of=place_of,
        node_clusters=nodes.clusters_of(by_rank),
        clusters=clusters,
        hosts=hosts,
        placement=plan.placement,
        groups=groups,
        stages=pipeline.stages,
    )
    remote.aggregators = route.aggregators
    reducer = RemoteReducer(
        remote,
        groups,
        plan.placement,
        device,
        stages=pipeline.stages,
        shared=list(parameters.shared),
        queue=ThreadQueue(device),
        collective=None,
        is_eager=is_eager,
    )
    for told in sorted(filter(None, all_gather(route.told if rank == 0 else ""))):
        if groups.builder.rank == 0:
            print(told, flush=True)
    states = RemoteOptimizer(optimizer, names, remote, reducer, num_replicas=size, scales=scaler is not None)
    return Gradients(
        reducer=reducer,
        exchange=Layered(remote, reducer, states),
        host=RemoteHost(states, reducer, groups, is_owner=pipeline.is_owner, scaler=scaler),
        stage_shards=remote,
    )


def _about(pipeline: PipelineModule, scaler: Any) -> dict[str, Any]:
    """Return the arguments that every kind of host takes about this rank's part of the module."""
    stages = ", ".join(map(str, pipeline.stages))
    return {"is_owner": pipeline.is_owner, "scaler": scaler, "place": f"stage {stages}"}
