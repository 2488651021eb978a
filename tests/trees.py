"""Simulated /sys and /proc trees and psutil readings of hosts with hardware that the tests do not have."""

import ipaddress
import socket
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

Stats = namedtuple("Stats", "isup duplex speed mtu flags")
Address = namedtuple("Address", "family address netmask broadcast ptp")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def ipv4_gid(address: str) -> str:
    number = int(ipaddress.IPv4Address(address))
    return f"0000:0000:0000:0000:0000:ffff:{number >> 16:04x}:{number & 0xFFFF:04x}"


@dataclass
class Machine:
    """A host below ``root``: call the methods to add hardware, and ``install`` to make psutil see it."""

    root: Path

    def __post_init__(self) -> None:
        self.stats: dict[str, Stats] = {}
        self.addresses: dict[str, list[Address]] = {}
        self.interface("lo", addresses=["127.0.0.1/8"], kind=772)

    def rdma(
        self,
        device: str,
        *,
        port: int = 1,
        layer: str | None = "InfiniBand",
        state: str = "4: ACTIVE",
        rate: str | None = "200 Gb/sec (4X HDR)",
        gids: Sequence[tuple[str, str | None, str | None]] = (),
        sm_lid: str = "0x1",
        pci: str | None = None,
    ) -> Path:
        """Add an RDMA device with one port; gids: (gid, type, ndev). Returns the folder of the device's PCI function."""
        function = self.root / "sys/devices" / (pci or f"pci0000:00/0000:00:0{len(self.stats)}.0")
        device_folder = function / "infiniband" / device
        here = device_folder / "ports" / str(port)
        write(device_folder / "node_type", "1: CA")
        for name, value in (("link_layer", layer), ("state", state), ("rate", rate), ("sm_lid", sm_lid)):
            if value is not None:
                write(here / name, value)
        for index, (gid, kind, ndev) in enumerate(gids):
            write(here / f"gids/{index}", gid)
            if kind is not None:
                write(here / f"gid_attrs/types/{index}", kind)
            if ndev is not None:
                write(here / f"gid_attrs/ndevs/{index}", ndev)
        link = self.root / "sys/class/infiniband" / device
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(device_folder)
            (device_folder / "device").symlink_to(function)
        return function

    def interface(
        self,
        name: str,
        *,
        addresses: Sequence[str] = (),
        up: bool = True,
        speed: str | None = None,
        driver: str | None = None,
        kind: int = 1,
        mac: str = "02:00:00:00:00:01",
    ) -> Path:
        """Add a network interface, seen by psutil and described in /sys/class/net. Returns its folder there."""
        here = self.root / "sys/class/net" / name
        write(here / "type", str(kind))
        write(here / "address", mac)
        write(here / "ifindex", "2")
        write(here / "iflink", "2")
        if speed is not None:
            write(here / "speed", speed)
        if driver is not None:
            (here / "device").mkdir(exist_ok=True)
            (here / "device/driver").symlink_to(f"/nowhere/{driver}")
        self.stats[name] = Stats(up, 0, 0, 1500, "up,loopback" if name == "lo" else "up")
        found = [Address(psutil.AF_LINK, mac, None, None, None)]
        for text in addresses:
            interface = ipaddress.ip_interface(text)
            family = socket.AF_INET if interface.version == 4 else socket.AF_INET6
            scope = f"%{name}" if interface.version == 6 and interface.is_link_local else ""
            found.append(Address(family, f"{interface.ip}{scope}", str(interface.netmask), None, None))
        self.addresses[name] = found
        return here

    def gpu(self, path: str, *, vendor: str = "0x10de", kind: str = "0x030200") -> None:
        function = self.root / "sys/devices" / path
        for name, value in (("vendor", vendor), ("class", kind)):
            write(function / name, value)
        link = self.root / "sys/bus/pci/devices" / function.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(function)

    def default_route(self, interface: str, metric: int = 0) -> None:
        head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        write(
            self.root / "proc/net/route",
            f"{head}{interface}\t00000000\t010200C0\t0003\t0\t0\t{metric}\t00000000\t0\t0\t0",
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(psutil, "net_if_stats", lambda: self.stats)
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: self.addresses)
