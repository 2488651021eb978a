"""Costs of a module on the hosts of a job: the FLOPs of its layers, and the speed of each rank; found by all ranks together. And the cost
model that plans are predicted with.

FLOPs are counted on rank 0, on one microbatch of two samples (pipeline/profile.py). The speed of each rank, in matrix products and in
memory traffic, comes from a short measurement that all ranks make at the same time, in the dtype of the step's matrix products. It is
rounded coarsely, so that every start on the same hosts finds the same costs.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_holmes.cluster.network import Nic
from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.comm.objects import all_gather_values
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.device_speed import DeviceSpeed, probe_device, product_dtype
from lightning_holmes.pipeline.outside import Outside
from lightning_holmes.pipeline.preserved_trainer import preserved_trainer
from lightning_holmes.pipeline.profile import profile_step
from lightning_holmes.pipeline.seeds import preserved_random_state
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import DeviceType
from lightning_holmes.plan.layer_cost import ModelCost
from lightning_holmes.plan.placement import Placement, layout_of
from lightning_holmes.plan.rounding import rounded, rounded_links
from lightning_holmes.plan.route import REACHED, SOCKETS, Network
from lightning_holmes.plan.training import make_training
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.run_context import RunContext, step_context
from lightning_holmes.strategy.samples import StepSample
from lightning_holmes.strategy.tracing import TraceResult

_UNKNOWN_BYTES_PER_S = 1.25e9
_PROBE_S = 0.03
# on CPUs of several hosts, which may have a share of a core: over many of its periods of a tenth of a second
_SHARED_PROBE_S = 2.0
LARGEST_RUN = 50_000_000
"""The largest number of parameters of a module that may be run whole on one rank for its profile."""
# A rank whose speed is at least this fraction of a faster rank's counts as equally fast: a short measurement is no more accurate, least of
# all on CPUs that other processes use, too.
_ALIKE = {"cpu": 0.75, "cuda": 0.97}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of a module's layers, and the speed of each rank.

    Attributes:
        model: the profile of the layers.
        speeds: by rank; the FLOPs and bytes a second are rounded.
        described: how the costs were found, in words.
    """

    model: ModelCost
    speeds: tuple[DeviceSpeed, ...]
    described: str = ""


def find_costs(
    trainer: pl.Trainer, context: RunContext, traced: TraceResult, sample: StepSample | None
) -> Costs | str | None:
    """Find costs on all ranks together. Every rank must call.

    Args:
        sample: a batch of the training step; None if nothing is trained.

    Returns:
        On rank 0 the costs, or a text why there are none. Other ranks must not use the value.
    """
    job, structure = context.job, traced.structure
    connection, device = job.connection, job.connection.device
    if sample is None or traced.batch_size is None:
        return "nothing is trained" if sample is None else "the samples of a batch cannot be told"
    if job.placement.tensor_parallel_size > 1:
        return "layers that are sharded over several ranks are not profiled"
    if torch.are_deterministic_algorithms_enabled():
        return "with Trainer(deterministic=True) nothing that is measured decides"
    assert structure is not None
    if structure.changed_parameters:
        return f"a step changes {structure.changed_parameters[0]} in place"
    dtype = _product_dtype(trainer, device)
    if dtype is None:
        return (
            "its matrix products run in a type whose speed is not measured (only floating point of 16 bits or more is), so that counted "
            "FLOPs would not tell their seconds"
        )
    if connection.world_size > 1:
        dist.barrier()  # so that all ranks measure at the same time
    shared = job.num_hosts > 1 and device.type == "cpu"
    speed = probe_device(device, seconds=_SHARED_PROBE_S if shared else _PROBE_S, dtype=dtype)
    speeds: list[DeviceSpeed] = all_gather_values(speed)
    if connection.rank != 0:
        return None
    found = _profiled(trainer, context, traced, sample, operator_s=_operator_s(speeds))
    if isinstance(found, str):
        return found
    measured = [s.flops_per_s for s in speeds], [s.moved_bytes_per_s for s in speeds]
    rates, moves = rounded_speeds(measured, device.type)
    return Costs(
        model=found,
        speeds=tuple(
            replace(speed, flops_per_s=rate, moved_bytes_per_s=moved)
            for speed, rate, moved in zip(speeds, rates, moves, strict=True)
        ),
        described=f"FLOPs counted; {_described(job, rates)}",
    )


def _operator_s(speeds: Sequence[DeviceSpeed]) -> float:
    """Return the seconds of a tiny operator; one slow reading does not decide."""
    return rounded(statistics.median(speed.operator_s for speed in speeds), 4)


def rounded_speeds(kinds: Sequence[Sequence[float]], device_type: str) -> list[tuple[float, ...]]:
    """Return the speeds that were measured of each rank, by kind, rounded: the fastest coarsely, and the others relative to it in steps of 19 %.

    CPUs have one relative speed for all kinds, since what other processes take of a core falls on one kind or another."""
    of_all = [math.prod(of_rank) ** (1 / len(kinds)) for of_rank in zip(*kinds, strict=True)]
    found = []
    for speeds in kinds:
        alike = alike_speeds(of_all if device_type == "cpu" else speeds, device_type)
        best = max(alike)
        fastest = statistics.fmean(speed for speed, mean in zip(speeds, alike, strict=True) if mean == best)
        found.append(tuple(rounded(fastest) * rounded(mean / best, 4) for mean in alike))
    return found


def _product_dtype(trainer: pl.Trainer, device: torch.device) -> torch.dtype | None:
    """Return the dtype of a step's matrix products; None if it cannot be probed: the dtypes in which Transformer Engine and bitsandbytes multiply
    do not show in the tensors."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, pl.plugins.TransformerEnginePrecision | pl.plugins.BitsandbytesPrecision):
        return None
    return product_dtype(trainer.lightning_module, functools.partial(step_context, trainer, "training_step"), device)


def _profiled(
    trainer: pl.Trainer, context: RunContext, traced: TraceResult, sample: StepSample, *, operator_s: float
) -> ModelCost | str:
    """Return the costs of a microbatch of at most two samples; or a text why they cannot be found."""
    module, whole = trainer.lightning_module, traced.batch_size or 1
    own = getattr(module, "split_batch", None)
    device = context.job.connection.device
    try:
        with (
            preserved_random_state(device),
            preserved_trainer(trainer),
            Outside(module).preserved(),
            context.builder.stand_ins(),
        ):
            parts = -(-whole // 2)
            if callable(own) and parts > 1:
                part = next(iter(own(sample.batch, parts)))
            else:
                part = context.splitter.split(sample.batch, parts)[0]
            return profile_step(
                module,
                (tree.map_tensors(torch.Tensor.clone, part), *sample.arguments),
                structure=traced.structure,
                context=functools.partial(step_context, trainer, "training_step"),
                microbatch_samples=-(-whole // parts),
                operator_s=operator_s,
                may_run=sum(p.numel() for p in module.parameters()) <= LARGEST_RUN,
            )
    except Exception as error:
        # the profile is optional: if the user's step raises any error in it, the run continues without
        text = str(error).splitlines()[0] if str(error) else "no message"
        return f"its step could not be profiled ({type(error).__name__}: {text[:200]})"


def alike_speeds(speeds: Sequence[float], device_type: str) -> tuple[float, ...]:
    """Return the measured speeds, in which speeds that a measurement cannot distinguish are replaced by their group's mean; groups are formed from
    the fastest down."""
    threshold = _ALIKE.get(device_type, _ALIKE["cpu"])
    order = sorted(range(len(speeds)), key=lambda rank: -speeds[rank])
    result = list(speeds)
    while order:
        group = [rank for rank in order if speeds[rank] >= threshold * speeds[order[0]]]
        mean = math.fsum(speeds[rank] for rank in group) / len(group)
        for rank in group:
            result[rank] = mean
        order = [rank for rank in order if rank not in group]
    return tuple(result)


def _described(job: Job, speeds: Sequence[float]) -> str:
    """Return a description of the relative speeds of the clusters."""
    fastest = max(speeds)
    if min(speeds) == fastest:
        return "all ranks alike"
    by_cluster: dict[str, float] = {}
    for name, speed in zip(job.clusters, speeds, strict=True):
        by_cluster[name] = min(by_cluster.get(name, math.inf), speed / fastest)
    return "relative speeds " + ", ".join(f"{name} {speed:.2f}" for name, speed in list(by_cluster.items())[:8])


def make_cost_model(
    costs: Costs,
    job: Job,
    placement: Placement,
    asked: Asked,
    *,
    device: str,
    batch_size: int,
    forbidden_cuts: tuple[int, ...],
) -> tuple[CostModel, str]:
    """Return the cost model, and a note if links have no known speed, else "".

    Args:
        device: "cpu" or "cuda".
        batch_size: of a replica.
    """
    topology = rounded_links(job.topology)
    sockets = job.is_gloo
    note = ""
    one_host = job.num_hosts == 1
    if one_host:
        # whatever clusters a topology file assigns the ranks to
        topology = Topology.single_cluster(1, placement.world_size)
    of_host = {h.name: [costs.speeds[rank] for rank in topology.ranks_of_host(h.name)] for h in topology.hosts}
    devices = [
        DeviceType(
            name=f"devices of {host.name}",
            peak_flops_per_s=min(speed.flops_per_s for speed in of_host[host.name]),
            # of the smallest device; on CPUs an equal share of the host's memory
            memory_bytes=min(speed.memory_bytes for speed in of_host[host.name])
            / (host.devices if device == "cpu" else 1),
            local_bytes_per_s=min(speed.local_bytes_per_s for speed in of_host[host.name]),
            local_latency_s=max(speed.local_latency_s for speed in costs.speeds),
            efficiency=1.0,
            moved_bytes_per_s=min(speed.moved_bytes_per_s for speed in of_host[host.name]),
        )
        for host in topology.hosts
    ]
    operator_s = _operator_s(costs.speeds)
    training = make_training(
        asked,
        costs.model,
        batch_samples=batch_size * placement.data_parallel_size,
        device=device,
        update_s_per_byte=max(kind.update_s_per_byte for kind in devices),
        operator_s=operator_s,
        carries=sockets and device == "cpu",
    )
    model = replace(costs.model, forbidden_cuts=forbidden_cuts)
    reached: dict[str, Any] = {} if one_host else {"efficiency": SOCKETS if sockets else REACHED, "sockets": sockets}

    def make(topology: Topology) -> CostModel:
        network = Network.of_devices(topology, devices, **reached)
        return CostModel(model, network, devices=devices, training=training)

    cost_model = make(topology)
    try:
        cost_model.facts(layout_of(placement, topology))
    except ConfigurationError as unknown:
        cost_model = make(_with_stated_speeds(topology))
        note = (
            f"links: taken as 10 Gbit/s where nothing is known ({str(unknown).splitlines()[0][:160]}); "
            "lightning-holmes topology measures them"
        )
    return cost_model, note


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
