"""Costs of a module on the hosts of a job: the FLOPs of its layers, and the speed of each rank; found by all ranks together.

FLOPs are counted on rank 0, on one microbatch of two samples (pipeline/profile.py). The speed of each rank comes from a short
measurement that all ranks make at the same time, in the dtype of the step's matrix products. Both are rounded coarsely, so that
every start on the same hosts finds the same costs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_holmes.comm.objects import all_gather_values
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.device_speed import DeviceSpeed, probe_device, product_dtype
from lightning_holmes.pipeline.preserved_trainer import preserved_trainer
from lightning_holmes.pipeline.profile import profile_step
from lightning_holmes.pipeline.seeds import preserved_random_state
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.layer_cost import ModelCost
from lightning_holmes.plan.rounding import rounded
from lightning_holmes.strategy.plan_request import PlanRequest

_PROBE_S = 0.03
_SHARED_PROBE_S = 0.9  # on CPUs of several hosts, which may have a share of a core: over several of its periods of a tenth of a second
LARGEST_RUN = 50_000_000
"""The largest number of parameters of a module that may be run whole on one rank for its profile."""
# A rank whose speed is at least this fraction of a faster rank's counts as equally fast: a short measurement is no more accurate, least of
# all on CPUs that other processes use, too.
_ALIKE = {"cpu": 0.8, "cuda": 0.97}
# A rank's time in a step outside of microbatches and the optimizer (the trainer's loops, data, logs, checks), in times of a tiny
# operator: about 15 ms if one takes 3 us. From the timelines of small runs on an idle link.
_STEP_OPERATORS = 5000
# A processor's time to send or receive a byte by sockets, including the slowdown of computing meanwhile, in times of a tiny
# operator: 2 ns if one takes 2 us. From processes that compute during a steady exchange, and from whole steps (docs/log.md).
_BYTE_OPERATORS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of a module's layers, and the speeds of the ranks. Tuples have an entry for each rank.

    Attributes:
        model: the profile of the layers.
        speeds: FLOPs a second.
        memory: bytes of memory.
        local_bytes_per_s: bytes a second to other ranks of the same host.
        update_s_per_byte, byte_s, own_s: see Training.
        described: how the costs were found, in words.
    """

    model: ModelCost
    speeds: tuple[float, ...]
    memory: tuple[float, ...]
    local_bytes_per_s: tuple[float, ...]
    local_latency_s: float
    described: str
    update_s_per_byte: float = 0.0
    byte_s: float = 0.0
    own_s: float = 0.0


def find_costs(request: PlanRequest, structure: ModuleStructure) -> Costs | str | None:
    """Find costs on all ranks together. Every rank must call.

    Returns:
        On rank 0 the costs, a text why there are none, or None if costs are not needed. Other ranks must not use the value.
    """
    size = request.layout.placement.pipeline_parallel_size
    asks_sharding = request.training.sharding == "auto" and request.why_not_sharded is None
    wanted = size > 1 and (request.options.leaves_open or request.predicts)
    wanted = wanted or (asks_sharding and request.layout.placement.data_parallel_size > 1)
    if not wanted:
        return None
    if request.sample is None or request.traced.batch_size is None:
        return "nothing is trained" if request.sample is None else "the samples of a batch cannot be told"
    if request.layout.placement.tensor_parallel_size > 1:
        return "layers that are sharded over several ranks are not profiled"
    if not request.measures:
        return "with Trainer(deterministic=True) nothing that is measured decides"
    if structure.changed_parameters:
        return f"a step changes {structure.changed_parameters[0]} in place"
    dtype = _product_dtype(request)
    if dtype is None:
        return (
            "its matrix products run in a type whose speed is not measured (only floating point of 16 bits or more is), so that counted "
            "FLOPs would not tell their seconds"
        )
    if request.world_size > 1:
        dist.barrier()  # so that all ranks measure at the same time
    shared = request.layout.num_hosts > 1 and request.device.type == "cpu"
    speed = probe_device(request.device, seconds=_SHARED_PROBE_S if shared else _PROBE_S, dtype=dtype)
    speeds: list[DeviceSpeed] = all_gather_values(speed)
    if request.rank != 0:
        return None
    operator_s = rounded(statistics.median(s.operator_s for s in speeds))  # one slow reading does not decide
    found = _profiled(request, structure, operator_s=operator_s)
    if isinstance(found, str):
        return found
    rates = rounded_speeds([s.flops_per_s for s in speeds], request.device.type)
    return Costs(
        model=found,
        speeds=rates,
        memory=tuple(s.memory_bytes for s in speeds),
        local_bytes_per_s=tuple(s.local_bytes_per_s for s in speeds),
        local_latency_s=max(s.local_latency_s for s in speeds),
        described=f"FLOPs counted; {_described(request, rates)}",
        update_s_per_byte=max(s.update_s_per_byte for s in speeds),
        byte_s=carried_byte_s(operator_s),
        own_s=own_step_s(operator_s),
    )


def rounded_speeds(speeds: Sequence[float], device_type: str) -> tuple[float, ...]:
    """Return the measured speeds, rounded: the fastest coarsely, and the others relative to it in steps of 19 %."""
    alike = alike_speeds(speeds, device_type)
    fastest = max(alike)
    return tuple(rounded(fastest) * rounded(speed / fastest, 4) for speed in alike)


def _product_dtype(request: PlanRequest) -> torch.dtype | None:
    """Return the dtype of a step's matrix products; None if it cannot be probed: the dtypes in which Transformer Engine and bitsandbytes multiply
    do not show in the tensors."""
    trainer = trainer_of(request.module)
    plugin = None if trainer is None else trainer.precision_plugin
    if isinstance(plugin, pl.plugins.TransformerEnginePrecision | pl.plugins.BitsandbytesPrecision):
        return None
    return product_dtype(request.module, request.context, request.device)


def _profiled(request: PlanRequest, structure: ModuleStructure, *, operator_s: float) -> ModelCost | str:
    """Return the costs of a microbatch of at most two samples; or a text why they cannot be found."""
    module, sample, whole = request.module, request.sample, request.traced.batch_size or 1
    assert sample is not None
    own = getattr(module, "split_batch", None)
    try:
        with preserved_random_state(request.device), preserved_trainer(trainer_of(module)), request.stand_ins():
            parts = -(-whole // 2)
            if callable(own) and parts > 1:
                part = next(iter(own(sample.batch, parts)))
            else:
                part = request.splitter.split(sample.batch, parts)[0]
            return profile_step(
                module,
                (tree.map_tensors(torch.Tensor.clone, part), *sample.arguments),
                structure=structure,
                context=request.context,
                microbatch_samples=-(-whole // parts),
                operator_s=operator_s,
                may_run=sum(p.numel() for p in module.parameters()) <= LARGEST_RUN,
            )
    except Exception as error:
        # the profile is optional: if the user's step raises any error in it, the run continues without
        text = str(error).splitlines()[0] if str(error) else "no message"
        return f"its step could not be profiled ({type(error).__name__}: {text[:200]})"


def own_step_s(operator_s: float) -> float:
    """Return a rank's seconds in a step outside of microbatches and the optimizer, if a tiny operator takes ``operator_s``."""
    return _STEP_OPERATORS * operator_s


def carried_byte_s(operator_s: float) -> float:
    """Return a processor's seconds for each byte that it sends or receives by sockets, if a tiny operator takes ``operator_s``."""
    return _BYTE_OPERATORS * operator_s


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


def _described(request: PlanRequest, speeds: Sequence[float]) -> str:
    """Return a description of the relative speeds of the clusters."""
    fastest = max(speeds)
    if min(speeds) == fastest:
        return "all ranks alike"
    by_cluster: dict[str, float] = {}
    for rank, (cluster, _) in enumerate(request.layout.topology.places()):
        by_cluster[cluster.name] = min(by_cluster.get(cluster.name, math.inf), speeds[rank] / fastest)
    return "relative speeds " + ", ".join(f"{name} {speed:.2f}" for name, speed in list(by_cluster.items())[:8])
