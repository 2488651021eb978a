"""LayoutFacts: a layout on a topology: the speed of each pipeline rank, and the bandwidth between its replicas and to its neighbours.

They depend on layout, network and devices alone, not on the model's layers; cost_model.py combines both. Transfers that use a network
card or a link between clusters at the same time share its bandwidth.

    devices = Devices(network, [find_device_type("A100-80GB")] * 2, memory_share=0.92)
    facts = devices.facts(Layout(pipeline=2), ratio=lambda first, second: 1.0, joins_ends=False)
    facts.speeds[1], facts.routes[0, 1].hops
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_holmes.plan.collective_cost import all_reduce_s, shared
from lightning_holmes.plan.device_type import DeviceType
from lightning_holmes.plan.route import LOCAL, Channel, Network
from lightning_holmes.plan.run_shape import Layout
from lightning_holmes.plan.simulator import Route


@dataclass(frozen=True, slots=True)
class Levels:
    """The two levels of a sum over clusters: inside each of them, and of the parts across."""

    inside: Channel  # of the slowest cluster
    hosts_inside: int
    num_clusters: int
    across_bytes_per_s: float  # of all rings across together


@dataclass(frozen=True, slots=True)
class StageGroup:
    """The replicas of one pipeline rank, for the cost of a reduction over them."""

    channel: Channel  # already divided by the number of groups that share the cards
    local: Channel  # inside a host
    local_size: int
    num_hosts: int
    cards: tuple[str, ...]
    across: bool = False  # whether the replicas lie in several clusters
    levels: Levels | None = None  # if they lie in several clusters, as many in each

    def all_reduce_s(self, num_bytes: float) -> float:
        """Seconds of the fastest all-reduce through all of them."""
        return all_reduce_s(
            num_bytes, local=self.local, channel=self.channel, local_size=self.local_size, num_hosts=self.num_hosts
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """Speeds, memory and routes of each pipeline rank; they depend on layout, network and devices alone."""

    speeds: tuple[float, ...]  # work/s of the slowest device of each pipeline rank
    product_s: tuple[float, ...]  # fixed seconds of each matrix product, in addition to its work
    byte_s: tuple[float, ...]  # seconds for each byte that other operators move in the device's memory
    memory: tuple[float, ...]  # bytes of the smallest device of each pipeline rank
    groups: tuple[StageGroup, ...]
    # of a tensor group: its channel, number of hosts, channel inside a host
    tensor_channels: tuple[tuple[Channel, int, Channel], ...]
    routes: dict[tuple[int, int], Route] = field(default_factory=dict)
    ends: Route | None = None  # between the first and the last pipeline rank, for gradients of parameters that both use

    def kind(self, rank: int) -> Hashable:
        """A key that is equal for pipeline ranks on which a layer costs the same."""
        return self.speeds[rank], self.product_s[rank], self.byte_s[rank], self.tensor_channels[rank]


class Devices:
    """The devices of a topology.

    Args:
        devices: the type of each host's, in the order of the network's hosts.
        memory_share: of a device's memory, that a plan may use.
    """

    def __init__(self, network: Network, devices: Sequence[DeviceType], *, memory_share: float) -> None:
        self._network = network
        self._host = np.asarray(network.host_of_device)
        self._speed = np.asarray([device.flops_per_s for device in devices])
        self._product_s = np.asarray([device.product_s for device in devices])
        self._byte_s = np.asarray([device.moved_byte_s for device in devices])
        self._memory_bytes = np.asarray([device.memory_bytes * memory_share for device in devices])

    def hosts_of(self, layout: Layout, rank: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """(data, tensor) hosts that hold a pipeline rank's stages."""
        return self._host[layout.devices_of(rank)]

    def facts(self, layout: Layout, *, ratio: Callable[[int, int], float], joins_ends: bool) -> LayoutFacts:
        """The facts of a layout on these devices.

        Args:
            ratio: the share of an activation's bytes that is sent from one host to another.
            joins_ends: whether the first and the last pipeline rank have gradients of the same parameters.
        """
        assert layout.num_devices == len(self._host), (layout, len(self._host))
        hosts = [self.hosts_of(layout, rank) for rank in range(layout.pipeline)]
        rings: Counter[int] = Counter()  # reductions that leave a host at the same time
        for own in hosts:
            for column in range(layout.tensor):
                distinct = np.unique(own[:, column])
                if len(distinct) > 1:
                    rings.update(distinct.tolist())
        channels = [self._network.group(np.unique(own[:, 0]).tolist()) for own in hosts]
        # reductions over each link between clusters
        crossing = Counter(ends for channel in channels for ends, _ in channel.links * layout.tensor)
        groups, tensors = [], []
        for own, channel in zip(hosts, channels, strict=True):
            distinct = np.unique(own[:, 0])
            cards: tuple[str, ...] = ()
            levels = None
            if len(distinct) > 1:
                sharers = max(rings[host] for host in distinct.tolist())
                rates = [shared(channel.card_bytes_per_s, sharers)]
                links = [shared(rate, crossing[ends]) for ends, rate in channel.links]
                levels = self._levels(own[:, 0].tolist(), rates[0], links, sharers)
                rates += links
                cards = tuple(f"{channel.transport} {distinct[0]} {way}" for way in ("out", "in"))
                cards += tuple(_link(way) for ends, _ in channel.links for way in (ends, ends[::-1]))
                channel = Channel(channel.transport, min(rates), channel.latency_s)
            across = len({self._network.cluster_of_host[host] for host in distinct.tolist()}) > 1
            local = self._network.local_of(distinct.tolist())
            groups.append(
                StageGroup(channel, local, -(-layout.data // len(distinct)), len(distinct), cards, across, levels)
            )
            together = max((np.unique(row).tolist() for row in own), key=len) if layout.tensor > 1 else [int(own[0, 0])]
            tensors.append((self._network.group(together), len(together), self._network.local_of(together)))
        routes = {}
        if layout.pipeline > 1:
            for rank in range(layout.pipeline):
                following = (rank + 1) % layout.pipeline
                for pair in ((rank, following), (following, rank)):
                    routes[pair] = self._route(layout, *pair, ratio=ratio)
        return LayoutFacts(
            speeds=tuple(float(self._speed[own].min()) for own in hosts),
            product_s=tuple(float(self._product_s[own].max()) for own in hosts),
            byte_s=tuple(float(self._byte_s[own].max()) for own in hosts),
            memory=tuple(float(self._memory_bytes[own].min()) for own in hosts),
            groups=tuple(groups),
            tensor_channels=tuple(tensors),
            routes=routes,
            ends=self._route(layout, 0, layout.pipeline - 1) if joins_ends else None,
        )

    def _levels(self, hosts: Sequence[int], card: float, links: Sequence[float], sharers: int) -> Levels | None:
        """The levels of a sum over the replicas on these hosts; ``card``, ``links``: bytes/s of a ring through all of them.

        None unless several clusters have as many replicas, two or more, on as many hosts.
        """
        members: dict[int, list[int]] = {}
        for host in hosts:
            members.setdefault(self._network.cluster_of_host[host], []).append(host)
        kinds = {(len(own), len(set(own))) for own in members.values()}
        if len(members) == 1 or len(kinds) > 1 or len(hosts) == len(members):
            return None
        ((_, hosts_inside),) = kinds
        channels = [self._network.group(sorted(set(own))) for own in members.values()]
        slowest = min(channels, key=lambda channel: channel.bytes_per_s)
        inside = Channel(slowest.transport, shared(slowest.bytes_per_s, sharers), slowest.latency_s)
        return Levels(inside, hosts_inside, len(members), min([card * hosts_inside, *links]))

    def _route(
        self, layout: Layout, source: int, target: int, ratio: Callable[[int, int], float] = lambda first, second: 1.0
    ) -> Route:
        """The slowest of the replicas' routes from one pipeline rank to another; ``ratio``: bytes sent for each byte."""
        first = self.hosts_of(layout, source).ravel()
        second = self.hosts_of(layout, target).ravel()
        away = first != second
        leaving, coming = np.bincount(first[away]), np.bincount(second[away])
        cluster = self._network.cluster_of_host
        pairs = list(zip(first.tolist(), second.tolist(), strict=True))
        crossing = Counter((cluster[one], cluster[other]) for one, other in pairs if cluster[one] != cluster[other])
        worst: tuple[float, Route] | None = None
        for one, other in sorted(set(pairs)):
            channel = self._network.between_hosts(one, other)
            if channel.transport == LOCAL:
                # inside a host every device has its own full bandwidth
                slowest = 1 / channel.bytes_per_s
                route = Route(channel.latency_s, ((f"local {source}>{target}", slowest),))
            else:
                sent = ratio(one, other)
                byte_s, way = sent / channel.card_bytes_per_s, (cluster[one], cluster[other])
                cards = [
                    (f"{channel.transport} {one} out", leaving[one] * byte_s),
                    (f"{channel.transport} {other} in", coming[other] * byte_s),
                    *((_link(way), crossing[way] * sent / rate) for _, rate in channel.links),
                ]
                slowest = max(seconds for _, seconds in cards)
                route = Route(channel.latency_s, tuple(cards), carried=sent)
            if worst is None or slowest > worst[0]:
                worst = slowest, route
        assert worst is not None
        return worst[1]


def _link(way: tuple[int, int]) -> str:
    """The card name under which the simulator counts the link between two clusters, which all replicas share."""
    return f"link {way[0]}>{way[1]}"
