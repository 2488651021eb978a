"""Costs of a module on the hosts of a job: the cost of its layers, and the speed of each rank; found by all ranks together.

Costs come from a profile of one or two microbatches (pipeline/profile.py). Either FLOPs are counted on rank 0 (``profile="flops"``), and
the speed of each host comes from a short measurement that all ranks make at the same time, in the dtype of the step's matrix products; or every
rank times the layers (``profile="measure"``, and ``"auto"`` on several hosts without GPUs). Costs are cached for later starts (kept_costs.py); on
several hosts cached costs are used if the short measurement gives about the same result as then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import BitsandbytesPrecision, TransformerEnginePrecision
from lightning.pytorch.utilities import rank_zero_info

from lightning_holmes.comm.objects import all_gather_values, broadcast_value
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.device_speed import DeviceSpeed, probe_device, product_dtype, rate
from lightning_holmes.pipeline.preserved_trainer import preserved_trainer
from lightning_holmes.pipeline.profile import profile_step, time_in_turn
from lightning_holmes.pipeline.seeds import preserved_random_state
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.strategy.kept_costs import Costs, costs_key, load_costs, save_costs, tell_change
from lightning_holmes.strategy.plan_request import PlanRequest

_ONE_HOST_S, _SEVERAL_HOSTS_S = 0.03, 1.0  # seconds of probing; several hosts may differ, and may have shares of a core
_PROBES = 2  # this many probes must show that a host's speed has changed: other load may be temporary
_MEASURE_S = 3.0  # the minimum seconds of timing the layers, in all microbatch sizes together
LARGEST_RUN = 50_000_000
"""The largest number of parameters of a module that may be run whole on one rank for its profile."""
# A rank whose speed is at least this fraction of a faster rank's counts as equally fast: a short measurement is no more accurate, least of
# all on CPUs that other processes use, too.
_ALIKE = {"cpu": 0.85, "cuda": 0.97}
# the largest factor between the timed seconds of a layer and of the median of its kind that counts as noise
_NOISE = 1.25
# The same for the last layer, if it is slower: its backward is the first one, when memory is at its peak, and presumably allocates from
# the system memory that the other layers reuse. In a pipeline's steps it is as fast as the others.
_LAST_NOISE = 1.75
# A rank's time in a step outside of microbatches and the optimizer (the trainer's loops, data, logs, checks), in times of a tiny
# operator: about 15 ms if one takes 3 us. From the timelines of small runs on an idle link.
_STEP_OPERATORS = 5000
# A processor's time to send or receive a byte by sockets, including the slowdown of computing meanwhile, in times of a tiny
# operator: 2 ns if one takes 2 us. From processes that compute during a steady exchange, and from whole steps (docs/log.md).
_BYTE_OPERATORS = 1e-3


def find_costs(request: PlanRequest, structure: ModuleStructure) -> Costs | str | None:
    """Find costs on all ranks together. Every rank must call.

    Returns:
        On rank 0 the costs, a text why there are none, or None if costs are not needed. Other ranks must not use the value.
    """
    size = request.layout.placement.pipeline_parallel_size
    asks_sharding = request.training.sharded_parameters == "auto" and request.why_not_sharded is None
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
    key = costs_key(request, structure) if request.rank == 0 else None
    known = load_costs(key, request.layout.topology) if key is not None and request.profile == "auto" else None
    if broadcast_value(known is not None) and not _has_changed(request, known):
        return known
    if request.world_size > 1:
        dist.barrier()  # so that all ranks measure at the same time
    found = _measure(request, structure)
    if isinstance(found, Costs) and key is not None:
        save_costs(key, found, request.layout.topology)
    return found


def _has_changed(request: PlanRequest, known: Costs | None) -> bool:
    """Return whether some host's speed relative to the others differs from when the cached costs were measured; rank 0 decides, and logs it. Every
    rank must call."""
    if request.layout.num_hosts == 1:
        return False
    fastest = [0.0] * request.world_size
    for _ in range(_PROBES):
        dist.barrier()  # so that all ranks measure at the same time
        speeds: list[float] = all_gather_values(_probe(request).flops_per_s)
        fastest = list(map(max, fastest, speeds))
        told = None if known is None else tell_change(known, fastest, request.layout.topology)
        if not broadcast_value(told is not None):
            return False
    if told is not None:
        rank_zero_info(told)
    return True


def _probe(request: PlanRequest) -> DeviceSpeed:
    seconds = _SEVERAL_HOSTS_S if request.layout.num_hosts > 1 else _ONE_HOST_S
    return probe_device(request.device, seconds=seconds, dtype=_product_dtype(request) or torch.float32)


def _measure(request: PlanRequest, structure: ModuleStructure) -> Costs | str | None:
    several = request.layout.num_hosts > 1
    dtype = _product_dtype(request)
    speed = _probe(request)
    how = "FLOPs counted"
    if request.profile == "measure" or (request.profile == "auto" and several and _may_be_timed(request)):
        without = "no rank has all layers of a module that is built without memory"
        measured = without if request.defers else _measured(request, structure, speed)
        if isinstance(measured, Costs):
            return measured
        how += f" ({measured}, when it was to be timed)"
    if dtype is None:
        return (
            "its matrix products run in a type whose speed is not measured (only floating point of 16 bits or more is), so that counted "
            f'FLOPs would not tell their seconds; profile="measure" times the layers{how.removeprefix("FLOPs counted")}'
        )
    speeds: list[DeviceSpeed] = all_gather_values(speed)
    if request.rank != 0:
        return None
    found = _profiled(request, structure, samples=(2,), mode="fake", operator_s=max(s.operator_s for s in speeds))
    if isinstance(found, str):
        return found
    return Costs(
        model=found[0],
        speeds=(rates := alike_speeds([s.flops_per_s for s in speeds], request.device.type)),
        probed_flops_per_s=tuple(s.flops_per_s for s in speeds),
        memory=tuple(s.memory_bytes for s in speeds),
        local_bytes_per_s=tuple(s.local_bytes_per_s for s in speeds),
        local_latency_s=max(s.local_latency_s for s in speeds),
        described=f"{how}; {_described(request, rates)}",
        update_s_per_byte=max(s.update_s_per_byte for s in speeds),
        byte_s=carried_byte_s(max(s.operator_s for s in speeds)),
        own_s=own_step_s(max(s.operator_s for s in speeds)),
    )


def _product_dtype(request: PlanRequest) -> torch.dtype | None:
    """Return the dtype of a step's matrix products; None if it cannot be probed: the dtypes in which Transformer Engine and bitsandbytes multiply
    do not show in the tensors."""
    trainer = trainer_of(request.module)
    plugin = None if trainer is None else trainer.precision_plugin
    if isinstance(plugin, TransformerEnginePrecision | BitsandbytesPrecision):
        return None
    return product_dtype(request.module, request.context, request.device)


def _may_be_timed(request: PlanRequest) -> bool:
    """Return whether "auto" may time the layers: on CPUs, where FLOPs do not show how small microbatches slow them down, and if the module is so
    small that a whole step fits beside the run's own memory. On one host, ranks would time each other's load."""
    small = sum(p.numel() for p in request.module.parameters()) <= LARGEST_RUN
    return request.device.type == "cpu" and small and not request.defers


def _measured(request: PlanRequest, structure: ModuleStructure, speed: DeviceSpeed) -> Costs | str:
    """Time all layers on every rank; the costs are rank 0's, the speeds of the other ranks are relative to it. Return a text if that fails."""
    timed = _profiled(request, structure, samples=_timed_sizes(request), mode="measure", operator_s=0.0)
    problem = timed if isinstance(timed, str) else None
    found = [] if isinstance(timed, str) else [alike_layers(cost) for cost in timed]
    update = time_update(request.device)
    mine = (problem, None if problem else found[-1].forward + found[-1].backward, speed, update)
    everyone: list[Any] = all_gather_values(mine)
    problems = [entry[0] for entry in everyone if entry[0] is not None]
    if problems:
        return str(problems[0])
    model = found[-1] if len(found) == 1 else _with_fixed_seconds(*found)
    seconds = [entry[1] for entry in everyone]
    speeds = alike_speeds([seconds[0] / taken for taken in seconds], request.device.type)
    return Costs(
        model=model,
        speeds=speeds,
        probed_flops_per_s=tuple(entry[2].flops_per_s for entry in everyone),
        memory=tuple(entry[2].memory_bytes for entry in everyone),
        local_bytes_per_s=tuple(entry[2].local_bytes_per_s for entry in everyone),
        local_latency_s=max(entry[2].local_latency_s for entry in everyone),
        described=f"layers timed on every rank; {_described(request, speeds)}",
        update_s_per_byte=max(entry[3] for entry in everyone),
        byte_s=carried_byte_s(max(entry[2].operator_s for entry in everyone)),
        own_s=own_step_s(max(entry[2].operator_s for entry in everyone)),
    )


def _timed_sizes(request: PlanRequest) -> tuple[int, ...]:
    """Return the microbatch sizes (in samples) to time: the run's; or, if the number of microbatches is open, half and twice the size
    for four microbatches a stage: far enough apart to fit a line, and within the range of sizes that may be chosen."""
    whole, count = request.traced.batch_size or 1, request.options.num_microbatches
    if count != "auto":
        return (-(-whole // min(count, whole)),)
    samples = -(-whole // min(4 * request.layout.placement.pipeline_parallel_size, whole))
    return (max(1, samples // 2), 2 * samples) if 2 * samples <= whole else (samples,)


def _with_fixed_seconds(small: ModelCost, large: ModelCost) -> ModelCost:
    """Return costs from two microbatch sizes: seconds that do not grow with the number of samples are fixed seconds."""
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
    samples: tuple[int, ...],
    mode: Literal["fake", "measure"],
    operator_s: float,
) -> list[ModelCost] | str:
    """Return the costs of microbatches of at most ``samples`` samples each on this rank; or a text why they cannot be found."""
    module, sample, whole = request.module, request.sample, request.traced.batch_size or 1
    assert sample is not None
    own = getattr(module, "split_batch", None)
    kept = preserved_random_state(request.device), preserved_trainer(trainer_of(module))
    try:
        with kept[0], kept[1], request.stand_ins() if mode == "fake" else nullcontext():
            given: dict[int, tuple[Any, ...]] = {}
            for number in samples:
                parts = max(1, -(-whole // number))
                if callable(own) and parts > 1:
                    part = next(iter(own(sample.batch, parts)))
                else:
                    part = request.splitter.split(sample.batch, parts)[0]
                part = tree.map_tensors(torch.Tensor.clone, part)
                given[-(-whole // parts)] = (part, *sample.arguments)
            if mode == "measure":
                return time_in_turn(
                    module,
                    given,
                    structure=structure,
                    context=request.context,
                    seconds=_MEASURE_S,
                    pipeline_parallel_size=request.layout.placement.pipeline_parallel_size,
                )
            return [
                profile_step(
                    module,
                    arguments,
                    structure=structure,
                    context=request.context,
                    microbatch_samples=number,
                    operator_s=operator_s,
                    may_run=sum(p.numel() for p in module.parameters()) <= LARGEST_RUN,
                )
                for number, arguments in given.items()
            ]
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


def time_update(device: torch.device) -> float:
    """Return the seconds of AdamW's step for each byte of parameters, as a typical cost of an optimizer."""
    parameter = torch.nn.Parameter(torch.zeros(1 << 19, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()

    def step() -> torch.Tensor:
        optimizer.step()
        return parameter

    return 1 / rate(device, 0.1, 1, step) / (parameter.numel() * parameter.element_size())


def alike_speeds(speeds: Sequence[float], device_type: str) -> tuple[float, ...]:
    """Return the measured speeds, in which speeds that a measurement cannot distinguish are replaced by their group's mean; groups are formed from
    the fastest down."""
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


def alike_layers(model: ModelCost) -> ModelCost:
    """Return the model in which timed layers that hold and send the same number of bytes have the mean of their seconds, if these differ by no
    more than measurement noise. The last layer may be slower, and is then left out of the mean. Equal layers are assigned
    exactly and fast; unequal layers with several chunks a rank are not."""
    kinds: dict[tuple[float, ...], list[int]] = {}
    for index, layer in enumerate(model.layers):
        key = (layer.parameter_bytes, layer.trained_bytes, layer.activation_bytes, layer.held_bytes)
        kinds.setdefault(key, []).append(index)
    layers, last = list(model.layers), len(model.layers) - 1
    seconds = [layer.forward + layer.backward for layer in layers]
    for members in kinds.values():
        middle = statistics.median(seconds[index] for index in members)
        near = [index for index in members if middle / _NOISE <= seconds[index] <= middle * _NOISE]
        forward = math.fsum(layers[index].forward for index in near) / max(1, len(near))
        backward = math.fsum(layers[index].backward for index in near) / max(1, len(near))
        if last in members and len(near) > 1 and middle * _NOISE < seconds[last] <= middle * _LAST_NOISE:
            near.append(last)
        for index in near:
            layers[index] = replace(layers[index], forward=forward, backward=backward)
    return replace(model, layers=tuple(layers))


def _described(request: PlanRequest, speeds: Sequence[float]) -> str:
    """Return a description of the relative speeds of the clusters."""
    fastest = max(speeds)
    if min(speeds) == fastest:
        return "all ranks alike"
    by_cluster: dict[str, float] = {}
    for rank, (cluster, _) in enumerate(request.layout.topology.places()):
        by_cluster[cluster.name] = min(by_cluster.get(cluster.name, math.inf), speeds[rank] / fastest)
    return "relative speeds " + ", ".join(f"{name} {speed:.2f}" for name, speed in list(by_cluster.items())[:8])
