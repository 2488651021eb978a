"""The plan of a run that is about to start: costs of the module and speeds of the hosts, found by all ranks, and what rank 0
chooses from them.

    live = decide(request)            # every rank must call
    live.plan, live.prediction

Costs come from a profile of one small microbatch (pipeline/profile.py): counted on rank 0 (``profile="flops"``), with
the speed of each host from a short measurement that all ranks make at the same time; or timed by every rank
(``profile="measure"``; on several hosts without GPUs also by itself). Links have the speeds that were measured on this topology before (``lightning-holmes topology``),
or those that are stated. Where there are no costs the plan is made without, and says why.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_holmes.admission import step_arguments
from lightning_holmes.cluster.network import Nic
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError, HolmesError
from lightning_holmes.job_layout import JobLayout
from lightning_holmes.learning import Lesson
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.device_speed import DeviceSpeed, probe_device, rate
from lightning_holmes.pipeline.profile import profile_step
from lightning_holmes.pipeline.seeds import preserved_random_state
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.choice import Choice, choose_by_costs, choose_without_costs, repeat_choice
from lightning_holmes.plan.choose import make_plan
from lightning_holmes.plan.cost_model import CostModel, Layout, Training
from lightning_holmes.plan.device_type import DeviceType
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.plan_options import PlanOptions
from lightning_holmes.plan.planner import Prediction
from lightning_holmes.plan.route import Network

ProfileKind = Literal["auto", "flops", "measure"]
_ONE_HOST_S, _SEVERAL_HOSTS_S = 0.03, 1.0  # of probing; several hosts may be unlike, and have shares of a core
_MEASURE_S = 1.5  # of timing the layers, at the least
_LARGEST_RUN = 50_000_000  # parameters of a module that may be run whole on one rank for its profile
# Speeds nearer to the fastest than this count as alike: a short measurement tells no more, above all not on CPUs that
# others use, too.
_ALIKE = {"cpu": 0.85, "cuda": 0.97}
_LOCAL_BYTES_PER_S = {"cpu": 1e9, "cuda": 20e9}  # between processes of one host: typical, not measured
_LOCAL_LATENCY_S = {"cpu": 100e-6, "cuda": 20e-6}
_UNKNOWN_BYTES_PER_S = 1.25e9
_FRAMES = 1448 / 1514  # what TCP over Ethernet leaves of the stated rate, with frames of 1500 bytes
# Of a rank's own time in a step that is neither of a microbatch nor the optimizer's (the trainer's loops, data, logs, checks), as
# so many tiny operators: about 15 ms where one takes 3 us. From the timelines of small runs on an idle link.
_STEP_OPERATORS = 5000
_MESSAGE_S = {"cpu": 150e-6, "cuda": 30e-6}  # of a rank's own time to start a transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What :func:`decide` works from.

    Attributes:
        batch: of the training step on this rank's device; None where nothing is trained.
        stand_ins: gives values to a module that was built without memory, while it is profiled.
        context: of a training step (precision).
        former: the plan and choice of the run before of this strategy, whose layout is kept.
        predicts: a prediction is wanted even where everything is settled.
        topology_given: the user has described the clusters and their links.
    """

    module: pl.LightningModule
    batch: Any
    lesson: Lesson
    options: PlanOptions
    layout: JobLayout
    profile: ProfileKind
    splitter: BatchSplitter
    device: torch.device
    rank: int
    world_size: int
    context: Callable[[], Any]
    stand_ins: Callable[[], AbstractContextManager[None]]
    former: LivePlan | None = None
    predicts: bool = False
    topology_given: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """The plan of a run, how it was chosen, and the prediction of a step, where costs are known."""

    plan: Plan
    choice: Choice | None
    num_layers: int

    @property
    def prediction(self) -> Prediction | None:
        """What a step is predicted to cost."""
        return None if self.choice is None else self.choice.prediction


@dataclass(frozen=True, slots=True)
class _Costs:
    """A profile, the work a second of each rank by which its unit is divided, and how both came about."""

    model: ModelCost
    speeds: tuple[float, ...]
    memory: tuple[float, ...]
    described: str
    update_s_per_byte: float = 0.0
    own_s: float = 0.0


def decide(request: PlanRequest) -> LivePlan:
    """The plan. Every rank must call, with the same request but for ``batch`` and ``rank``.

    Raises:
        HolmesError: the options do not fit the module; on every rank alike.
    """
    structure = request.lesson.structure
    num_layers = 0 if structure is None else structure.num_layers
    choice = None
    if structure is not None:
        choice = _agree(request, functools.partial(_choose, request, structure, _find_costs(request, structure)))
    layout = request.layout
    plan = make_plan(
        request.options,
        topology=layout.topology,
        placement=layout.placement,
        edges=layout.pairs,
        layers=None if structure is None else structure.layers,
        num_layers=num_layers,
        batch_size=request.lesson.batch_size,
        transports=layout.transports.describe,
        notes=layout.notes,
        choice=choice,
    )
    if structure is not None:
        structure.check_partition(plan.partition)
    return LivePlan(plan=plan, choice=choice, num_layers=num_layers)


def _agree(request: PlanRequest, choose: Callable[[], Choice]) -> Choice:
    """What rank 0 chooses, or why it cannot, on all ranks."""
    answer: list[Any] = [None]
    if request.rank == 0:
        try:
            answer = [choose()]
        except HolmesError as refusal:
            answer = [refusal]
    if request.world_size > 1:
        dist.broadcast_object_list(answer, 0)
    if isinstance(answer[0], HolmesError):
        raise answer[0]
    choice: Choice = answer[0]
    return choice


def _choose(request: PlanRequest, structure: ModuleStructure, costs: _Costs | str | None) -> Choice:
    options, size = request.options, request.layout.placement.pipeline_parallel_size
    kept = _kept(request, structure)
    if kept is not None:
        return repeat_choice(options, kept, reason="as in the run before, so that every rank keeps its part")
    forbidden = [cut for cut in range(structure.num_layers - 1) if any(b.forbids(cut) for b in structure.bypasses)]
    without = functools.partial(
        choose_without_costs,
        options,
        pipeline_parallel_size=size,
        num_layers=structure.num_layers,
        batch_size=request.lesson.batch_size,
        forbidden_cuts=forbidden,
        across_clusters=len({cluster.name for cluster, _ in request.layout.topology.places()}) > 1,
    )
    if costs is None or isinstance(costs, str):
        return without(reason=costs)
    assert request.lesson.batch_size is not None
    cost_model, layout, note = _cost_model(request, costs, forbidden)
    try:
        choice = choose_by_costs(
            options,
            cost_model,
            layout,
            batch_size=request.lesson.batch_size,
            not_interleaved=_not_interleaved(request, structure),
            # bears links that are slower than stated
            prefers_eager=request.layout.num_hosts > 1 and len(request.layout.topology.clusters) > 1,
            described=costs.described,
        )
    except ConfigurationError:
        if not forbidden:
            raise
        return without(reason="no cut is free")  # the check of the partition names the value that it would lose
    return replace(choice, notes=(*choice.notes, note)) if note else choice


def _not_interleaved(request: PlanRequest, structure: ModuleStructure) -> str | None:
    """Why several stages on a rank are not to be chosen; None if they may be."""
    if structure.early_changes:
        return "the module's step does not allow several stages on a rank"
    topology = request.layout.topology
    known = request.layout.num_hosts == 1 or request.topology_given or topology.measured_at_s is not None
    if not known:  # what a virtual card states says little, and interleaving multiplies what crosses clusters
        return "interleaving is tried where links are measured: lightning-holmes topology does that"
    return None


def _kept(request: PlanRequest, structure: ModuleStructure) -> Choice | None:
    """The choice of the run before, if it was for this module and these ranks."""
    former = request.former
    if former is None or former.choice is None or not isinstance(request.options.partition, str):
        return None
    same = (
        former.plan.layers == structure.layers
        and former.num_layers == structure.num_layers
        and former.plan.placement == request.layout.placement
    )
    return former.choice if same else None


# costs


def _find_costs(request: PlanRequest, structure: ModuleStructure) -> _Costs | str | None:
    """What the ranks find out together: costs (on rank 0 whole), why there are none, or None where nobody asks."""
    size = request.layout.placement.pipeline_parallel_size
    wanted = size > 1 and (request.options.leaves_open or request.predicts)
    if not wanted or _kept(request, structure) is not None:
        return None
    if request.batch is None or request.lesson.batch_size is None:
        return "nothing is trained" if request.batch is None else "the samples of a batch cannot be told"
    if request.layout.placement.tensor_parallel_size > 1:
        return "layers that are shared out over several ranks are not profiled"
    if structure.changed_parameters:
        return f"a step changes {structure.changed_parameters[0]} in place"
    several = request.layout.num_hosts > 1
    if request.world_size > 1:
        dist.barrier()
    speed = probe_device(request.device, seconds=_SEVERAL_HOSTS_S if several else _ONE_HOST_S)
    how = "FLOPs counted"
    # FLOPs do not tell how small microbatches slow a CPU down; on one host the ranks would time each other's load
    if request.profile == "measure" or (request.profile == "auto" and several and request.device.type == "cpu"):
        measured = _measured(request, structure, speed)
        if isinstance(measured, _Costs):
            return measured
        if request.profile == "measure":
            how += f" ({measured}, when it was to be timed)"
    speeds: list[DeviceSpeed] = _everyone(request, speed)
    if request.rank != 0:
        return None
    found = _profiled(request, structure, samples=2, mode="fake", operator_s=max(s.operator_s for s in speeds))
    if isinstance(found, str):
        return found
    return _Costs(
        model=found,
        speeds=(rates := alike_speeds([s.flops_per_s for s in speeds], request.device.type)),
        memory=tuple(s.memory_bytes for s in speeds),
        described=f"{how}; {_described(request, rates)}",
        own_s=_STEP_OPERATORS * max(s.operator_s for s in speeds),
    )


def _measured(request: PlanRequest, structure: ModuleStructure, speed: DeviceSpeed) -> _Costs | str:
    """Every rank times all layers; the costs are rank 0's, the speeds of the others are relative to it."""
    samples = _microbatch_samples(request)
    sizes = (samples,) if request.options.num_microbatches != "auto" or samples == 1 else (samples // 2, samples)
    found: list[ModelCost] = []
    problem = None
    for number in sizes:
        cost = _profiled(request, structure, samples=number, mode="measure", operator_s=0.0)
        if isinstance(cost, str):
            problem = cost
            break
        found.append(cost)
    update = _time_update(request.device)
    mine = (problem, None if problem else found[-1].forward + found[-1].backward, speed, update)
    everyone: list[Any] = _everyone(request, mine)
    problems = [entry[0] for entry in everyone if entry[0] is not None]
    if problems:
        return str(problems[0])
    model = found[-1] if len(found) == 1 else _with_fixed_seconds(*found)
    seconds = [entry[1] for entry in everyone]
    speeds = alike_speeds([seconds[0] / taken for taken in seconds], request.device.type)
    return _Costs(
        model=model,
        speeds=speeds,
        memory=tuple(entry[2].memory_bytes for entry in everyone),
        described=f"layers timed on every rank; {_described(request, speeds)}",
        update_s_per_byte=max(entry[3] for entry in everyone),
        own_s=_STEP_OPERATORS * max(entry[2].operator_s for entry in everyone),
    )


def _microbatch_samples(request: PlanRequest) -> int:
    batch_size, count = request.lesson.batch_size or 1, request.options.num_microbatches
    if count == "auto":
        count = 4 * request.layout.placement.pipeline_parallel_size
    return -(-batch_size // min(count, batch_size))


def _with_fixed_seconds(small: ModelCost, large: ModelCost) -> ModelCost:
    """Costs from two sizes of microbatch: what does not grow with the samples is fixed."""
    ratio = large.microbatch_samples / small.microbatch_samples

    def join(one: LayerCost, other: LayerCost) -> LayerCost:
        fixed = [
            min(max(0.0, (ratio * before - after) / (ratio - 1)), 0.9 * after)
            for before, after in ((one.forward, other.forward), (one.backward, other.backward))
        ]
        return replace(
            other,
            forward=other.forward - fixed[0],
            backward=other.backward - fixed[1],
            fixed_forward_s=fixed[0],
            fixed_backward_s=fixed[1],
        )

    return replace(
        large,
        before=join(small.before, large.before),
        layers=tuple(join(one, other) for one, other in zip(small.layers, large.layers, strict=True)),
        after=join(small.after, large.after),
    )


def _profiled(
    request: PlanRequest,
    structure: ModuleStructure,
    *,
    samples: int,
    mode: Literal["fake", "measure"],
    operator_s: float,
) -> ModelCost | str:
    """The costs of a microbatch of at most so many samples on this rank; or why they cannot be had."""
    module, whole = request.module, request.lesson.batch_size or 1
    parts = max(1, -(-whole // samples))
    own = getattr(module, "split_batch", None)
    try:
        with preserved_random_state(request.device), request.stand_ins() if mode == "fake" else nullcontext():
            if callable(own) and parts > 1:
                part = next(iter(own(request.batch, parts)))
            else:
                part = request.splitter.split(request.batch, parts)[0]
            part = tree.map_tensors(torch.Tensor.clone, part)
            arguments = (part, *([0] * (step_arguments(module, "training_step") - 1)))
            return profile_step(
                module,
                arguments,
                structure=structure,
                mode=mode,
                context=request.context,
                microbatch_samples=-(-whole // parts),
                operator_s=operator_s,
                may_run=sum(p.numel() for p in module.parameters()) <= _LARGEST_RUN,
                seconds=_MEASURE_S,
            )
    except Exception as error:  # a profile is a help: whatever the user's step does not like, the run goes on without
        text = str(error).splitlines()[0] if str(error) else "no message"
        return f"its step could not be profiled ({type(error).__name__}: {text[:200]})"


def _time_update(device: torch.device) -> float:
    """Seconds of AdamW's step for each byte of parameters: what optimizers of its kind cost."""
    parameter = torch.nn.Parameter(torch.zeros(1 << 19, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()

    def step() -> torch.Tensor:
        optimizer.step()
        return parameter

    return 1 / rate(device, 0.1, 1, step) / (parameter.numel() * parameter.element_size())


def _everyone(request: PlanRequest, mine: Any) -> list[Any]:
    if request.world_size == 1:
        return [mine]
    found: list[Any] = [None] * request.world_size
    dist.all_gather_object(found, mine)
    return found


def alike_speeds(speeds: Sequence[float], device_type: str) -> tuple[float, ...]:
    """Measured speeds, with those that a measurement cannot tell apart made the same: each group's mean, the fastest first."""
    threshold = _ALIKE.get(device_type, 0.85)
    order = sorted(range(len(speeds)), key=lambda rank: -speeds[rank])
    result = list(speeds)
    while order:
        group = [rank for rank in order if speeds[rank] >= threshold * speeds[order[0]]]
        mean = math.fsum(speeds[rank] for rank in group) / len(group)
        for rank in group:
            result[rank] = mean
        order = [rank for rank in order if rank not in group]
    return tuple(result)


def _described(request: PlanRequest, speeds: Sequence[float]) -> str:
    """How fast the clusters are, in words."""
    fastest = max(speeds)
    if min(speeds) == fastest:
        return "all ranks alike"
    by_cluster: dict[str, float] = {}
    for rank, (cluster, _) in enumerate(request.layout.topology.places()):
        by_cluster[cluster.name] = min(by_cluster.get(cluster.name, math.inf), speeds[rank] / fastest)
    return "relative speeds " + ", ".join(f"{name} {speed:.2f}" for name, speed in list(by_cluster.items())[:8])


# the cost model of this job


def _cost_model(request: PlanRequest, costs: _Costs, forbidden: Sequence[int]) -> tuple[CostModel, Layout, str]:
    """The cost model, the layout as it stands, and a note where links have no known speed."""
    placement, device = request.layout.placement, request.device.type
    topology = request.layout.topology
    layout = Layout(
        pipeline=placement.pipeline_parallel_size,
        tensor=placement.tensor_parallel_size,
        data=placement.data_parallel_size,
        grid=_device_grid(placement.grid, topology),
    )
    local, latency = _LOCAL_BYTES_PER_S.get(device, 1e9), _LOCAL_LATENCY_S.get(device, 100e-6)
    sockets = request.layout.is_gloo
    note = ""
    if request.layout.num_hosts == 1:
        topology = Topology.single_cluster(1, request.world_size)  # whatever clusters a file deals the ranks to
        network = Network(topology, local_bytes_per_s=local, local_latency_s=latency)
        order = list(range(request.world_size))
        layout = replace(layout, grid=tuple(tuple(row) for row in placement.grid))
    else:
        network = Network(
            topology,
            local_bytes_per_s=local,
            local_latency_s=latency,
            efficiency=_FRAMES if sockets else 1.0,
            sockets=sockets,
        )
        order = [rank for host in topology.hosts for rank in topology.ranks_of_host(host.name)]
    devices = tuple(
        DeviceType(
            name=f"devices of {cluster.name}",
            peak_flops_per_s=1.0,  # not used: the hosts' speeds stand in for it
            memory_bytes=min(costs.memory) / (max(h.devices for h in cluster.hosts) if device == "cpu" else 1),
            local_bytes_per_s=local,
            efficiency=1.0,
        )
        for cluster in topology.clusters
    )
    training = Training(
        batch_samples=(request.lesson.batch_size or 1) * placement.data_parallel_size,
        overlap_reduce=True,
        update_s_per_byte=costs.update_s_per_byte,
        message_s=_MESSAGE_S.get(device, 1e-4),
        own_s=costs.own_s,
    )
    host_speeds, first = [], 0
    for host in topology.hosts:
        host_speeds.append(min(costs.speeds[rank] for rank in order[first : first + host.devices]))
        first += host.devices
    model = replace(costs.model, forbidden_cuts=tuple(forbidden))
    make = functools.partial(CostModel, model, devices=devices, training=training, host_speeds=host_speeds)
    cost_model = make(network)
    try:
        cost_model.facts(layout)
    except ConfigurationError as unknown:
        bare = Network(_with_stated_speeds(topology), local_bytes_per_s=local, local_latency_s=latency)
        cost_model = make(bare)
        note = (
            f"links: taken as 10 Gbit/s where nothing is known ({str(unknown).splitlines()[0][:160]}); "
            "lightning-holmes topology measures them"
        )
    return cost_model, layout, note


def _device_grid(grid: Sequence[Sequence[int]], topology: Topology) -> tuple[tuple[int, ...], ...]:
    """A placement's global ranks as devices in the order of the topology."""
    order = [rank for host in topology.hosts for rank in topology.ranks_of_host(host.name)]
    device = {rank: index for index, rank in enumerate(order)}
    return tuple(tuple(device[rank] for rank in row) for row in grid)


def _with_stated_speeds(topology: Topology) -> Topology:
    """The topology with an Ethernet card of 10 Gbit/s on every host, and nothing else."""
    card = Nic(name="unknown", kind="ethernet", bandwidth_bytes_per_s=_UNKNOWN_BYTES_PER_S)
    clusters = tuple(
        replace(
            cluster,
            fabric=None,
            speeds=(),
            fallback=None,
            hosts=tuple(replace(host, nics=(card,)) for host in cluster.hosts),
        )
        for cluster in topology.clusters
    )
    return replace(topology, clusters=clusters, links=())
