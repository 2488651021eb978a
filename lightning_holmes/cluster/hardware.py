"""HostInventory: the hardware of one host, read without root and without starting a process, in well under 50 ms.

It reads the environment variables about a host (HOLMES_SYSFS_ROOT, HOLMES_HOST_NAME, HOLMES_CLUSTER,
HOLMES_TOPOGRAPH_LABELS; SLURM_TOPOLOGY_ADDR; MASTER_ADDR) and determines the host's identity. rdma.py and interfaces.py
read the cards. fabric.py finds what several hosts have in common.

    inventory = probe_host()
    inventory.rdma[0].name                         # "mlx5_0"
    HostInventory.from_json(inventory.to_json(), source="rank 3") == inventory
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_holmes.cluster.interfaces import (
    Interface,
    choose_interfaces,
    find_main_interface,
    read_interfaces,
)
from lightning_holmes.cluster.network import Nic
from lightning_holmes.cluster.rdma import RdmaPort, read_rdma_ports
from lightning_holmes.cluster.record import Text, check_unique, read_json, record, to_json
from lightning_holmes.cluster.sysfs import SysfsReader

_NVIDIA = 0x10DE
_VENDORS = (_NVIDIA, 0x1002, 0x8086)  # and AMD, Intel
_ACCELERATORS = (0x03, 0x12)  # PCI base classes: displays and accelerators
_VGA = 0x0300  # an on-board display controller of a server, unless the maker is NVIDIA
_TOPOGRAPH = "network.topology.nvidia.com/"
_TOPOGRAPH_TIERS = ("core", "datacenter", "spine", "leaf", "block")  # from the top; two names are from Topograph 0.1
_TOPOGRAPH_TIER = re.compile(r"fabric\.topograph\.run/tier-(\d{1,3})")  # since 1.0: tier 0 is nearest to the host


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class HostInventory:
    """The hardware of one host.

    Attributes:
        name: HOLMES_HOST_NAME, else the host name.
        identity: equal for processes of one host: HOLMES_HOST_NAME if given, else host name, boot ID and network namespace.
        cluster: HOLMES_CLUSTER, or None.
        switches: the names of the switches above the host, from the top, reported by SLURM or Topograph.
        switches_source: "slurm" or "topograph"; only hints of one source are compared.
        rdma: all ports of RDMA devices.
        interfaces: the network interfaces that carry traffic between hosts; the main interface first.
        main_interface: the interface that reaches the master or the default route.
        num_gpus: of all makers, listed by the driver or the PCI bus.
        warnings: what could not be read, each with its file.
    """

    name: Text
    identity: Text
    cluster: Text | None = None
    switches: tuple[str, ...] = ()
    switches_source: str | None = None
    rdma: tuple[RdmaPort, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    main_interface: str | None = None
    num_gpus: int = 0
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key, what in (("rdma", "RDMA ports"), ("interfaces", "interfaces")):
            names = [((key, i, "name"), part.name) for i, part in enumerate(getattr(self, key))]
            check_unique(names, f"{what} of host {self.name!r}")

    def to_json(self) -> str:
        """One line of JSON."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str) -> HostInventory:
        """Read what to_json wrote. Raises ConfigurationError, which names the source and the place of an invalid value."""
        return read_json(cls, text, source=source)

    def nics(self) -> tuple[Nic, ...]:
        """The host's network cards for a topology: RDMA first, then Ethernet, the main interface before others."""
        rdma = [
            Nic(
                name=port.name,
                kind=port.kind,
                bandwidth_bytes_per_s=port.rate_bytes_per_s,
                interface=port.interface,
                addresses=tuple(address.split("/")[0] for address in port.addresses),
                up=port.up,
            )
            for port in self.rdma
        ]
        names = {nic.name for nic in rdma}
        ethernet = [
            Nic(
                name=interface.name,
                kind="ethernet",
                bandwidth_bytes_per_s=interface.speed_bytes_per_s,
                interface=interface.name,
                addresses=tuple(address.split("/")[0] for address in interface.addresses),
                up=interface.up,
            )
            for interface in self.interfaces
            if interface.name not in names
        ]
        return (*rdma, *ethernet)

    @property
    def main(self) -> Interface | None:
        """The main interface."""
        return next((i for i in self.interfaces if i.name == self.main_interface), None)


def probe_host(*, machine_root: str = "/", master_addr: str | None = None) -> HostInventory:
    """Read the hardware of this host. Missing files raise no errors; they are listed in ``warnings``.

    Args:
        machine_root: the folder of sys/class/net, sys/bus/pci and proc; for tests.
        master_addr: the numeric address of the master; default MASTER_ADDR, if that is numeric.
    """
    environment = dict(os.environ)
    reader = SysfsReader()
    machine = machine_root.rstrip("/")
    sysfs = (environment.get("HOLMES_SYSFS_ROOT") or f"{machine}/sys").rstrip("/")
    master = master_addr or environment.get("MASTER_ADDR")
    every = read_interfaces(reader, f"{machine}/sys/class/net")
    rdma = read_rdma_ports(reader, f"{sysfs}/class/infiniband", {interface.name: interface for interface in every})
    of_rdma = {port.interface for port in rdma if port.interface is not None}
    main = find_main_interface(reader, every, of_rdma=of_rdma, proc_net=f"{machine}/proc/net", master_addr=master)
    name, identity = _identity(reader, environment, machine)
    source, switches = read_switches(reader, environment)
    return HostInventory(
        name=name,
        identity=identity,
        cluster=(environment.get("HOLMES_CLUSTER") or "").strip() or None,
        switches=switches,
        switches_source=source,
        rdma=rdma,
        interfaces=choose_interfaces(every, of_rdma=of_rdma, main=main),
        main_interface=main,
        num_gpus=count_gpus(reader, machine),
        warnings=tuple(reader.warnings),
    )


def count_gpus(reader: SysfsReader, machine: str) -> int:
    """The number of GPUs that NVIDIA's driver lists, or else of all accelerators on the PCI bus. CUDA_VISIBLE_DEVICES is not applied."""
    if listed := reader.names(f"{machine}/proc/driver/nvidia/gpus", optional=True):
        return len(listed)
    found = 0
    folder = f"{machine}/sys/bus/pci/devices"
    for bus in reader.names(folder, optional=True):
        kind = reader.number(f"{folder}/{bus}/class", optional=True) or 0
        vendor = reader.number(f"{folder}/{bus}/vendor", optional=True) or 0
        is_board_display = kind >> 8 == _VGA and vendor != _NVIDIA
        found += kind >> 16 in _ACCELERATORS and vendor in _VENDORS and not is_board_display
    return found


def read_switches(reader: SysfsReader, environment: Mapping[str, str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the source of the switch names, and the switches from the top.

    HOLMES_TOPOGRAPH_LABELS holds the node's Topograph labels as ``key=value,...`` or names a file with one
    ``key="value"`` per line, as written by Kubernetes' downward API. SLURM sets SLURM_TOPOLOGY_ADDR to the names
    from the top switch down to the node, joined by periods, and SLURM_TOPOLOGY_ADDR_PATTERN to the kind of each.
    """
    given = environment.get("HOLMES_TOPOGRAPH_LABELS")
    if given:
        text = given if "=" in given else reader.text(given) or ""
        labels: dict[str, str] = {}
        for entry in re.split(r"[\n,]", text):
            key, _, value = entry.partition("=")
            labels[key.strip()] = value.strip().strip('"')
        tiers = {int(m.group(1)): labels[key] for key in labels if (m := _TOPOGRAPH_TIER.fullmatch(key))}
        switches = [tiers[tier] for tier in sorted(tiers, reverse=True)]
        switches = switches or [labels[_TOPOGRAPH + tier] for tier in _TOPOGRAPH_TIERS if labels.get(_TOPOGRAPH + tier)]
        if switches:
            return "topograph", tuple(switches)
        reader.warn(f"HOLMES_TOPOGRAPH_LABELS={given[:80]!r}: no label {_TOPOGRAPH}core, spine or leaf found there")
    address, pattern = environment.get("SLURM_TOPOLOGY_ADDR", ""), environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    kinds = pattern.split(".")
    if "." in address and not pattern:
        reader.warn(f"SLURM_TOPOLOGY_ADDR={address[:80]!r} is not used: SLURM_TOPOLOGY_ADDR_PATTERN is not set")
        kinds = []
    # the node's name is last and may contain periods itself, so the parts are counted from the front
    switches = [part for part, kind in zip(address.split("."), kinds, strict=False) if kind != "node" and part]
    return ("slurm", tuple(switches)) if switches else (None, ())


def _identity(reader: SysfsReader, environment: Mapping[str, str], machine: str) -> tuple[str, str]:
    given = (environment.get("HOLMES_HOST_NAME") or "").strip()
    if given:
        return given, given
    name = socket.gethostname() or "host"
    boot = reader.text(f"{machine}/proc/sys/kernel/random/boot_id", optional=True) or "?"
    try:
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError as error:
        reader.warn(f"/proc/self/ns/net: {error.strerror}")
        namespace = "?"
    return name, f"{name}/{boot}/{namespace}"
