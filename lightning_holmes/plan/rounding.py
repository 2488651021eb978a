"""Measured figures, rounded coarsely, so that every start on the same hosts and links chooses the same plan. Pure.

rounded(9.4e8)                        # 2**30: to a power of two, or the figure half-way between two (steps=2)
rounded_links(topology)               # a topology's measured speeds of links; stated ones stay
"""

import math
from dataclasses import replace
from typing import Any

from lightning_holmes.cluster.topology import Link, LinkSpeed, Topology

_STEPS = 4  # of links: 19 % apart


def rounded(figure: float, steps: int = 2) -> float:
    """Return a figure rounded to powers of two and ``steps`` - 1 figures between two of them."""
    return 2.0 ** (round(math.log2(figure) * steps) / steps) if figure > 0 else figure


def rounded_links(topology: Topology) -> Topology:
    """Return the topology with measured bandwidths and latencies of links rounded."""

    def figures(link: Link | LinkSpeed) -> dict[str, Any]:
        latency_s = None if link.latency_s is None else rounded(link.latency_s)
        rate = rounded(link.bandwidth_bytes_per_s, _STEPS)
        return {"bandwidth_bytes_per_s": rate, "latency_s": latency_s} if link.measured else {}

    clusters = [replace(c, speeds=tuple(replace(s, **figures(s)) for s in c.speeds)) for c in topology.clusters]
    links = tuple(replace(link, **figures(link)) for link in topology.links)
    return replace(topology, clusters=tuple(clusters), links=links)
