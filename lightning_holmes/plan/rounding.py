"""Measured figures, rounded coarsely, so that every start on the same hosts and links chooses the same plan. Pure.

rounded(9.4e8)                        # 2**30: to a power of two, or the figure half-way between two (steps=2)
rounded_links(topology)               # a topology's measured speeds of links; stated ones stay
"""

import math
from dataclasses import replace

from lightning_holmes.cluster.topology import Topology

_STEPS = 4  # of links: 19 % apart


def rounded(figure: float, steps: int = 2) -> float:
    """Return a figure rounded to powers of two and ``steps`` - 1 figures between two of them."""
    return 2.0 ** (round(math.log2(figure) * steps) / steps) if figure > 0 else figure


def rounded_links(topology: Topology) -> Topology:
    """Return the topology with measured bandwidths and latencies of links rounded."""
    clusters = tuple(
        replace(
            cluster,
            speeds=tuple(
                replace(
                    speed,
                    bandwidth_bytes_per_s=rounded(speed.bandwidth_bytes_per_s, _STEPS),
                    latency_s=None if speed.latency_s is None else rounded(speed.latency_s),
                )
                if speed.measured
                else speed
                for speed in cluster.speeds
            ),
        )
        for cluster in topology.clusters
    )
    links = tuple(
        replace(
            link, bandwidth_bytes_per_s=rounded(link.bandwidth_bytes_per_s, _STEPS), latency_s=rounded(link.latency_s)
        )
        if link.measured
        else link
        for link in topology.links
    )
    return replace(topology, clusters=clusters, links=links)
