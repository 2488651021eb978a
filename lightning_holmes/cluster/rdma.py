"""RdmaPort: the ports of RDMA devices, from class/infiniband of a sysfs tree.

Files read for each device and port (Documentation/ABI/stable/sysfs-class-infiniband): node_type, link_layer,
state, rate, sm_lid, gids, gid_attrs/types and gid_attrs/ndevs.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_holmes.cluster.interfaces import Interface
from lightning_holmes.cluster.record import Address, record
from lightning_holmes.cluster.sysfs import SysfsReader, natural_key

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*Gb/sec")
_EMPTY_GIDS = 16  # this many empty entries in a row end the table: 256 reads per port would take all of the 50 ms
_MAX_GIDS = 256
DEFAULT_PREFIX = "fe80:0000:0000:0000"


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device.

    Attributes:
        name: the device, with ":port" if it has several ports, as in NCCL_IB_HCA.
        rate_bytes_per_s: None if not known.
        state: the kernel's word: ACTIVE, DOWN, INIT, ARMED.
        up: whether it is ACTIVE, and the interface that its GIDs name is not down.
        sm_lid: the LID of the subnet manager; None on RoCE, and without a subnet manager.
        subnet_prefix: the first half of an InfiniBand GID.
        interface: its network interface.
        addresses: with prefix length. From the interface; if it is not visible to this process, from the RoCE GIDs,
            with an assumed /24 or /64.
    """

    name: str
    kind: Literal["infiniband", "roce"]
    rate_bytes_per_s: float | None = None
    state: str | None = None
    up: bool = False
    sm_lid: int | None = None
    subnet_prefix: str | None = None
    interface: str | None = None
    addresses: tuple[Address, ...] = ()


def read_rdma_ports(
    reader: SysfsReader, infiniband_class: str, interfaces: Mapping[str, Interface]
) -> tuple[RdmaPort, ...]:
    """Read all InfiniBand and RoCE ports. infiniband_class: the folder class/infiniband."""
    found: list[RdmaPort] = []
    for device in reader.names(infiniband_class):
        folder = f"{infiniband_class}/{device}"
        node_type = reader.text(f"{folder}/node_type", optional=True)
        if node_type is not None and "RNIC" in node_type:
            reader.warn(f"{folder}/node_type: {node_type!r} is iWARP, which is not used as RDMA here")
            continue
        ports = [port for port in reader.names(f"{folder}/ports") if port.isdecimal()]
        for port in ports:
            name = f"{device}:{port}" if len(ports) > 1 else device
            read = _read_port(reader, folder, int(port), name, interfaces)
            if read is not None:
                found.append(read)
    return tuple(found)


def _read_port(
    reader: SysfsReader, folder: str, port: int, name: str, interfaces: Mapping[str, Interface]
) -> RdmaPort | None:
    here = f"{folder}/ports/{port}"
    gids = _read_gids(reader, here)
    layer = reader.text(f"{here}/link_layer")
    if layer is None and gids:
        layer = "Ethernet" if any(is_roce_v2 or ndev for _, is_roce_v2, ndev in gids) else "InfiniBand"
    if layer not in ("InfiniBand", "Ethernet"):
        reader.warn(f"{here}/link_layer: {layer!r} is neither InfiniBand nor Ethernet; the port is not used")
        return None
    state = (reader.text(f"{here}/state") or "").split(":")[-1].strip() or None
    named = next((ndev for _, _, ndev in gids if ndev), None)
    interface = named or _first_interface(reader, folder, port)
    live = interfaces.get(interface) if interface is not None else None
    if interface is not None and live is None:
        reader.warn(f"{here}: its interface {interface!r} is not in the network namespace of this process")
    up = state == "ACTIVE"
    if named is not None and live is not None and not live.up:
        up = False  # not for an interface found only beside the device: the port may carry verbs while its IPoIB interface is down
    lid = reader.number(f"{here}/sm_lid", optional=layer == "Ethernet")
    infiniband = layer == "InfiniBand"
    return RdmaPort(
        name=name,
        kind="infiniband" if infiniband else "roce",
        rate_bytes_per_s=_read_rate(reader, f"{here}/rate"),
        state=state,
        up=up,
        sm_lid=lid if infiniband and lid else None,
        subnet_prefix=gids[0][0][:19] if infiniband and gids else None,
        interface=interface,
        addresses=live.addresses if live is not None else () if infiniband else _gid_addresses(gids),
    )


def _read_gids(reader: SysfsReader, here: str) -> list[tuple[str, bool, str | None]]:
    """Read (GID, whether it is of RoCE v2, interface) of the entries that are in use."""
    found: list[tuple[str, bool, str | None]] = []
    empty = 0
    # reading an unused entry of a RoCE table is an error, so that only a missing first entry gives a warning
    for index in range(_MAX_GIDS):
        gid = reader.text(f"{here}/gids/{index}", optional=index > 0)
        if gid is None or not _is_used(gid):
            empty += 1
            if empty >= _EMPTY_GIDS or (gid is None and not os.path.exists(f"{here}/gids/{index}")):
                break
            continue
        empty = 0
        kind = reader.text(f"{here}/gid_attrs/types/{index}", optional=True) or ""
        found.append((gid.lower(), "v2" in kind, reader.text(f"{here}/gid_attrs/ndevs/{index}", optional=True) or None))
    return found


def _is_used(gid: str) -> bool:
    """Whether a GID is more than zeros or a bare prefix: unused entries of RoCE tables may be fe80::0."""
    return re.fullmatch(r"[0-9a-fA-F]{4}(:[0-9a-fA-F]{4}){7}", gid) is not None and bool(set(gid[20:]) - {"0", ":"})


def _gid_addresses(gids: list[tuple[str, bool, str | None]]) -> tuple[str, ...]:
    found = set()
    for gid, _, _ in gids:
        address = ipaddress.IPv6Address(gid)
        if address.ipv4_mapped is not None:
            found.add((4, f"{address.ipv4_mapped}/24"))
        elif not address.is_link_local:
            found.add((6, f"{address}/64"))
    return tuple(text for _, text in sorted(found))


def _read_rate(reader: SysfsReader, path: str) -> float | None:
    text = reader.text(path)
    match = _RATE.match(text) if text else None
    if text and match is None:
        reader.warn(f"{path}: {text[:40]!r} is not a rate")
    return float(match.group(1)) * 1e9 / 8 or None if match else None


def _first_interface(reader: SysfsReader, folder: str, port: int) -> str | None:
    """The network interface on the device's PCI function; with several ports, dev_port tells which is the port's."""
    beside = f"{folder}/device/net"
    names = sorted(reader.names(beside, optional=True), key=natural_key)
    for name in names:
        if len(names) == 1 or reader.number(f"{beside}/{name}/dev_port", optional=True) == port - 1:
            return name
    return None
