"""DeviceCalls: how often CUDA has allocated and freed memory, in which it may wait for all that the device has been given.

before = device_calls()
...
device_calls() == before        # nothing was allocated or freed; always true without a GPU
"""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCalls:
    """The calls of this process so far, for memory of the current device and pinned memory.

    Attributes:
        number: allocations and releases; what the caching allocator serves from memory that it has does not count.
        flushes: how often the device had too little free memory, so that all cached memory was freed.
    """

    number: int
    flushes: int


def device_calls() -> DeviceCalls:
    """Return the calls so far."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return DeviceCalls(number=0, flushes=0)
    # the user's, which counts nothing: it may call CUDA each time
    if torch.cuda.get_allocator_backend() == "pluggable":
        return DeviceCalls(number=time.monotonic_ns(), flushes=0)
    device, host = torch.cuda.memory_stats_as_nested_dict(), torch.cuda.host_memory_stats_as_nested_dict()
    number = sum(device[f"num_device_{call}"] + host[f"num_host_{call}"] for call in ("alloc", "free"))
    return DeviceCalls(number=number, flushes=device["num_alloc_retries"])
