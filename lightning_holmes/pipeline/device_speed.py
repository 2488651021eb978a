"""DeviceSpeed: how fast this rank's device is at this moment, by a short measurement. Each host is measured on its own.

    dtype = product_dtype(module, plugin.train_step_context, torch.device("cpu"))      # that a step computes in
    speed = probe_device(torch.device("cpu"), seconds=0.05, dtype=dtype)
    speed.flops_per_s, speed.operator_s

Ranks measure at the same time, as they will compute at the same time: those of one host share its cores. A host with a
share of a core stops and goes, so that there the measurement must last over several of its periods.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn

_CPU_SIZE, _CUDA_SIZE = 256, 2048
_OPERATORS = 50  # between two looks at the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """flops_per_s: of matrix products; operator_s: to run a tiny operator; memory_bytes: of the device, all of it."""

    flops_per_s: float
    operator_s: float
    memory_bytes: float


def product_dtype(
    module: nn.Module, context: Callable[[], AbstractContextManager[None]], device: torch.device
) -> torch.dtype | None:
    """The type in which ``module``'s matrix products run in a step: that of its parameters (of most elements, and of matrices where there are
    any), or what autocast makes of it. None: they have none that torch multiplies, such as 8 bits.

    Args:
        context: gives the context manager of a step (precision).
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
    """Measure for about so many seconds; dtype: of the matrix products."""
    size = _CUDA_SIZE if device.type == "cuda" else _CPU_SIZE
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    result = torch.empty_like(matrix)
    tiny = torch.ones(8, device=device)
    with torch.no_grad():
        for _ in range(3):
            torch.mm(matrix, matrix, out=result)
            tiny + tiny
        products = rate(
            device, seconds * 2 / 3, 1 if device.type == "cpu" else 10, lambda: torch.mm(matrix, matrix, out=result)
        )
        operators = rate(device, seconds / 3, _OPERATORS, lambda: tiny + tiny)
    memory = float(psutil.virtual_memory().total)
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    return DeviceSpeed(flops_per_s=2.0 * size**3 * products, operator_s=1 / operators, memory_bytes=memory)


def rate(device: torch.device, seconds: float, at_once: int, run: Callable[[], Tensor]) -> float:
    """Runs a second, measured for about so many seconds; at_once: between two looks at the clock."""
    count, start = 0, time.perf_counter()
    while True:
        for _ in range(at_once):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count += at_once
        taken = time.perf_counter() - start
        if taken >= seconds:
            return count / taken
