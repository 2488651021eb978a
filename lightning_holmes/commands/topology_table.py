"""Prints tables of a topology."""

from __future__ import annotations

import time

from rich.markup import escape
from rich.table import Table

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.plan.tables import format_seconds, format_spans, make_console

_WIDTH = 240  # in a file or a pipe, do not cut or fold to 80 columns


def print_topology(topology: Topology) -> None:
    """Print clusters with their hosts and network cards, speeds, and warnings."""
    console = make_console(width=_WIDTH)
    table = _table("cluster", "host", "ranks", "NIC", "kind", "rate", "interface", "addresses", "state")
    for cluster in topology.clusters:
        for index, host in enumerate(cluster.hosts):
            ranks = format_spans(sorted(host.ranks)) if host.ranks is not None else f"{host.devices} devices"
            title = cluster.name + (f" ({cluster.fabric})" if cluster.fabric not in (None, cluster.name) else "")
            first = (title if index == 0 else "", host.name, ranks)
            for number, nic in enumerate(host.nics or (None,)):
                cells: tuple[str, ...] = first if number == 0 else ("", "", "")
                if nic is not None:
                    rate = bandwidth(nic.bandwidth_bytes_per_s)
                    state = "up" if nic.up else "down"
                    more = f" and {len(nic.addresses) - 2} more" if len(nic.addresses) > 2 else ""
                    addresses = " ".join(nic.addresses[:2]) + more
                    cells = (*cells, nic.name, nic.kind, rate, nic.interface or "", addresses, state)
                table.add_row(*map(escape, cells))
        table.add_section()
    console.print(table)
    speeds = _table("from", "to", "transport", "bandwidth", "latency", "known from")
    for cluster in topology.clusters:
        for speed in cluster.speeds:
            known = "measured" if speed.measured else "the NICs' rate" if speed.nic_bytes_per_s else "file"
            if speed.measured and speed.nic_bytes_per_s is not None:
                known += f" (NIC: {bandwidth(speed.nic_bytes_per_s)})"
            row = (
                speed.transport,
                bandwidth(speed.bandwidth_bytes_per_s),
                "" if speed.latency_s is None else format_seconds(speed.latency_s),
                known,
            )
            speeds.add_row(*map(escape, (cluster.name, "itself", *row)))
    for link in topology.links:
        figures = (bandwidth(link.bandwidth_bytes_per_s), format_seconds(link.latency_s))
        known = "measured" if link.measured else "file"
        speeds.add_row(*map(escape, (*link.ends, link.transport, *figures, known)))
    if speeds.row_count:
        console.print(speeds)
    if topology.measured_at_s is not None:
        measured = time.strftime("%Y-%m-%d %H:%M", time.localtime(topology.measured_at_s))
        console.print(f"measured {measured}; one TCP connection a measurement")
    for warning in topology.warnings:
        console.print(escape(f"warning: {warning}"))


def bandwidth(bytes_per_s: float | None) -> str:
    """Format a bandwidth: 200 Gbit/s, 93.4 Mbit/s; ? if not known."""
    if bytes_per_s is None:
        return "?"
    bits = bytes_per_s * 8
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= factor:
            return f"{bits / factor:.3g} {unit}" if bits < 1000 * factor else f"{bits / factor:.0f} {unit}"
    return f"{bits:.3g} bit/s"


def _table(*columns: str) -> Table:
    table = Table(show_header=True, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
