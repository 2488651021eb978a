"""REMOVED: arguments that HolmesStrategy had in an earlier version, each with what to do instead.

An argument that is gone is refused by name, so that nobody's option is ignored in silence.

    class HolmesStrategy:
        @refuses_removed
        def __init__(self, *, schedule="auto"): ...

    HolmesStrategy(powersgd_rank=4)    # ConfigurationError: powersgd_rank=4: this argument is gone; ...
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning_holmes.errors import ConfigurationError

_P = ParamSpec("_P")
_T = TypeVar("_T")

REMOVED: dict[str, str] = {
    "activation_dtype": 'compression="bf16" rounds all that crosses between clusters, activations and gradients',
    "bucket_bytes": "an eighth of the gradients is summed at once, from 1 to 25 MiB; leave it out",
    "grad_dtype": "gradients are summed in fp32, and those of double-precision parameters in double",
    "port_range": "all sockets take ports of the kernel's range, which sysctl net.ipv4.ip_local_port_range shows and narrows",
    "powersgd_rank": 'use compression="bf16", which learns as fast as no compression',
    "process_group_backend": "it follows from the device: NCCL between GPUs, gloo between CPUs",
    "profile": "layers are counted in FLOPs, and each host's speed is probed at the start; leave it out",
    "repeat_transfers": "a lost card ends the run with an error that names it, and the restart uses a card that works: "
    "start the job by torchrun --max-restarts, with snapshot_every_n_steps",
    "sharded_optimizer": 'use sharding="optimizer" for True, sharding="none" for False; the default "auto" decides by memory and time',
    "sharded_parameters": 'use sharding="parameters" for True; the default "auto" shards parameters where nothing else fits',
    "snapshot_folder": "snapshots are in /dev/shm; if they do not fit, make it larger (docker run --shm-size=..., in Kubernetes a volume with "
    "medium: Memory)",
    "keep_parameters": "leave it out: beside optimizer nodes a worker fetches parameters for the forward and again for the backward",
}


def refuses_removed(init: Callable[Concatenate[_T, _P], None]) -> Callable[Concatenate[_T, _P], None]:
    """Return ``init``, a class's ``__init__``, with a refusal of arguments in REMOVED.

    Raises:
        ConfigurationError: an argument is gone; the message names it and what to do instead.
    """

    @functools.wraps(init)
    def checked(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if told := tell_removed(kwargs):
            raise ConfigurationError(told[0])
        init(self, *args, **kwargs)

    return checked


def tell_removed(given: Iterable[str]) -> list[str]:
    """Return a sentence for each name in ``given`` that is in REMOVED; a mapping's values are shown."""
    values: dict[str, Any] = given if isinstance(given, dict) else {}
    return [
        f"{name}{f'={values[name]!r}' if name in values else ''}: this argument is gone; {REMOVED[name]}"
        for name in given
        if name in REMOVED
    ]
