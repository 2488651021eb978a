"""Contender: one way of training the same model on the same hosts.

Contender(name="ddp", title="Lightning DDP", make_strategy=lambda job: DDPStrategy())
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.commands.benchmark.workload import Workload
from lightning_holmes.models import GPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a contender may know: the network as it is, the processes, and what is trained."""

    topology: Topology
    processes_per_host: int
    workload: Workload

    @property
    def num_hosts(self) -> int:
        """Hosts of all clusters."""
        return sum(len(cluster.hosts) for cluster in self.topology.clusters)

    @property
    def world_size(self) -> int:
        """Processes of all hosts."""
        return self.num_hosts * self.processes_per_host


def make_gpt(job: Job) -> LightningModule:
    """The model as it is."""
    return GPT(**job.workload.model_arguments)


def everywhere(job: Job) -> str | None:
    """A contender that runs on every network."""
    return None


def shuffled(job: Job) -> list[str] | None:
    """Nodes numbered at random."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of training.

    Args:
        name: on the command line.
        title: in the table.
        make_strategy: the Trainer's strategy, made on every rank.
        make_module: the model.
        alone: each process trains by itself, on its part of the batch.
        gloo_on_ethernet: GLOO_SOCKET_IFNAME names the Ethernet card, as a careful user would set it.
        fast_everywhere: Ethernet is made as fast as the fast cards.
        node_order: the hosts in the order of their node ranks; None: at random.
        why_not: why it cannot run on this network; None: it can.
    """

    name: str
    title: str
    make_strategy: Callable[[Job], Strategy]
    make_module: Callable[[Job], LightningModule] = make_gpt
    alone: bool = False
    gloo_on_ethernet: bool = True
    fast_everywhere: bool = False
    node_order: Callable[[Job], list[str] | None] = shuffled
    why_not: Callable[[Job], str | None] = everywhere
