"""Draws a topology: for each cluster a column of hosts below its network, and the links between clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_holmes.cluster.network import Cluster
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.commands.topology_table import bandwidth, latency, ranges
from lightning_holmes.errors import ConfigurationError, needs_extra

_COLORS = {"infiniband": "#2a7f3f", "roce": "#b35c00", "ethernet": "#4a6fa5"}
_UNKNOWN = "#888888"
_MAX_ROWS = 16  # hosts drawn in a column; for further hosts only their number is written
_WIDTH, _ROW, _GAP = 3.4, 0.62, 1.6


def check_plot_file(path: str) -> None:
    """Raise ConfigurationError if no drawing can be written to this file, or matplotlib is missing."""
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise ConfigurationError(f"--plot={path}: give the file a name that ends in .png or .svg")
    if not Path(path).resolve().parent.is_dir():
        raise ConfigurationError(f"--plot={path}: there is no folder {Path(path).resolve().parent}; create it first")
    _import_figure()


def plot_topology(topology: Topology, path: str) -> None:
    """Draw into a .png or .svg file. Needs matplotlib."""
    clusters = topology.clusters
    rows = max(min(len(cluster.hosts), _MAX_ROWS + 1) for cluster in clusters)
    depth = 0.15 + 0.55 * len(topology.links)
    width = len(clusters) * (_WIDTH + _GAP)
    figure = _import_figure()(figsize=(max(width, 5.0), rows * _ROW + depth + 1.9), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    centers: dict[str, float] = {}
    for index, cluster in enumerate(clusters):
        left = index * (_WIDTH + _GAP)
        centers[cluster.name] = left + _WIDTH / 2
        _draw_cluster(axes, cluster, left, rows)
    for number, link in enumerate(topology.links):
        height = -0.35 - 0.55 * number
        first, second = sorted(centers[end] for end in link.ends)
        first, second = first + 0.08 * number, second - 0.08 * number
        color = _COLORS[link.transport]
        axes.plot([first, first, second, second], [0.0, height, height, 0.0], color=color, linewidth=2)
        what = f"{link.transport} {bandwidth(link.bandwidth_bytes_per_s)}, {latency(link.latency_s)}"
        what += "" if link.measured else " (stated)"
        _write(axes, (first + second) / 2, height + 0.05, what, color=color, size=8, vertical="bottom")
    axes.set_xlim(-0.3, width - _GAP + 0.3)
    axes.set_ylim(-depth, rows * _ROW + 1.5)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigurationError(
            f"--plot={path}: {error.strerror or error}; name a file that can be written"
        ) from error


def _draw_cluster(axes: Any, cluster: Cluster, left: float, rows: int) -> None:
    """Draw the cluster's network as a bar on top, a box for each host, and a line from each host to the bar."""
    kind = network_of(cluster)
    color = _COLORS.get(kind, _UNKNOWN)
    top = rows * _ROW + 0.45
    _box(axes, left - 0.12, 0.0, _WIDTH + 0.24, top + 0.95, face="#f6f6f4", edge="#bbbbbb")
    _write(axes, left + _WIDTH / 2, top + 0.68, cluster.name, size=11, weight="bold")
    _box(axes, left, top, _WIDTH, 0.34, face=color, edge=color)
    speed = cluster.speed(kind)
    label = kind + (f" {bandwidth(speed.bandwidth_bytes_per_s)}" if speed is not None else "")
    label += " (stated)" if speed is not None and not speed.measured else ""
    _write(axes, left + _WIDTH / 2, top + 0.17, label, color="white", size=8)
    for row, host in enumerate(cluster.hosts[:_MAX_ROWS]):
        bottom = top - 0.3 - (row + 1) * _ROW + 0.2
        card = next((nic for nic in host.nics if nic.kind == kind), None)
        usable = card is None or host.nic_of(kind) is not None
        axes.plot(
            [left + 0.16, left + 0.16, left + 0.3],
            [top, bottom + 0.21, bottom + 0.21],
            color=color if usable else "#c0392b",
            linestyle="-" if usable else ":",
            linewidth=1.5,
        )
        _box(axes, left + 0.3, bottom, _WIDTH - 0.3, 0.42, face="white", edge="#666666" if usable else "#c0392b")
        what = f"ranks {ranges(host.ranks)}" if host.ranks is not None else f"{host.devices} devices"
        cards = "" if usable or card is None else f", {card.name} down"
        _write(axes, left + 0.15 + _WIDTH / 2, bottom + 0.21, f"{host.name}: {what}{cards}", size=7.5)
    if len(cluster.hosts) > _MAX_ROWS:
        bottom = top - 0.3 - (_MAX_ROWS + 1) * _ROW + 0.2
        _write(axes, left + _WIDTH / 2, bottom + 0.21, f"and {len(cluster.hosts) - _MAX_ROWS} more hosts", size=7.5)


def network_of(cluster: Cluster) -> str:
    """The kind of network that a cluster's hosts share: the given one, or the fastest of which all hosts have a card on one fabric."""
    if cluster.fabric is not None:
        return cluster.fabric
    for kind in _COLORS:
        fabrics = [{nic.fabric for nic in host.nics if nic.kind == kind} for host in cluster.hosts]
        if set.intersection(*fabrics):
            return kind
    return "network not known"


def _box(axes: Any, x: float, y: float, width: float, height: float, *, face: str, edge: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=edge, zorder=1))


def _write(
    axes: Any, x: float, y: float, text: str, *, size: float = 9, vertical: str = "center", **options: Any
) -> None:
    # matplotlib would read $ as the start of a formula
    axes.text(x, y, text.replace("$", r"\$"), ha="center", va=vertical, fontsize=size, zorder=3, **options)


def _import_figure() -> Any:
    with needs_extra("--plot", "plot"):
        from matplotlib.figure import Figure
    return Figure
