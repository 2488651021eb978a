"""Contenders of the benchmark: ways of training the same model on the same hosts, in the order of the report.

contender = CONTENDERS["ddp"]
strategy = contender.make_strategy(job)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.commands.benchmark.workload import Workload
from lightning_holmes.models import GPT
from lightning_holmes.strategy import HolmesStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkJob:
    """What a contender may know: the network as it is, the processes, and what is trained."""

    topology: Topology
    processes_per_host: int
    workload: Workload

    @property
    def num_hosts(self) -> int:
        """Hosts of all clusters."""
        return len(self.topology.hosts)

    @property
    def world_size(self) -> int:
        """Processes of all hosts."""
        return self.num_hosts * self.processes_per_host


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
    make_strategy: Callable[[BenchmarkJob], Strategy]
    make_module: Callable[[BenchmarkJob], LightningModule] = lambda job: GPT(**job.workload.model_arguments)
    alone: bool = False
    gloo_on_ethernet: bool = True
    fast_everywhere: bool = False
    node_order: Callable[[BenchmarkJob], list[str] | None] = lambda job: None
    why_not: Callable[[BenchmarkJob], str | None] = lambda job: None


class Fp16DDPStrategy(DDPStrategy):
    """DDPStrategy with torch's hook that halves the bytes of an all-reduce.

    Lightning's ddp_comm_hook is passed over, without a word, on anything but CUDA (2.6, `_register_ddp_hooks`).
    """

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)


class ShardedGPT(GPT):
    """GPT with each block, and then the rest, sharded over the data-parallel axis."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)


def hosts_of_blind_stages(job: BenchmarkJob) -> list[list[str]]:
    """The hosts of each stage of a pipeline blind to network cards: stage s holds the s-th host of every cluster.

    That is where Megatron-LM's numbering puts them (pipeline ranks N/p apart) when the launcher numbers the nodes of two
    clusters in turn.
    """
    return [[host.name for host in hosts] for hosts in zip(*(c.hosts for c in job.topology.clusters), strict=True)]


def make_blind_strategy(job: BenchmarkJob) -> Strategy:
    """The stages are given as if they were clusters, of hosts without fast cards."""
    clusters = tuple(
        Cluster(name=f"stage{stage}", hosts=tuple(Host(name=name, devices=job.processes_per_host) for name in names))
        for stage, names in enumerate(hosts_of_blind_stages(job))
    )
    return HolmesStrategy(topology=Topology(clusters=clusters))


def why_not_blind(job: BenchmarkJob) -> str | None:
    """It needs clusters of one size, with two hosts or more."""
    sizes = {len(cluster.hosts) for cluster in job.topology.clusters}
    return "needs clusters of one size with two hosts or more" if len(sizes) != 1 or sizes == {1} else None


_ALL = (
    # no way of training on these hosts computes less, and none waits less
    Contender(
        name="floor",
        title="no communication (the floor)",
        make_strategy=lambda job: SingleDeviceStrategy(device="cpu"),
        alone=True,
    ),
    Contender(name="ddp", title="DDP", make_strategy=lambda job: DDPStrategy(process_group_backend="gloo")),
    Contender(
        name="ddp-fp16",
        title="DDP, fp16 gradients",
        make_strategy=lambda job: Fp16DDPStrategy(process_group_backend="gloo"),
    ),
    Contender(
        name="fsdp2",
        title="FSDP2",
        make_strategy=lambda job: ModelParallelStrategy(
            data_parallel_size=job.world_size, tensor_parallel_size=1, process_group_backend="gloo"
        ),
        make_module=lambda job: ShardedGPT(**job.workload.model_arguments),
    ),
    Contender(
        name="blind",
        title="pipeline, blind to cards",
        make_strategy=make_blind_strategy,
        node_order=lambda job: [name for names in hosts_of_blind_stages(job) for name in names],
        why_not=why_not_blind,
    ),
    Contender(name="holmes", title="Holmes", make_strategy=lambda job: HolmesStrategy(), gloo_on_ethernet=False),
    Contender(
        name="holmes-fast",
        title="Holmes, fast links everywhere",
        make_strategy=lambda job: HolmesStrategy(),
        gloo_on_ethernet=False,
        fast_everywhere=True,
    ),
)
CONTENDERS: dict[str, Contender] = {contender.name: contender for contender in _ALL}
