"""Interface: the network interfaces of this host, from psutil and /sys/class/net.

psutil reads the network namespace of this process. /sys may show another namespace; if the MAC addresses of an
interface differ, its entry in /sys is not used.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from lightning_holmes.cluster.record import Address, record
from lightning_holmes.cluster.sysfs import SysfsReader, natural_key

_DOCKER_LIKE = (
    *("docker", "br-", "virbr", "cni", "podman", "lxcbr", "lxdbr"),
    *("flannel", "cali", "cilium", "kube", "nodelocaldns"),
)
_TYPE_INFINIBAND, _TYPE_LOOPBACK, _TYPE_NONE = 32, 772, 65534  # linux/if_arp.h


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface.

    Attributes:
        kind: ethernet, virtio, bond, bridge, vlan, veth, ipoib, tunnel, loopback or virtual.
        up: whether it is up and has a carrier.
        addresses: with prefix length ("10.0.0.1/24"), IPv4 first; link-local IPv6 addresses are left out.
        speed_bytes_per_s: None if the kernel does not know it, as on most virtual links.
        members: the interfaces that a bond or bridge joins.
        master: the bond or bridge that this interface belongs to.
    """

    name: str
    kind: str
    up: bool
    speed_bytes_per_s: float | None = None
    addresses: tuple[Address, ...] = ()
    members: tuple[str, ...] = ()
    master: str | None = None


def read_interfaces(reader: SysfsReader, net_class: str) -> tuple[Interface, ...]:
    """Read all interfaces of this process's network namespace. net_class: the folder /sys/class/net."""
    try:
        addresses, stats = psutil.net_if_addrs(), psutil.net_if_stats()
    except (OSError, RuntimeError) as error:
        reader.warn(f"network interfaces: {error}")
        return ()
    described = set(reader.names(net_class))
    found = []
    for name in sorted(stats, key=natural_key):
        mac = next((a.address.lower() for a in addresses.get(name, ()) if a.family == psutil.AF_LINK), None)
        folder = f"{net_class}/{name}" if name in described else None
        shown = None if folder is None else reader.text(f"{folder}/address", optional=True)
        if shown and mac is not None and shown != mac:
            reader.warn(f"{folder}: belongs to an interface of another network namespace; not used")
            folder = None
        found.append(_read_interface(reader, name, folder, stats[name], addresses.get(name, ())))
    return tuple(found)


def choose_interfaces(interfaces: Sequence[Interface], *, of_rdma: set[str], main: str | None) -> tuple[Interface, ...]:
    """Choose the interfaces that carry traffic between hosts, the main interface first.

    Left out: loopback and docker-like bridges (unless there is nothing else), members of bonds and bridges,
    interfaces of RDMA devices (they belong to the RDMA cards), and virtual interfaces without an address. The main
    interface is always included.
    """
    chosen = [
        interface
        for interface in interfaces
        if interface.name == main or (interface.name not in of_rdma and _carries(interface))
    ]
    if not chosen:
        chosen = [i for i in interfaces if i.addresses and i.name not in of_rdma and i.kind != "loopback"]
    if not chosen:
        chosen = [i for i in interfaces if i.kind == "loopback" and not of_rdma]
    return tuple(sorted(chosen, key=lambda i: i.name != main))


def find_main_interface(
    reader: SysfsReader, interfaces: Sequence[Interface], *, of_rdma: set[str], proc_net: str, master_addr: str | None
) -> str | None:
    """Find the interface that reaches the master, else the default route's, else the first that is up with an address.

    In the last case an interface of an RDMA device is chosen only if there is no other.
    """
    if master_addr:
        source = source_address(master_addr)
        for interface in interfaces:
            if interface.kind != "loopback" and any(a.split("/")[0] == source for a in interface.addresses):
                return interface.name
    routed = _default_route(reader, proc_net)
    if any(interface.name == routed for interface in interfaces):
        return routed
    usable = [i for i in interfaces if i.up and i.addresses and _carries(i)]
    usable.sort(key=lambda i: (i.name in of_rdma, i.kind not in ("ethernet", "virtio", "bond", "veth")))
    return usable[0].name if usable else None


def source_address(destination: str) -> str | None:
    """The local address from which this host would send to a numeric address; nothing is sent."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(destination).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((destination, 9))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return None


def subnet_of(address: str) -> str | None:
    """The subnet of an address such as "10.0.0.1/24"; None for a host route (/32, as in some clouds), which tells nothing."""
    network = ipaddress.ip_interface(address).network
    return str(network) if network.num_addresses > 2 else None


def _read_interface(
    reader: SysfsReader, name: str, folder: str | None, stats: object, addresses: Sequence[object]
) -> Interface:
    speed = getattr(stats, "speed", 0) or None
    kind = "virtual"
    members: tuple[str, ...] = ()
    master = None
    if name == "lo" or "loopback" in getattr(stats, "flags", ""):
        kind = "loopback"
    if folder is not None:
        if kind != "loopback":
            kind, members = _kind(reader, folder)
        stated = reader.text(f"{folder}/speed", optional=True)  # an error or -1 if there is no speed
        speed = int(stated) if stated is not None and stated.isdecimal() and int(stated) > 0 else speed
        link = f"{folder}/master"
        master = os.path.basename(os.path.realpath(link)) if os.path.islink(link) else None
    if kind == "veth":
        speed = None  # the driver always reports 10 Gbit/s
    return Interface(
        name=name,
        kind=kind,
        up=bool(getattr(stats, "isup", False)),
        speed_bytes_per_s=speed * 1e6 / 8 if speed is not None else None,
        addresses=_addresses(reader, name, addresses),
        members=members,
        master=master,
    )


def _kind(reader: SysfsReader, folder: str) -> tuple[str, tuple[str, ...]]:
    hardware = reader.number(f"{folder}/type", optional=True)
    if hardware == _TYPE_LOOPBACK:
        return "loopback", ()
    if os.path.isdir(f"{folder}/bonding"):
        return "bond", tuple((reader.text(f"{folder}/bonding/slaves") or "").split())
    if os.path.isdir(f"{folder}/bridge"):
        return "bridge", tuple(reader.names(f"{folder}/brif", optional=True))
    if hardware == _TYPE_INFINIBAND:
        return "ipoib", ()
    if hardware == _TYPE_NONE:
        return "tunnel", ()
    if "DEVTYPE=vlan" in (reader.text(f"{folder}/uevent", optional=True) or "").split("\n"):
        return "vlan", ()
    if os.path.exists(f"{folder}/device"):
        driver = os.path.basename(os.path.realpath(f"{folder}/device/driver"))
        return ("virtio" if driver == "virtio_net" else "ethernet"), ()
    index, peer = (reader.text(f"{folder}/{name}", optional=True) for name in ("ifindex", "iflink"))
    return ("veth" if index != peer else "virtual"), ()


def _carries(interface: Interface) -> bool:
    if interface.kind == "loopback" or interface.master is not None or interface.name.startswith(_DOCKER_LIKE):
        return False
    return bool(interface.addresses) or interface.kind in ("ethernet", "virtio", "bond")


def _addresses(reader: SysfsReader, name: str, addresses: Sequence[object]) -> tuple[str, ...]:
    found = []
    for entry in addresses:
        family, text, mask = (getattr(entry, key, None) for key in ("family", "address", "netmask"))
        if family not in (socket.AF_INET, socket.AF_INET6) or not isinstance(text, str):
            continue
        try:
            address = ipaddress.ip_address(text.split("%")[0])
            bits = int(ipaddress.ip_address(mask)).bit_count() if mask else address.max_prefixlen
        except ValueError as error:
            reader.warn(f"address {text!r} of {name}: {error}")
            continue
        if not (address.version == 6 and address.is_link_local):
            found.append((address.version, int(address), f"{address}/{bits}"))
    return tuple(text for _, _, text in sorted(found))


def _default_route(reader: SysfsReader, proc_net: str) -> str | None:
    """The interface of the default route with the lowest metric, from /proc/net/route, else ipv6_route."""
    best: list[tuple[int, str]] = []
    for line in (reader.text(f"{proc_net}/route", optional=True) or "").splitlines()[1:]:
        parts = line.split()
        if len(parts) >= 8 and parts[1] == "00000000" and parts[7] == "00000000" and parts[6].isdecimal():
            best.append((int(parts[6]), parts[0]))
    if not best:
        for line in (reader.text(f"{proc_net}/ipv6_route", optional=True) or "").splitlines():
            parts = line.split()
            if len(parts) >= 10 and parts[0] == "0" * 32 and parts[1] == "00" and parts[9] != "lo":
                best.append((int(parts[5], 16), parts[9]))
    return min(best)[1] if best else None
