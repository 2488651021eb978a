"""NodeLoad: the bytes that each optimizer node holds, and those it receives and sends in a step.

    load = node_load(cost_model.model, cost_model.training, replicas=4)
    load.memory_bytes                       # 16 bytes a parameter, with AdamW in fp32

The nodes' network cards are assumed to be as fast as those of the workers' hosts, and the workers share them. Not modelled: the nodes'
own work, disks, gradients that wait at a node to be added, sums inside a cluster of workers, and that
the last layers are not received again for their backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_holmes.plan.layer_cost import ModelCost
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """The load of each of ``count`` optimizer nodes, which share everything evenly. ``memory_bytes``: of its memory or its disk."""

    count: int
    memory_bytes: float
    received_bytes: float
    sent_bytes: float

    def describe(self) -> str:
        """The load in one line."""
        each = " each" if self.count > 1 else ""
        return (
            f"{self.count} optimizer node{'s' * (self.count > 1)}:{each} {self.memory_bytes / 1e9:.3g} GB of memory or disk, "
            f"{self.received_bytes / 1e9:.3g} GB in and {self.sent_bytes / 1e9:.3g} GB out a step, by cards as fast as the workers'"
        )


def node_load(model: ModelCost, training: Training, *, replicas: int) -> NodeLoad | None:
    """Return the load of each optimizer node; None without optimizer nodes. ``replicas``: of each stage."""
    count = training.optimizer_nodes
    if not count:
        return None
    shared = min(model.shared_bytes, model.before.trained_bytes, model.after.trained_bytes)
    parameters, trained = model.parameter_bytes, math.fsum(place.trained_bytes for place in model.places) - shared
    gradients = trained * training.gradient_ratio
    # master weights are counted in the states
    values = parameters - trained if training.least_state_ratio else parameters
    return NodeLoad(
        count=count,
        memory_bytes=(values + gradients + trained * training.state_ratio) / count,
        received_bytes=replicas * gradients / count,
        sent_bytes=replicas * parameters * 2 / count,
    )


def node_bytes_per_s(network: Network, count: int) -> float:
    """Bytes/s, one way, between a device and ``count`` optimizer nodes while all devices transfer."""
    devices = [host.devices for host in network.hosts]
    if len(devices) == 1:
        return network.local_of([0]).bytes_per_s / devices[0]
    cards = [network.ethernet_bytes_per_s(host) for host in range(len(devices))]
    own = min(card / number for card, number in zip(cards, devices, strict=True))
    return min(own, count * min(cards) / sum(devices))
