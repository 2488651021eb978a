"""Topology files: reading them with errors that name the line, and writing them. The schema is in topology.py.

parts = read_topology(text, source="my.yaml")       # the arguments of Topology
"""

from __future__ import annotations

from typing import Any, cast

import yaml

from lightning_holmes.cluster.json_data import to_data
from lightning_holmes.cluster.network import (
    TRANSPORT_KINDS,
    Cluster,
    Host,
    Link,
    LinkSpeed,
    Nic,
    TransportKind,
    Unreachable,
)
from lightning_holmes.cluster.yaml_node import YamlNode

_MAX_COUNT = 100_000  # hosts from one entry; beyond it the count is a slip of the finger
_MAX_DEVICES = 4096
_MAX_RANK = 10_000_000

# As they are called in Python, and in files, where the value carries its unit.
_FILE_NAMES = {"bandwidth_bytes_per_s": "bandwidth", "latency_s": "latency", "nic_bytes_per_s": "nic_bandwidth"}


def read_topology(text: str, *, source: str) -> dict[str, Any]:
    """The arguments of Topology from YAML text (or JSON, which is YAML too)."""
    root = YamlNode.parse(text, source=source)
    entries = root.mapping(required=("clusters",), optional=("links", "unreachable", "warnings", "measured_at"))
    clusters: list[Cluster] = []
    cluster_lines: dict[str, int] = {}
    host_lines: dict[str, int] = {}
    for node in entries["clusters"].items(minimum=1):
        clusters.append(_read_cluster(node, cluster_lines, host_lines))
    link_lines: dict[str, int] = {}
    links = [_read_link(node, list(cluster_lines), link_lines) for node in _items(entries, "links")]
    unreachable = [_read_unreachable(node, list(host_lines)) for node in _items(entries, "unreachable")]
    return {
        "clusters": tuple(clusters),
        "links": tuple(links),
        "unreachable": tuple(unreachable),
        "warnings": tuple(node.text() for node in _items(entries, "warnings")),
        "measured_at_s": entries["measured_at"].number() if "measured_at" in entries else None,
    }


def write_topology(topology: Any) -> str:
    """YAML text that read_topology reads back. topology: a Topology; every host is written out."""
    data = rename_for_files(to_data(topology))
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def rename_for_files(data: Any) -> Any:
    """Plain data of a Topology with the keys of topology files. Its source is left out."""
    if isinstance(data, dict):
        data.pop("source", None)
        if "measured_at_s" in data:
            data["measured_at"] = data.pop("measured_at_s")
        return {_FILE_NAMES.get(key, key): rename_for_files(_as_float(key, value)) for key, value in data.items()}
    return [rename_for_files(item) for item in data] if isinstance(data, list) else data


def _as_float(key: str, value: Any) -> Any:
    return float(value) if key in _FILE_NAMES and value is not None else value


def _items(entries: dict[str, YamlNode], key: str) -> list[YamlNode]:
    return entries[key].items() if key in entries else []


def _read_cluster(node: YamlNode, cluster_lines: dict[str, int], host_lines: dict[str, int]) -> Cluster:
    entries = node.mapping(required=("name", "hosts"), optional=("fabric", "fallback", "speeds"))
    name = _new_name(entries["name"], entries["name"].text(), cluster_lines)
    hosts: list[Host] = []
    for host in entries["hosts"].items(minimum=1):
        hosts.extend(_read_hosts(host, host_lines))
    speed_lines: dict[str, int] = {}
    return Cluster(
        name=name,
        hosts=tuple(hosts),
        fabric=_kind(entries["fabric"]) if "fabric" in entries else None,
        fallback=entries["fallback"].text() if "fallback" in entries else None,
        speeds=tuple(_read_speed(speed, speed_lines) for speed in _items(entries, "speeds")),
    )


def _read_hosts(node: YamlNode, host_lines: dict[str, int]) -> list[Host]:
    entries = node.mapping(required=("name", "devices"), optional=("count", "nics", "ranks"))
    name = entries["name"].text()
    devices = entries["devices"].integer(minimum=1, maximum=_MAX_DEVICES)
    nics: list[Nic] = []
    nic_lines: dict[str, int] = {}
    for nic in _items(entries, "nics"):
        nics.append(_read_nic(nic, nic_lines))
    names = [name]
    if "count" in entries:
        count = entries["count"].integer(minimum=1, maximum=_MAX_COUNT)
        names = [f"{name}-{index}" for index in range(count)]
    ranks = None
    if "ranks" in entries:
        if "count" in entries:
            raise entries["ranks"].error("ranks belong to one host; write hosts with ranks out, without a count")
        ranks = tuple(rank.integer(minimum=0, maximum=_MAX_RANK) for rank in entries["ranks"].items())
        if len(ranks) != devices:
            raise entries["ranks"].error(f"{len(ranks)} ranks for {devices} devices; write one rank for each device")
    return [
        Host(name=_new_name(entries["name"], host, host_lines), devices=devices, nics=tuple(nics), ranks=ranks)
        for host in names
    ]


def _read_nic(node: YamlNode, nic_lines: dict[str, int]) -> Nic:
    entries = node.mapping(
        required=("name", "kind"),
        optional=("bandwidth", "interface", "addresses", "up", "fabric", "near_devices"),
    )
    return Nic(
        name=_new_name(entries["name"], entries["name"].text(), nic_lines),
        kind=_kind(entries["kind"]),
        bandwidth_bytes_per_s=entries["bandwidth"].bandwidth_bytes_per_s() if "bandwidth" in entries else None,
        interface=entries["interface"].text() if "interface" in entries else None,
        addresses=tuple(address.text() for address in _items(entries, "addresses")),
        up=entries["up"].boolean() if "up" in entries else True,
        fabric=entries["fabric"].text() if "fabric" in entries else None,
        near_devices=tuple(d.integer(minimum=0, maximum=_MAX_DEVICES) for d in _items(entries, "near_devices")),
    )


def _read_link(node: YamlNode, clusters: list[str], link_lines: dict[str, int]) -> Link:
    entries = node.mapping(required=("ends", "transport", "bandwidth", "latency"), optional=("measured",))
    first, second = _ends(entries["ends"], clusters, "a link", "cluster")
    _new_name(entries["ends"], " and ".join(map(repr, sorted((first, second)))), link_lines)
    return Link(
        ends=(first, second),
        transport=_kind(entries["transport"]),
        bandwidth_bytes_per_s=entries["bandwidth"].bandwidth_bytes_per_s(),
        latency_s=entries["latency"].latency_s(),
        measured=entries["measured"].boolean() if "measured" in entries else False,
    )


def _read_speed(node: YamlNode, speed_lines: dict[str, int]) -> LinkSpeed:
    entries = node.mapping(required=("transport", "bandwidth"), optional=("latency", "nic_bandwidth", "measured"))
    transport = _kind(entries["transport"])
    _new_name(entries["transport"], transport, speed_lines)
    return LinkSpeed(
        transport=transport,
        bandwidth_bytes_per_s=entries["bandwidth"].bandwidth_bytes_per_s(),
        latency_s=entries["latency"].latency_s() if "latency" in entries else None,
        nic_bytes_per_s=entries["nic_bandwidth"].bandwidth_bytes_per_s() if "nic_bandwidth" in entries else None,
        measured=entries["measured"].boolean() if "measured" in entries else False,
    )


def _read_unreachable(node: YamlNode, hosts: list[str]) -> Unreachable:
    entries = node.mapping(required=("ends", "transport", "reason"))
    return Unreachable(
        ends=_ends(entries["ends"], hosts, "an unreachable pair", "host"),
        transport=_kind(entries["transport"]),
        reason=entries["reason"].text(),
    )


def _ends(node: YamlNode, allowed: list[str], what: str, of: str) -> tuple[str, str]:
    ends = node.items()
    if len(ends) != 2:
        raise node.error(f"{what} has two ends, not {len(ends)}; write [one {of}, another {of}]")
    first, second = (end.choice(allowed) for end in ends)
    if first == second:
        raise node.error(f"both ends are {first!r}; {what} joins two different {of}s")
    return first, second


def _kind(node: YamlNode) -> TransportKind:
    return cast(TransportKind, node.choice(TRANSPORT_KINDS))


def _new_name(node: YamlNode, name: str, lines: dict[str, int]) -> str:
    if name in lines:
        raise node.error(f"{name} is already on line {lines[name]}; every name may stand once")
    lines[name] = node.line
    return name
