"""What a fit does with gradients, made together: the reducer, the exchange that a step's schedule calls, and the host."""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from lightning_holmes.comm.collectives import Collective
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.comm.parameter_exchange import ParameterExchange
from lightning_holmes.comm.queue import ThreadQueue, make_comm_queue
from lightning_holmes.comm.sync_board import SyncBoard
from lightning_holmes.optim.elementwise import Separability
from lightning_holmes.optim.exchange import Layered, Replicated, ShardedStates
from lightning_holmes.optim.gradient_options import GRAD_DTYPES, GradientOptions
from lightning_holmes.optim.host import LocalHost, OptimizerHost, ShardedHost
from lightning_holmes.optim.layered import LayeredReducer, choose_collective
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
from lightning_holmes.plan.sync_choice import SyncChoice
from lightning_holmes.strategy.optimizer_nodes import OptimizerNodes
from lightning_holmes.strategy.sharding import keeps_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Of one fit on one rank: gathered and reduced by ``reducer``, when ``exchange`` is told, for the optimizer of ``host``."""

    reducer: GradientReducer | LayeredReducer
    exchange: ParameterExchange
    host: OptimizerHost
    stage_shards: StageShards | None = None

    def close(self) -> None:
        """Give the optimizer back what it had, and let go of buffers, hooks and the queue."""
        self.host.close()
        self.reducer.close()


def make_gradients(
    pipeline: PipelineModule,
    groups: ProcessGroups,
    plan: Plan,
    device: torch.device,
    *,
    scaler: Any,
    shard: Callable[[GradientReducer], ShardedOptimizer | None],
    options: GradientOptions,
    board: SyncBoard | None,
    flat: bool,
) -> Gradients:
    """All ranks must call.

    Args:
        scaler: of ``precision="16-mixed"``, or None.
        shard: shards the optimizer over the replicas, if that is asked for or better.
        board: where groups of replicas tell how they sum; None where there are none.
        flat: keep flat buffers even where nothing is reduced.
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
        options=options,
        board=board,
        flat=flat,
    )
    shards = shard(reducer)
    host = LocalHost if shards is None else functools.partial(ShardedHost, shards)
    return Gradients(
        reducer=reducer,
        exchange=Replicated(reducer) if shards is None else ShardedStates(reducer, shards),
        host=host(reducer.buffer, groups, device, **_about(pipeline, scaler)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How a rank's parameters are sharded over the replicas: their shards, what reduces and gathers, and why that was chosen."""

    shards: StageShards
    collective: Collective | None
    choice: SyncChoice | None


def make_sharing(
    pipeline: PipelineModule, groups: ProcessGroups, plan: Plan, device: torch.device, *, gradient_sync: str
) -> Sharing:
    """For this rank's stages, whose shards are not laid out yet. All ranks must call."""
    parameters = StageParameters.of(pipeline, plan.rank_of)
    queue = make_comm_queue(device)
    by_stage = [
        sum(p.numel() * p.itemsize for p in pipeline.parameters_of(stage).values()) for stage in pipeline.stages
    ]
    collective, choice = choose_collective(
        groups, queue, device, asked=gradient_sync, largest_bytes=max(by_stage), stages=pipeline.stages
    )
    shards = StageShards(
        parameters.by_name,
        stages=pipeline.stages,
        stages_of=parameters.stages_of,
        shared=parameters.shared,
        size=plan.placement.data_parallel_size,
        rank=groups.data_parallel_rank,
        queue=queue,
        gather=lambda tensor: None if collective is None else collective.gather(tensor),
        absence=pipeline.absence,
        compiled=pipeline.compiled_parameters,
    )
    return Sharing(shards=shards, collective=collective, choice=choice)


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
    all_gather: Callable[[Any], list[Any]],
) -> Gradients:
    """The same with parameters in shards: from here on a rank holds its share of them. All ranks must call.

    Args:
        sharing: of these stages; its shards may be laid out already.
        names: for each of the optimizer's groups, those of this rank's parameters.
        found: how the optimizer can be sharded.
        all_gather: what each rank of WORLD gives, on every rank.
    """
    stage_shards, choice = sharing.shards, sharing.choice
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
        dtype=GRAD_DTYPES[options.grad_dtype],
        queue=stage_shards.queue,
        collective=sharing.collective,
    )
    _tell_choices(reducer, choice, groups, all_gather)
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
    run: str,
    adopt: int,
    precision: str,
    with_states: Collection[str],
) -> Gradients:
    """The same with parameters and optimizer states on optimizer nodes: from here on a rank holds none. All ranks must call.

    Args:
        names: for each of the optimizer's groups, those of this rank's parameters.
        clusters, hosts: of each global rank.
        state_bytes: of the optimizer's states for each element of a parameter.
        master_weights: nodes step fp32 weights, from which parameters are rounded.
        keep_parameters: from the forward to the backward.
        fill: lays out parameters that know their nodes, and gives these the values.
        all_gather: what each rank of WORLD gives, on every rank.
        is_eager: nodes do not wait for the optimizer's step; the same on all ranks.
        scaler: of ``precision="16-mixed"``, or None.
        run, adopt, precision: see OptimizerNodes.open.
        with_states: parameters of which states are loaded afterwards.
    """
    parameters = StageParameters.of(pipeline, plan.rank_of)
    dtype = GRAD_DTYPES[options.grad_dtype]
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
        run=run,
        adopted=adopt,
        absence=pipeline.absence,
        compiled=pipeline.compiled_parameters,
    )
    units = remote.lay_out_units(dtype, master_weights=master_weights, with_states=with_states)
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
        run=run,
        adopt=adopt,
    )
    remote.connect(links, place_of)
    fill(remote)
    route = choose_route(
        options.gradient_sync,
        links,
        place_of=place_of,
        node_clusters=nodes.clusters_of(by_rank),
        clusters=clusters,
        hosts=hosts,
        placement=plan.placement,
        groups=groups,
        queue=remote.queue,
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
        dtype=dtype,
        queue=ThreadQueue(device),
        collective=None,
        is_eager=is_eager,
    )
    _tell_choices(reducer, route.choice, groups, all_gather)
    states = RemoteOptimizer(optimizer, names, remote, reducer, num_replicas=size, scales=scaler is not None)
    return Gradients(
        reducer=reducer,
        exchange=Layered(remote, reducer, states),
        host=RemoteHost(states, reducer, groups, is_owner=pipeline.is_owner, scaler=scaler),
        stage_shards=remote,
    )


def _tell_choices(
    reducer: LayeredReducer, choice: SyncChoice | None, groups: ProcessGroups, all_gather: Callable[[Any], list[Any]]
) -> None:
    """Bring what each pipeline rank has chosen to all, and print it. All ranks must call."""
    told = [] if choice is None or groups.data_parallel_rank > 0 else [choice]
    reducer.choices = sorted((c for of_rank in all_gather(told) for c in of_rank), key=lambda c: c.stages)
    if groups.builder.rank == 0:
        for made in reducer.choices:
            print(made.describe(), flush=True)


def _about(pipeline: PipelineModule, scaler: Any) -> dict[str, Any]:
    """What any host is told of this rank's part."""
    stages = ", ".join(map(str, pipeline.stages))
    return {"is_owner": pipeline.is_owner, "scaler": scaler, "place": f"stage {stages}"}
