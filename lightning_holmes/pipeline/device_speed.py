"""DeviceSpeed: how fast this rank's device currently is, by a short measurement. Each host is measured on its own.

    dtype = product_dtype(module, plugin.train_step_context, torch.device("cpu"))      # of a step's matrix products
    speed = probe_device(torch.device("cpu"), seconds=0.05, dtype=dtype)
    speed.flops_per_s, speed.moved_bytes_per_s, speed.operator_s

Ranks measure at the same time because they will compute at the same time: the ranks of one host share its cores. A
host with a share of a core runs with pauses, so there the measurement must last over several scheduling periods.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_holmes.plan.device_type import type_of_device

_CPU_SIZE, _CUDA_SIZE = 256, 2048
_CPU_ELEMENTS, _CUDA_ELEMENTS = 1 << 18, 1 << 24
_LOCAL_BYTES_PER_S = {"cpu": 1e9, "cuda": 20e9}  # between processes of one host: typical, not measured
_LOCAL_LATENCY_S = {"cpu": 100e-6, "cuda": 20e-6}
_OPERATORS = 50  # between two readings of the clock
_WINDOW_S = 0.2  # two of the periods in which a host may have a share of a core


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """The speed of a device.

    Attributes:
        flops_per_s: FLOPs per second of matrix products, measured.
        moved_bytes_per_s: bytes per second that an activation function reads and writes, measured; a step's other operators are taken
            to move theirs as fast.
        operator_s: seconds to run a tiny operator, measured.
        memory_bytes: the total memory of the device.
        local_bytes_per_s, local_latency_s: of a transfer one way to another process of the host. Not measured: those
            of the device's type if its name is known, else typical values.
    """

    flops_per_s: float
    moved_bytes_per_s: float
    operator_s: float
    memory_bytes: float
    local_bytes_per_s: float
    local_latency_s: float


def product_dtype(
    module: nn.Module, context: Callable[[], AbstractContextManager[None]], device: torch.device
) -> torch.dtype | None:
    """The dtype of ``module``'s matrix products in a step: that of its parameters, or the dtype that autocast makes of it.

    If the parameters differ, it is the dtype of most elements, among matrices if there are any. Casts that the step
    itself makes are not known. None: the dtype is not a floating-point one of 16 bits or more.

    Args:
        context: returns the context manager of a step (precision).
    """
    sizes: Counter[tuple[bool, torch.dtype]] = Counter()
    for parameter in module.parameters():
        sizes[parameter.ndim > 1, parameter.dtype] += parameter.numel()
    dtype = max(sizes, key=lambda kind: (kind[0], sizes[kind]))[1] if sizes else torch.get_default_dtype()
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return None
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    with torch.no_grad(), context():
        return torch.mm(matrix, matrix).dtype


def probe_device(device: torch.device, *, seconds: float, dtype: torch.dtype) -> DeviceSpeed:
    """Measure ``device`` for about ``seconds``, with tensors of ``dtype``."""
    size, elements, at_once = _CPU_SIZE, _CPU_ELEMENTS, 1
    if device.type == "cuda":
        size, elements, at_once = _CUDA_SIZE, _CUDA_ELEMENTS, 10
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    result = torch.empty_like(matrix)
    activations = torch.ones(elements, device=device, dtype=dtype)
    tiny = torch.ones(8, device=device)
    with torch.no_grad():
        for _ in range(3):
            torch.mm(matrix, matrix, out=result)
            functional.gelu(activations)
            tiny + tiny
        products = _rate(device, 0.5 * seconds, at_once, lambda: torch.mm(matrix, matrix, out=result))
        moves = _rate(device, 0.3 * seconds, at_once, lambda: functional.gelu(activations))
        operators = _rate(device, 0.2 * seconds, _OPERATORS, lambda: tiny + tiny)
    known = type_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    local, latency = _LOCAL_BYTES_PER_S[device.type], _LOCAL_LATENCY_S[device.type]
    return DeviceSpeed(
        flops_per_s=2.0 * size**3 * products,
        moved_bytes_per_s=2.0 * activations.nbytes * moves,
        operator_s=1 / operators,
        memory_bytes=total_memory_bytes(device),
        local_bytes_per_s=local if known is None else known.local_bytes_per_s,
        local_latency_s=latency if known is None else known.local_latency_s,
    )


def total_memory_bytes(device: torch.device) -> float:
    """The memory of a GPU; for a CPU that of the host, which its ranks share."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)


def _rate(device: torch.device, seconds: float, at_once: int, run: Callable[[], Tensor]) -> float:
    """Runs per second, measured for about ``seconds``: the median over windows, since other processes may take a core for a while.
    at_once: runs between two readings of the clock."""
    count, start, rates = 0, time.perf_counter(), list[float]()
    while len(rates) * _WINDOW_S < seconds:
        for _ in range(at_once):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count, now = count + at_once, time.perf_counter()
        if now - start >= min(seconds, _WINDOW_S):
            rates.append(count / (now - start))
            count, start = 0, now
    return statistics.median(rates)
