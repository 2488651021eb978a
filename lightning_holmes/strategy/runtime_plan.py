"""The plan of a run that is about to start: all ranks find the costs of the module and the speeds of the hosts, and rank 0 chooses a plan from
them.

    live = decide(request)            # every rank must call
    live.plan, live.prediction

Costs come from profiling.py. Links have the speeds that were measured on this topology before (``lightning-holmes
topology``) or at the start, or stated speeds. If there are no costs, the plan is made without them, and says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_holmes.cluster.network import Nic
from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.comm.objects import broadcast_value
from lightning_holmes.errors import ConfigurationError, HolmesError
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.collective_choice import Sharding, choose_collectives
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import DeviceType
from lightning_holmes.plan.made_for import MadeFor, cluster_facts
from lightning_holmes.plan.pipeline_plan import PipelinePlan, plan_by_costs, plan_by_count, repeat_plan
from lightning_holmes.plan.placement import device_grid, make_placement
from lightning_holmes.plan.plan_making import make_plan
from lightning_holmes.plan.rounding import rounded_links
from lightning_holmes.plan.route import REACHED, SOCKETS, Network
from lightning_holmes.plan.run_shape import Layout
from lightning_holmes.plan.schedule import stages_of_rank
from lightning_holmes.plan.self_adapting import NothingFitsError
from lightning_holmes.plan.training import make_training
from lightning_holmes.strategy.plan_request import PlanRequest, RuntimePlan
from lightning_holmes.strategy.profiling import Costs, find_costs
from lightning_holmes.torch_private import is_compiled

_UNKNOWN_BYTES_PER_S = 1.25e9
_WORTH_ADVISING = 1.05  # times the samples a second


def decide(request: PlanRequest) -> RuntimePlan:
    """Choose the plan. Every rank must call; requests may differ only in what belongs to the rank (``rank``, ``device``, ``sample``).

    Raises:
        HolmesError: the options do not fit the module; on every rank alike.
    """
    request = _settle_chunks(_settled(request))
    structure = request.traced.structure
    num_layers = 0 if structure is None else structure.num_layers
    choice = None
    if structure is not None:
        costs = None if _kept(request, structure) is not None else find_costs(request, structure)
        choice = _agree(request, functools.partial(_choose, request, structure, costs))
    layout = request.layout
    sharding, why = _choose_sharding(request, structure, choice)
    plan = make_plan(
        request.options,
        topology=layout.topology,
        placement=layout.placement,
        edges=layout.pairs,
        layers=None if structure is None else structure.layers,
        num_layers=num_layers,
        batch_size=request.traced.batch_size,
        transports=layout.transports.describe,
        notes=(*layout.notes, *why),
        choice=choice,
        sharding=sharding,
        collectives=choose_collectives(
            "auto" if request.training.optimizer_nodes else request.gradient_sync,
            layout.placement,
            rounded_links(layout.topology),
            sharding=sharding,
            sockets=layout.is_gloo,
            by_links=layout.num_hosts > 1 and request.measures,
        ),
        made_for=MadeFor(
            module=type(request.module).__name__,
            num_parameters=sum(p.numel() for p in request.module.parameters()),
            clusters=cluster_facts(layout.topology),
        ),
    )
    if structure is not None:
        structure.check_partition(plan.partition, one_rank=layout.placement.pipeline_parallel_size == 1)
    return RuntimePlan(plan=plan, choice=choice, num_layers=num_layers)


def _choose_sharding(
    request: PlanRequest, structure: ModuleStructure | None, choice: PipelinePlan | None
) -> tuple[Sharding, list[str]]:
    """Return what is sharded over the replicas, and a note. Every rank must call."""
    if request.training.optimizer_nodes:
        return "none", []  # nodes hold everything
    if request.training.sharding == "parameters" or (choice is not None and choice.sharded_parameters):
        return "parameters", []
    if request.shards_optimizer is None:
        return "none", []
    names = {name for name, _ in request.module.named_parameters()}
    predicted = False
    if choice is not None and structure is not None:
        size = request.layout.placement.pipeline_parallel_size
        own, _, _ = request.layout.placement.coordinate(request.rank)
        stages = stages_of_rank(choice.schedule, own, pipeline_parallel_size=size, num_chunks=choice.num_chunks)
        names = set().union(*(structure.parameters_of(choice.partition, stage) for stage in stages))
        predicted = choice.prediction is not None and choice.prediction.sharded_optimizer
    on, reason = request.shards_optimizer(names, predicted)
    return "optimizer" if on else "none", [f"sharding: {'optimizer' if on else 'none'}, {reason}"] if reason else []


def _settle_chunks(request: PlanRequest) -> PlanRequest:
    """Set num_chunks to 1 if the layers shall or may run breadth-first but the module allows one stage a rank only; if they shall, add a note with
    the reason."""
    options, traced, layout = request.options, request.traced, request.layout
    if not _may_be_layered(request) or options.num_chunks != "auto" or not isinstance(options.partition, str):
        return request
    if traced.structure is None:
        reason = traced.reason.splitlines()[0]
    elif traced.structure.early_changes:
        reason = f"the step changes {traced.structure.early_changes[0]} before or between the layers"
    else:
        return request
    notes = layout.notes
    if options.is_layered:
        notes = (*notes, f"num_chunks: 1, so that nothing is layered: {reason}")
    return replace(request, options=replace(options, num_chunks=1), layout=replace(layout, notes=notes))


def _may_be_layered(request: PlanRequest) -> bool:
    """Return whether a single pipeline rank may run several stages breadth-first: if asked for, or if parameters may be sharded."""
    return request.options.is_layered or (request.training.sharding == "auto" and request.why_not_sharded is None)


def _settled(request: PlanRequest) -> PlanRequest:
    """Set the number of microbatches if it is "auto" and only one number is exact: that of the run that is resumed, or 1."""
    if request.options.num_microbatches != "auto":
        return request
    saved, dependence, size = request.resumed_microbatches, request.traced.dependence, request.traced.batch_size
    if saved is not None and saved <= (size or saved):
        count, why = saved, "as in the run that is resumed, so that random numbers go on"
    elif dependence:
        count, why = 1, f"as in plain Lightning: {dependence}; give a number to split batches all the same"
    else:
        return request
    layout = replace(request.layout, notes=(*request.layout.notes, f"num_microbatches: {count}, {why}"))
    return replace(request, options=replace(request.options, num_microbatches=count), layout=layout)


def _agree(request: PlanRequest, choose: Callable[[], PipelinePlan]) -> PipelinePlan:
    """Return rank 0's choice, or raise its error, on all ranks."""
    answer: list[Any] = [None]
    if request.rank == 0:
        try:
            answer = [choose()]
        except HolmesError as refusal:
            answer = [refusal]
    answer = broadcast_value(answer)
    if isinstance(answer[0], HolmesError):
        raise answer[0]
    choice: PipelinePlan = answer[0]
    return choice


def _choose(request: PlanRequest, structure: ModuleStructure, costs: Costs | str | None) -> PipelinePlan:
    options, size = request.options, request.layout.placement.pipeline_parallel_size
    kept = _kept(request, structure)
    if kept is not None:
        return repeat_plan(options, kept, reason="as in the run before, so that every rank keeps its part")
    forbidden = _forbidden_cuts(request, structure, size)
    without = functools.partial(
        plan_by_count,
        options,
        pipeline_parallel_size=size,
        num_layers=structure.num_layers,
        batch_size=request.traced.batch_size,
        forbidden_cuts=forbidden,
        across_clusters=len({cluster.name for cluster, _ in request.layout.topology.places()}) > 1,
    )
    if costs is None or isinstance(costs, str):
        return without(reason=costs)
    cost_model, layout, guessed = _cost_model(request, costs, forbidden)
    choose = functools.partial(
        plan_by_costs,
        options,
        not_interleaved=_not_interleaved(request, structure),
        may_split=not any(map(is_compiled, request.module.modules())),
        sharding=request.training.sharding,
        why_not_sharded=request.why_not_sharded,
        described=costs.described,
    )
    try:
        choice = choose(cost_model, layout)
    except ConfigurationError as error:
        if not forbidden or isinstance(error, NothingFitsError):
            raise
        return without(reason="no split point is free")  # check_partition will name the value that the split would lose
    notes = [guessed] if guessed else []
    if options.pipeline_parallel_size == "auto" and isinstance(options.partition, str):
        lengths = _other_lengths(request, structure)
        made = {
            length: _cost_model(_with_pipeline(request, length), costs, _forbidden_cuts(request, structure, length))
            for length in lengths
        }
        # if the speeds of the chosen layout's links are known, leave out lengths for which they would have to be guessed, and the reverse
        comparable = {length: found[:2] for length, found in made.items() if bool(found[2]) == bool(guessed)}
        notes += _tell_others(choice, choose, comparable)
    return replace(choice, notes=(*choice.notes, *notes))


def _forbidden_cuts(request: PlanRequest, structure: ModuleStructure, pipeline_parallel_size: int) -> list[int]:
    """Return the split points that lose a value; a single pipeline rank has several stages only if they run breadth-first."""
    return structure.forbidden_cuts(one_rank=pipeline_parallel_size == 1 and _may_be_layered(request))


def _other_lengths(request: PlanRequest, structure: ModuleStructure) -> list[int]:
    """Return the next smaller and the next larger pipeline size that the number of ranks allows."""
    size = request.layout.placement.pipeline_parallel_size
    possible = [n for n in range(1, structure.num_layers + 1) if request.world_size % n == 0]
    return [*[n for n in possible if n < size][-1:], *[n for n in possible if n > size][:1]]


def _with_pipeline(request: PlanRequest, length: int) -> PlanRequest:
    """Return the request with the ranks placed for pipelines of ``length`` ranks."""
    placement = make_placement(request.layout.topology, world_size=request.world_size, pipeline_parallel_size=length)
    return replace(request, layout=replace(request.layout, placement=placement))


def _tell_others(
    choice: PipelinePlan,
    choose: Callable[[CostModel, Layout], PipelinePlan],
    others: Mapping[int, tuple[CostModel, Layout]],
) -> list[str]:
    """Return a note with the predicted speed of other pipeline sizes, and advice if one is faster. The groups of ranks and the parts of the
    data are made before the first batch, from which costs are known, so that they are not chosen here: lightning-holmes plan does that."""
    chosen, shown = choice.prediction, []
    assert chosen is not None
    ratios: dict[int, float] = {}
    for length, (cost_model, layout) in others.items():
        try:
            found = choose(cost_model, layout).prediction
        except NothingFitsError:
            shown.append(f"{length}: does not fit the memory")
            continue
        except ConfigurationError:  # the options do not fit this length
            continue
        assert found is not None
        ratios[length] = found.samples_per_s / chosen.samples_per_s
        shown.append(f"{length}: {ratios[length]:.2f}x")
    if not shown:
        return []
    advice = ""
    fastest = max(ratios, key=lambda length: ratios[length], default=None)
    if fastest is not None and ratios[fastest] > _WORTH_ADVISING:
        advice = (
            f"; give pipeline_parallel_size={fastest}, with which there are other replicas and so another global batch"
        )
    return [f"samples a second by prediction with another pipeline_parallel_size: {', '.join(shown)}{advice}"]


def _not_interleaved(request: PlanRequest, structure: ModuleStructure) -> str | None:
    """Return why several stages on a rank must not be chosen; None if they may be."""
    if structure.early_changes:
        return "the module's step does not allow several stages on a rank"
    topology = request.layout.topology
    known = request.layout.num_hosts == 1 or request.topology_given or topology.measured_at_s is not None
    # the speed that a virtual card states is unreliable, and interleaving multiplies the traffic between clusters
    if not known:
        return "interleaving is tried where links are measured: lightning-holmes topology does that"
    return None


def _kept(request: PlanRequest, structure: ModuleStructure) -> PipelinePlan | None:
    """Return the choice of the previous run, if it was for the same layers and the same placement of ranks; else None."""
    former = request.former
    if former is None or former.choice is None or not isinstance(request.options.partition, str):
        return None
    same = (
        former.plan.layers == structure.layers
        and former.num_layers == structure.num_layers
        and former.plan.placement == request.layout.placement
    )
    return former.choice if same else None


def _cost_model(request: PlanRequest, costs: Costs, forbidden: Sequence[int]) -> tuple[CostModel, Layout, str]:
    """Return the cost model, the layout of the ranks, and a note if links have no known speed, else ""."""
    placement, device = request.layout.placement, request.device.type
    topology = rounded_links(request.layout.topology)
    layout = Layout(
        pipeline=placement.pipeline_parallel_size,
        tensor=placement.tensor_parallel_size,
        data=placement.data_parallel_size,
        grid=device_grid(placement.grid, topology),
    )
    sockets = request.layout.is_gloo
    note = ""
    one_host = request.layout.num_hosts == 1
    if one_host:
        # whatever clusters a topology file assigns the ranks to
        topology = Topology.single_cluster(1, request.world_size)
        layout = replace(layout, grid=tuple(tuple(row) for row in placement.grid))
    ranks = {host.name: topology.ranks_of_host(host.name) for host in topology.hosts}
    local = [
        min(costs.local_bytes_per_s[rank] for host in cluster.hosts for rank in ranks[host.name])
        for cluster in topology.clusters
    ]
    latency = costs.local_latency_s
    connect = functools.partial(Network, local_bytes_per_s=local, local_latency_s=latency)
    if not one_host:
        connect = functools.partial(connect, efficiency=SOCKETS if sockets else REACHED, sockets=sockets)

    def device_memory(host: Host) -> float:
        """Return the bytes of a host's smallest device; on CPUs an equal share of the host's memory."""
        return min(costs.memory[rank] for rank in ranks[host.name]) / (host.devices if device == "cpu" else 1)

    devices = tuple(
        DeviceType(
            name=f"devices of {cluster.name}",
            peak_flops_per_s=1.0,  # not used: the hosts' speeds stand in for it
            memory_bytes=min(map(device_memory, cluster.hosts)),
            local_bytes_per_s=rate,
            efficiency=1.0,
        )
        for cluster, rate in zip(topology.clusters, local, strict=True)
    )
    training = make_training(
        request.training,
        costs.model,
        batch_samples=(request.traced.batch_size or 1) * placement.data_parallel_size,
        device=device,
        update_s_per_byte=costs.update_s_per_byte,
        byte_s=costs.byte_s if sockets and device == "cpu" else 0.0,
        own_s=costs.own_s,
    )
    host_speeds = [min(costs.speeds[rank] for rank in ranks[host.name]) for host in topology.hosts]
    model = replace(costs.model, forbidden_cuts=tuple(forbidden))
    make = functools.partial(CostModel, model, devices=devices, training=training, host_speeds=host_speeds)
    cost_model = make(connect(topology))
    try:
        cost_model.facts(layout)
    except ConfigurationError as unknown:
        cost_model = make(connect(_with_stated_speeds(topology)))
        note = (
            f"links: taken as 10 Gbit/s where nothing is known ({str(unknown).splitlines()[0][:160]}); "
            "lightning-holmes topology measures them"
        )
    return cost_model, layout, note


def _with_stated_speeds(topology: Topology) -> Topology:
    """Return the topology with 10 Gbit/s for each card whose speed is not known, and with such an Ethernet card on hosts that have none; known
    speeds are kept."""
    return replace(
        topology,
        clusters=tuple(
            replace(cluster, hosts=tuple(replace(host, nics=_stated(cluster, host)) for host in cluster.hosts))
            for cluster in topology.clusters
        ),
    )


def _stated(cluster: Cluster, host: Host) -> tuple[Nic, ...]:
    nics = [
        replace(nic, bandwidth_bytes_per_s=_UNKNOWN_BYTES_PER_S)
        if nic.bandwidth_bytes_per_s is None and cluster.speed(nic.kind) is None
        else nic
        for nic in host.nics
    ]
    if host.nic_of("ethernet") is None and cluster.speed("ethernet") is None:
        nics.append(Nic(name="unknown", kind="ethernet", bandwidth_bytes_per_s=_UNKNOWN_BYTES_PER_S))
    return tuple(nics)
