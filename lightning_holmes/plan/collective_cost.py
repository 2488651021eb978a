"""Predicted seconds of collectives, from bytes, group size, bandwidth and latency. Plain formulas, no state.

num_bytes is always the size of the whole tensor: the input of an all-reduce or a reduce-scatter, the output of an
all-gather. bandwidth is one way, at the slowest place of the ring or tree; where several flows share a NIC, divide it
first (see shared).

    ring_all_reduce_s(1e9, size=8, bandwidth=25e9, latency=5e-6)      # 2 * 7/8 * 1e9 / 25e9 + 14 * 5e-6

Ring: each member sends (n-1)/n of the bytes in n-1 steps, for reduce-scatter and for all-gather; an all-reduce is
both (Patarasuk and Yuan 2009). Tree: two binary trees, each over half of the bytes, so that every member
sends all bytes once up and once down, in log2(n) steps each (Sanders, Speck, Traeff 2009; used by NCCL).
Hierarchical: reduce-scatter inside each host, all-reduce of the parts across hosts, all-gather inside. In two levels: the same with
clusters in place of hosts.
Not modelled: in-network reduction, contention inside a switch, kernel launch.
"""

from __future__ import annotations

import math

from lightning_holmes.plan.route import Channel


def shared(bandwidth: float, sharers: float) -> float:
    """The bandwidth that one of several equal flows gets."""
    return bandwidth / max(1.0, sharers)


def ring_all_reduce_s(num_bytes: float, *, size: int, bandwidth: float, latency: float) -> float:
    """Seconds of a ring all-reduce over ``size`` members: a reduce-scatter, then an all-gather, which takes as long."""
    return 2 * (size - 1) * (latency + num_bytes / size / bandwidth)


def two_level_all_reduce_s(
    inside_s: float, num_bytes: float, *, num_clusters: int, bandwidth: float, latency: float
) -> float:
    """Seconds of a sum in two levels over clusters: ``inside_s`` of an all-reduce inside the slowest cluster (a reduce-scatter and an all-gather),
    and between them the parts of all members over the clusters, by rings that share ``bandwidth``."""
    return inside_s + ring_all_reduce_s(num_bytes, size=num_clusters, bandwidth=bandwidth, latency=latency)


def all_reduce_s(num_bytes: float, *, local: Channel, channel: Channel, local_size: int, num_hosts: int) -> float:
    """Seconds of the fastest all-reduce (ring, tree or hierarchical) for local_size members on each of num_hosts hosts.

    Args:
        local: inside a host.
        channel: between the hosts; the members of a host share it.
    """
    if num_hosts == 1:
        return _ring_or_tree_s(num_bytes, size=local_size, bandwidth=local.bytes_per_s, latency=local.latency_s)
    bandwidth, latency = channel.bytes_per_s, channel.latency_s
    # one ring or tree through all members enters and leaves each host once
    slowest = min(bandwidth, local.bytes_per_s) if local_size > 1 else bandwidth
    flat = _ring_or_tree_s(num_bytes, size=local_size * num_hosts, bandwidth=slowest, latency=latency)
    inside = ring_all_reduce_s(num_bytes, size=local_size, bandwidth=local.bytes_per_s, latency=local.latency_s)
    each = shared(bandwidth, local_size)  # every member reduces its own part across hosts, all at once
    return min(flat, inside + _ring_or_tree_s(num_bytes / local_size, size=num_hosts, bandwidth=each, latency=latency))


def _ring_or_tree_s(num_bytes: float, *, size: int, bandwidth: float, latency: float) -> float:
    if size == 1:
        return 0.0
    tree = 2 * (math.ceil(math.log2(size)) * latency + num_bytes / bandwidth)  # up and down a double binary tree
    return min(tree, ring_all_reduce_s(num_bytes, size=size, bandwidth=bandwidth, latency=latency))
