"""NodeLoad: what each optimizer node holds, and what comes and goes there in a step.

    load = node_load(cost_model.model, cost_model.training, replicas=4)
    load.memory_bytes                       # 16 a parameter, with AdamW in fp32

The nodes' cards are taken to be as fast as those of the workers' hosts, which share them. Not modelled: the seconds of the nodes' own
work, disks, what waits at a node to be added, a worker that speaks for its cluster; the last layers, which are there for their backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_holmes.plan.layer_cost import ModelCost
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """Of each of ``count`` optimizer nodes, a ``count``-th of all. ``memory_bytes``: or of its disk."""

    count: int
    memory_bytes: float
    received_bytes: float
    sent_bytes: float

    def describe(self) -> str:
        """In one line."""
        each = " each" if self.count > 1 else ""
        return (
            f"{self.count} optimizer node{'s' * (self.count > 1)}:{each} {self.memory_bytes / 1e9:.3g} GB of memory or disk, "
            f"{self.received_bytes / 1e9:.3g} GB in and {self.sent_bytes / 1e9:.3g} GB out a step, by cards as fast as the workers'"
        )


def node_load(model: ModelCost, training: Training, *, replicas: int) -> NodeLoad | None:
    """None where there are no nodes. ``replicas``: of each stage."""
    count = training.optimizer_nodes
    if not count:
        return None
    shared = min(model.shared_bytes, model.before.trained_bytes, model.after.trained_bytes)
    parameters, trained = model.parameter_bytes, math.fsum(place.trained_bytes for place in model.places) - shared
    gradients = trained * training.gradient_ratio
    values = parameters - trained if training.least_state_ratio else parameters  # masters are among the states
    return NodeLoad(
        count=count,
        memory_bytes=(values + gradients + trained * training.state_ratio) / count,
        received_bytes=replicas * gradients / count,
        sent_bytes=replicas * parameters * (1 if training.keeps_parameters else 2) / count,
    )


def node_bytes_per_s(network: Network, count: int) -> float:
    """What a device has of the way between its host and ``count`` nodes, one way, while all devices use it."""
    devices = [host.devices for host in network.hosts]
    if len(devices) == 1:
        return network.local_of([0]).bytes_per_s / devices[0]
    cards = [network.ethernet_bytes_per_s(host) for host in range(len(devices))]
    own = min(card / number for card, number in zip(cards, devices, strict=True))
    return min(own, count * min(cards) / sum(devices))
