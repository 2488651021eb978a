"""An emulated /sys/class/infiniband for a host of the testbed; HOLMES_SYSFS_ROOT in its processes names the folder.

It writes the files, which do not show that the cards are veth devices. An InfiniBand device has the subnet manager and GID
prefix of its network; a RoCE device's GIDs contain its address, as with the kernel's drivers (link-local
and IPv4, each for RoCE v1 and v2).

    write_devices(folder, host)                    # folder/class/infiniband/mlx5_0/ports/1/...
    write_port(folder, nic, up=False, bandwidth_bytes_per_s=nic.bandwidth_bytes_per_s)
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from testbed.layout import HostLayout, NicLayout

_UNSHAPED_BYTES_PER_S = 25e9  # the stated rate of a card whose rate is not limited: 200 Gbit/s


def write_devices(root: Path, host: HostLayout) -> None:
    """Write every InfiniBand and RoCE device of a host, with ports up."""
    (root / "class" / "infiniband").mkdir(parents=True, exist_ok=True)
    for nic in host.nics:
        if nic.kind == "ethernet":
            continue
        port = _port(root, nic)
        device = port.parent.parent
        guid = _guid(nic)
        _write(device / "node_type", "1: CA")
        _write(device / "node_guid", guid)
        _write(device / "node_desc", f"{host.name} {nic.name}")
        (device / "device" / "net" / nic.interface).mkdir(parents=True, exist_ok=True)
        _write(port / "link_layer", "InfiniBand" if nic.kind == "infiniband" else "Ethernet")
        _write(port / "sm_lid", hex(1 + nic.fabric) if nic.kind == "infiniband" else "0x0")
        _write(port / "lid", hex(16 + int(nic.address.rpartition(".")[2])) if nic.kind == "infiniband" else "0x0")
        for index, (gid, kind) in enumerate(_gids(nic, guid)):
            _write(port / "gids" / str(index), gid)
            _write(port / "gid_attrs" / "types" / str(index), kind)
            _write(port / "gid_attrs" / "ndevs" / str(index), nic.interface)
        write_port(root, nic, up=True, bandwidth_bytes_per_s=nic.bandwidth_bytes_per_s)


def write_port(root: Path, nic: NicLayout, *, up: bool, bandwidth_bytes_per_s: float | None) -> None:
    """Write state and rate of a device's port."""
    port = _port(root, nic)
    _write(port / "state", "4: ACTIVE" if up else "1: DOWN")
    _write(port / "phys_state", "5: LinkUp" if up else "3: Disabled")
    gigabits = 8e-9 * (_UNSHAPED_BYTES_PER_S if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s)
    _write(port / "rate", f"{gigabits:g} Gb/sec (4X EDR)")


def _port(root: Path, nic: NicLayout) -> Path:
    return root / "class" / "infiniband" / nic.name / "ports" / "1"


def _guid(nic: NicLayout) -> str:
    """A GUID made from the NIC's address, which is unique on the testbed."""
    octets = [int(part) for part in nic.address.split(".")]
    return f"0002:c903:{octets[0]:02x}{octets[1]:02x}:{octets[2]:02x}{octets[3]:02x}"


def _gids(nic: NicLayout, guid: str) -> list[tuple[str, str]]:
    """(GID, type) of each index of the port's GID table."""
    if nic.kind == "infiniband":
        return [(f"fe80:0000:0000:{nic.fabric:04x}:{guid}", "IB/RoCE v1")]
    local = f"fe80:0000:0000:0000:{guid}"
    mapped = ipaddress.IPv6Address(f"::ffff:{nic.address}").exploded
    return [(gid, kind) for gid in (local, mapped) for kind in ("IB/RoCE v1", "RoCE v2")]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
