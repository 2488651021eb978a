"""HostInventory: the hardware of one host, read without root and without starting a process, in well under 50 ms.

It reads the environment variables about a host (HOLMES_SYSFS_ROOT, HOLMES_HOST_NAME, HOLMES_CLUSTER,
MASTER_ADDR) and determines the host's identity. rdma.py and interfaces.py read the cards. fabric.py finds what several hosts have in common.

    inventory = probe_host()
    inventory.rdma[0].name                         # "mlx5_0"
    read_json(HostInventory, to_json(inventory), source="rank 3") == inventory      # as it is sent to rank 0 (record.py)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_holmes.cluster.interfaces import Interface, choose_interfaces, find_main_interface, read_interfaces
from lightning_holmes.cluster.network import Nic, TransportKind
from lightning_holmes.cluster.rdma import RdmaPort, read_rdma_ports
from lightning_holmes.cluster.record import Text, check_unique, record
from lightning_holmes.cluster.sysfs import SysfsReader

_NVIDIA = 0x10DE
_VENDORS = (_NVIDIA, 0x1002, 0x8086)  # and AMD, Intel
_ACCELERATORS = (0x03, 0x12)  # PCI base classes: displays and accelerators
_VGA = 0x0300  # an on-board display controller of a server, unless the maker is NVIDIA


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class HostInventory:
    """The hardware of one host.

    Attributes:
        name: HOLMES_HOST_NAME, else the host name.
        identity: equal for processes of one host: HOLMES_HOST_NAME if given, else host name, boot ID and network namespace.
        cluster: HOLMES_CLUSTER, or None.
        rdma: all ports of RDMA devices.
        interfaces: the network interfaces that carry traffic between hosts; the main interface first.
        main_interface: the interface that reaches the master or the default route.
        num_gpus: of all makers, listed by the driver or the PCI bus.
        warnings: what could not be read, each with its file.
    """

    name: Text
    identity: Text
    cluster: Text | None = None
    rdma: tuple[RdmaPort, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    main_interface: str | None = None
    num_gpus: int = 0
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key, what in (("rdma", "RDMA ports"), ("interfaces", "interfaces")):
            names = [((key, i, "name"), part.name) for i, part in enumerate(getattr(self, key))]
            check_unique(names, f"{what} of host {self.name!r}")

    def nics(self) -> tuple[Nic, ...]:
        """The host's network cards for a topology: RDMA first, then Ethernet, the main interface before others."""
        names = {port.name for port in self.rdma}
        plain = [interface for interface in self.interfaces if interface.name not in names]
        cards: list[tuple[RdmaPort | Interface, TransportKind, float | None, str | None]] = [
            *((port, port.kind, port.rate_bytes_per_s, port.interface) for port in self.rdma),
            *((interface, "ethernet", interface.speed_bytes_per_s, interface.name) for interface in plain),
        ]
        return tuple(
            Nic(
                name=card.name,
                kind=kind,
                bandwidth_bytes_per_s=rate,
                interface=interface,
                addresses=tuple(address.split("/")[0] for address in card.addresses),
                up=card.up,
            )
            for card, kind, rate, interface in cards
        )

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
    return HostInventory(
        name=name,
        identity=identity,
        cluster=(environment.get("HOLMES_CLUSTER") or "").strip() or None,
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
