"""Gradients of a fit: the functions that make a reducer, which is the exchange that a step's schedule calls, and the optimizer's host together."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_holmes.comm.collectives import COMPRESSIONS, Collective, make_collective
from lightning_holmes.comm.queue import make_comm_queue
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
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
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.node_routes import sums_inside
from lightning_holmes.plan.placement import clusters_of_stages
from lightning_holmes.plan.plan import Plan
from lightning_holmes.strategy import sharding
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients of one fit on one rank: ``reducer`` accumulates and reduces them when the schedule says so, for the optimizer of ``host``.

    Attributes:
        are_sums: over ranks, from a window's last batch on.
    """

    reducer: LocalReducer | BucketReducer | LayeredReducer
    host: OptimizerHost
    are_sums: bool = True

    def close(self) -> None:
        """Undo the changes to the optimizer and the parameters, and release buffers, hooks and the queue."""
        self.host.close()
        self.reducer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPart:
    """The part of a module that this rank trains, and the optimizer.

    Attributes:
        structure: the traced structure of the module's steps.
        step: the optimizer, and how it can be sharded; None: there is none, or it was not tested.
    """

    trainer: "pl.Trainer"
    job: Job
    options: Options
    plan: Plan
    pipeline: PipelineModule
    structure: ModuleStructure | None
    step: ShardedStep | None

    @property
    def scaler(self) -> Any:
        """The GradScaler of ``precision="16-mixed"``, or None."""
        return getattr(self.trainer.precision_plugin, "scaler", None)

    @property
    def parameters(self) -> StageParameters:
        """The parameters of this rank's stages."""
        return StageParameters.of(self.pipeline, self.plan.rank_of)

    @property
    def about(self) -> dict[str, Any]:
        """The arguments about this rank's part of the module that hosts take."""
        stages = ", ".join(map(str, self.pipeline.stages))
        return {"is_owner": self.pipeline.is_owner, "scaler": self.scaler, "place": f"stage {stages}"}

    def collective(self, compression: str | None = None) -> Collective | None:
        """Return the collective over the replicas of this rank's stages; None if there is one replica."""
        groups, rounded = self.job.groups, None if compression is None else COMPRESSIONS[compression]
        name, sync = self.plan.collective_of(groups.pipeline_rank), groups.gradients
        return None if sync is None else make_collective(name, sync, rounded)

    def admitted(self, asked: str) -> ShardedStep:
        """Return the optimizer; refuse a fit that has none."""
        if self.step is None:
            raise UnsupportedModuleError(
                f"{asked} needs an optimizer, to whose parameters gradients belong: configure_optimizers gives none"
            )
        return self.step


def make_gradients(part: TrainedPart) -> Gradients:
    """Make the gradients for whole parameters. All ranks must call."""
    pipeline, plan, groups, device = part.pipeline, part.plan, part.job.groups, part.job.connection.device
    parameters = part.parameters
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters.by_name.values())
    reduced = plan.placement.data_parallel_size > 1 or bool(parameters.shared) or groups.tensor_parallel is not None
    is_sharded = plan.sharding == "optimizer"
    if not is_sharded and not reduced and not (low and plan.placement.world_size > 1):
        local = LocalReducer(pipeline.module, parameters.by_name)
        return Gradients(reducer=local, host=LocalHost(local, groups, **part.about), are_sums=False)
    reducer = BucketReducer(
        parameters.by_name,
        groups,
        plan.placement,
        stages=pipeline.stages,
        stages_of=parameters.stages_of,
        shared=parameters.shared,
        queue=make_comm_queue(device),
        collective=part.collective(part.options.compression),
    )
    if not is_sharded:
        return Gradients(reducer=reducer, host=LocalHost(reducer, groups, **part.about), are_sums=reduced)
    assert part.step is not None
    readers = sharding.gradient_readers(part.trainer)
    step = replace(part.step, whole_gradients=bool(readers))
    if not step.by_elements:
        pl.utilities.rank_zero_info(f"the optimizer is sharded by whole parameters, since {step.found.reason}")
    elif readers:
        pl.utilities.rank_zero_info(f"gradients stay whole on each replica for {readers[0]}")
    reducer.lay_out()
    memory = ReplicatedMemory(
        reducer, None if groups.gradients is None else groups.gradients.whole, lazily=can_gather_lazily(pipeline.module)
    )
    host = ShardedHost(step, memory, reducer, groups, **part.about)
    memory.watch(pipeline.module)
    return Gradients(reducer=reducer, host=host)


def make_stage_shards(part: TrainedPart) -> StageShards:
    """Make the shards of this rank's stages, not laid out yet. All ranks must call."""
    parameters, groups = part.parameters, part.job.groups
    return StageShards(
        parameters.by_name,
        stages=part.pipeline.stages,
        stages_of=parameters.stages_of,
        shared=parameters.shared,
        size=part.plan.placement.data_parallel_size,
        rank=groups.data_parallel_rank,
        queue=make_comm_queue(part.job.connection.device),
        collective=part.collective(),
        absence=part.pipeline.absence,
        compiled=part.pipeline.compiled_parameters,
    )


def make_layered_gradients(part: TrainedPart, present: StageShards | None) -> tuple[Gradients, StageShards]:
    """Move the parameters into shards, unless they are in shards, ``present``, already, and make their gradients. All ranks must call.

    Raises:
        UnsupportedModuleError: parameters cannot live in shards.
    """
    step = part.admitted('sharding="parameters"')
    refusal = sharding.refusal_of_shards(step.found, step.optimizer, part.trainer, part.structure)
    if refusal:
        asked, without = part.options.describe_sharding("parameters")
        raise UnsupportedModuleError(f"{asked}: {refusal}; {without}")
    groups = part.job.groups
    shards = make_stage_shards(part) if present is None else present
    shards.lay_out(by_elements=step.by_elements)
    reducer = LayeredReducer(shards, groups, part.plan.placement)
    host = ShardedHost(step, shards, reducer, groups, **part.about)
    return Gradients(reducer=reducer, host=host), shards


def make_remote_gradients(
    part: TrainedPart, *, fill: Callable[[RemoteParameters], None], with_states: Collection[str]
) -> Gradients:
    """Move parameters and optimizer states to optimizer nodes, and make the gradients for them: from here on a rank holds no parameters. All
    ranks must call.

    Args:
        fill: lays out the parameters, which are connected to their nodes by then, and gives the nodes the values.
        with_states: the names of parameters whose optimizer states are loaded afterwards.

    Raises:
        UnsupportedModuleError: nodes cannot hold the parameters, or step the optimizer.
    """
    job, pipeline, plan, groups = part.job, part.pipeline, part.plan, part.job.groups
    count, clusters = part.options.optimizer_nodes, part.job.clusters
    step = part.admitted(f"optimizer_nodes={count}")
    refusal = sharding.refusal_of_nodes(step.found, step.optimizer, part.trainer, part.structure)
    if refusal:
        raise UnsupportedModuleError(f"optimizer_nodes={count}: {refusal}; use optimizer_nodes=0")
    reasons = job.connection.all_gather(sharding.why_deferred(part.trainer))  # a callback may be on one rank only
    deferred = next(filter(None, reasons), "")
    if job.connection.rank == 0:
        when = f"at the optimizer's step, since {deferred}" if deferred else "as soon as its last gradient has come"
        print(f"optimizer nodes update a layer {when}", flush=True)
    parameters, nodes = part.parameters, job.optimizer_nodes(count)
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
        device=groups.builder.device,
        num_nodes=len(own),
        tree=Tree(inside, groups.builder.describe),
        absence=pipeline.absence,
        compiled=pipeline.compiled_parameters,
    )
    units = remote.lay_out_units(master_weights=step.master_weights, with_states=with_states)
    told = describe_optimizer(step.optimizer, step.names, marks_on(parameters.by_name, step.names))
    state_bytes = step.found.state_bytes * (2 if step.master_weights else 1)
    remote.links = nodes.open(
        {
            "optimizer": told | {"state_bytes": state_bytes},
            "states": part.options.optimizer_states,
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
    reducer = RemoteReducer(remote, groups, plan.placement, is_eager=not deferred)
    host = RemoteHost(
        step.optimizer, step.names, remote, reducer, groups, is_owner=pipeline.is_owner, scaler=part.scaler
    )
    reducer.on_laid_out = host.prepare
    return Gradients(reducer=reducer, host=host)
