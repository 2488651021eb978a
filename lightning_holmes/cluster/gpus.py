"""Gpu: the GPUs of this host, from /proc/driver/nvidia or the PCI bus, without torch; and the NIC nearest to each.

Indexes count the GPUs listed there in PCI order. CUDA_VISIBLE_DEVICES is not applied.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_holmes.cluster.record import record
from lightning_holmes.cluster.sysfs import SysfsReader, pci_path

_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
_DISPLAY, _ACCELERATOR = 0x03, 0x12  # PCI base classes
_VGA = 0x0300  # an on-board display controller of a server, unless the maker is NVIDIA


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU: its index in PCI order, its PCI address (bus), and its PCI path from the root complex (pci)."""

    index: int
    name: str
    bus: str
    numa_node: int | None = None
    pci: tuple[str, ...] = ()


def read_gpus(reader: SysfsReader, *, pci_devices: str, nvidia: str) -> tuple[Gpu, ...]:
    """Read all GPUs. pci_devices: /sys/bus/pci/devices; nvidia: /proc/driver/nvidia/gpus."""
    names: dict[str, str] = {}
    for bus in reader.names(nvidia, optional=True):
        information = reader.text(f"{nvidia}/{bus}/information") or ""
        lines = dict(line.split(":", 1) for line in information.splitlines() if ":" in line)
        names[bus.lower()] = lines.get("Model", "NVIDIA GPU").strip()
    if not names:
        for bus in reader.names(pci_devices, optional=True):
            kind = reader.number(f"{pci_devices}/{bus}/class", optional=True) or 0
            if kind >> 16 not in (_DISPLAY, _ACCELERATOR):
                continue
            vendor = reader.number(f"{pci_devices}/{bus}/vendor", optional=True) or 0
            if vendor in _VENDORS and (kind >> 8 != _VGA or _VENDORS[vendor] == "NVIDIA"):
                names[bus.lower()] = f"{_VENDORS[vendor]} GPU"
    gpus = []
    for index, bus in enumerate(sorted(names)):
        folder = f"{pci_devices}/{bus}"
        gpus.append(
            Gpu(
                index=index,
                name=names[bus],
                bus=bus,
                numa_node=reader.numa_node(folder),
                pci=pci_path(folder) if os.path.exists(folder) else (),
            )
        )
    return tuple(gpus)


def nearness(
    first_pci: Sequence[str], first_numa: int | None, second_pci: Sequence[str], second_numa: int | None
) -> tuple[int, int]:
    """How near two PCI devices are: (shared steps from the root complex, 1 if on one NUMA node). Larger is nearer."""
    same = itertools.takewhile(lambda steps: steps[0] == steps[1], zip(first_pci, second_pci, strict=False))
    shared = len(list(same))
    return shared, int(first_numa is not None and first_numa == second_numa)


def near_gpus(gpus: Sequence[Gpu], nics: Mapping[str, tuple[Sequence[str], int | None]]) -> dict[str, tuple[int, ...]]:
    """For each NIC (its PCI path and NUMA node by name) the GPUs to which no other NIC is nearer."""
    near: dict[str, tuple[int, ...]] = dict.fromkeys(nics, ())
    for gpu in gpus:
        scores = {name: nearness(pci, numa, gpu.pci, gpu.numa_node) for name, (pci, numa) in nics.items()}
        best = max(scores.values(), default=(0, 0))
        for name, score in scores.items():
            if score == best and best > (0, 0):
                near[name] = (*near[name], gpu.index)
    return near
