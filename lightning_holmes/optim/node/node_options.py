"""NodeOptions: the options with which an optimizer node is started, and the storage that they, and the workers, ask for."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.optim import Optimizer

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.optim.node.description import find_class, may_fuse
from lightning_holmes.optim.node.disk import ALIGNED, Disk, Memory, Needs
from lightning_holmes.optim.unit import Unit, sum_dtype

MEMORY = "HOLMES_NODE_MEMORY"
"""The environment variable that limits the memory of a node's process, if its command line does not."""
IN_MEMORY = "memory"
_SHARE_OF_HOST = 0.8  # of the host's free memory, if no limit is given
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The options of one node.

    Attributes:
        states: the folder for parameters and optimizer states, or "memory"; None: the setting of the workers.
        memory_bytes: the memory limit of the process; None: 0.8 of the host's free memory if states are on disk, else no limit.
        num_on_host: the number of nodes on this host.
    """

    states: str | None = None
    memory_bytes: int | None = None
    num_on_host: int = 1

    @classmethod
    def given(cls, states: str | None, memory: str | None, num_on_host: int = 1) -> "NodeOptions":
        """Make options from the arguments of a command line; without ``memory`` the environment variable is read.

        Raises:
            ConfigurationError: ``memory`` is not a number of bytes.
        """
        memory = memory or os.environ.get(MEMORY)
        limit = None if memory is None else parse_bytes(memory)
        return cls(states=states, memory_bytes=limit, num_on_host=num_on_host)

    def folder(self, told: str, *, name: str) -> str | None:
        """Return the folder for states, given the workers' setting ``told``; None: states stay in memory.

        Raises:
            ConfigurationError: node and workers name different folders.
        """
        states = told if self.states is None else self.states
        if told not in (IN_MEMORY, states):
            raise ConfigurationError(
                f"{name} was started with --states {states}, and the workers have optimizer_states={told!r}: leave one of them out"
            )
        return None if states == IN_MEMORY else states


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as 512M, 1.5G or 4096; units are powers of 1024.

    Raises:
        ConfigurationError: ``text`` has another form.
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigurationError(f"--memory {text!r} is no number of bytes; write 512M, 8G or 1.5T")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def make_storage(
    units: Mapping[int, Unit], about: Mapping[str, Any], *, num_workers: int, options: NodeOptions, name: str
) -> Memory:
    """Return the storage for units: memory, or a file with limited memory.

    Args:
        about: what the workers have told: their optimizer, their setting of the folder, and how many sessions share this node.
        name: the name of the node and its workers, for messages.

    Raises:
        ConfigurationError: there is not enough memory, or not enough disk space.
    """
    optimizer, limit = about["optimizer"], options.memory_bytes
    folder = options.folder(about["states"], name=name)
    resident = psutil.Process().memory_info().rss
    if folder is None or not units:
        stepped = {n for names in optimizer["names"] for n in names}
        most = {i: needs_of(unit, optimizer["state_bytes"], is_trained=True) for i, unit in units.items()}
        may_train = [i for i, unit in units.items() if unit.is_trained or not stepped.isdisjoint(unit.names)]
        wanted = resident + sum(sum(of.values()) if i in may_train else of["values"] for i, of in most.items())
        if limit is not None and wanted > limit:
            raise ConfigurationError(
                f"{name}: parameters, gradients and optimizer states make {wanted / 1e6:.0f} MB of the process, more than its --memory "
                f"{limit / 1e6:.0f}M: let them live on disk (--states FOLDER), or use more optimizer nodes"
            )
        return Memory(most)
    # what an update takes beside the sections: new states, and states that are loaded, are allocated first and copied; kernels that are
    # not fused have intermediate values; gradients of another type are cast, and masters rounded
    needs = {i: needs_of(unit, optimizer["state_bytes"], is_trained=unit.is_trained) for i, unit in units.items()}
    kind: type[Optimizer] = find_class(optimizer, may_import=False)
    fuses = all(may_fuse(kind, group, held_dtype(unit)) for group in optimizer["groups"] for unit in units.values())
    beside = max(
        2 * needs[i]["states"]
        + (0 if fuses else 3) * needs[i]["values"]
        + (0 if held_dtype(unit) == sum_dtype(unit.dtype) else needs[i]["values"])
        + (3 * unit.numel * unit.dtype.itemsize if unit.has_masters else 0)
        for i, unit in units.items()
    )
    limit = limit or int(_SHARE_OF_HOST * psutil.virtual_memory().available) // options.num_on_host
    scratch = 2 * max(unit["gradient"] for unit in needs.values()) if num_workers > 1 else 0
    limit = resident + (limit - resident) // about["num_places"]
    return Disk(folder, needs, limit_bytes=limit, beside=beside, scratch=scratch, name=name)


def held_dtype(unit: Unit) -> torch.dtype:
    """Return the type in which a node holds and steps the parameters of a unit."""
    return torch.float32 if unit.has_masters else unit.dtype


def needs_of(unit: Unit, state_bytes: float, *, is_trained: bool) -> Needs:
    """Return the bytes of a unit's sections; ``state_bytes``: the bytes of the optimizer's states for each element."""
    states = math.ceil(state_bytes * unit.numel) + 4 * ALIGNED * len(unit.names)
    gradient = unit.numel * sum_dtype(unit.dtype).itemsize
    return {
        "values": unit.numel * held_dtype(unit).itemsize,
        "gradient": gradient * is_trained,
        "states": states * is_trained,
    }
