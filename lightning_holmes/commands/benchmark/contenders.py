"""Contenders of the benchmark: ways of training the same model on the same hosts, in the order of the report.

contender = CONTENDERS["ddp"]
strategy = contender.make_strategy(job)
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.commands.benchmark.workload import Workload
from lightning_holmes.models import GPT
from lightning_holmes.strategy import HolmesStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkJob:
    """The input of a contender: the topology, the processes, and the workload."""

    topology: Topology
    processes_per_host: int
    workload: Workload

    @property
    def num_hosts(self) -> int:
        """The number of hosts of all clusters."""
        return len(self.topology.hosts)

    @property
    def world_size(self) -> int:
        """The number of processes of all hosts."""
        return self.num_hosts * self.processes_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of training.

    Args:
        name: on the command line.
        title: in the table.
        make_strategy: the Trainer's strategy, made on every rank.
        make_module: the model.
        accumulates: microbatches are batches of a gradient accumulation window; otherwise the strategy splits a batch.
        alone: each process trains independently, on its part of the batch.
        gloo_on_ethernet: GLOO_SOCKET_IFNAME is set to the Ethernet card, as a careful user would do.
        fast_everywhere: Ethernet is as fast as the RDMA cards.
        optimizer_nodes: number of additional hosts that hold parameters and optimizer states.
        carried: (sent, received): how many times the bytes of all parameters each process sends to, and receives from, an additional
            host in a step, over bare sockets and without an optimizer node.
        exchanged: how many times the bytes of all parameters, without the process's own share, each process sends to the next process
            in a step, over bare sockets.
        node_order: the hosts in the order of their node ranks; None: random.
        env: environment variables of its processes, in addition to those of all contenders.
        why_not: returns why it cannot run on this network; None: it can.
    """

    name: str
    title: str
    make_strategy: Callable[[BenchmarkJob], Strategy]
    make_module: Callable[[BenchmarkJob], LightningModule] = lambda job: GPT(**job.workload.model_arguments)
    accumulates: bool = True
    alone: bool = False
    gloo_on_ethernet: bool = True
    fast_everywhere: bool = False
    optimizer_nodes: int = 0
    carried: tuple[int, int] = (0, 0)
    exchanged: int = 0
    node_order: Callable[[BenchmarkJob], list[str] | None] = lambda job: None
    env: Mapping[str, str] = field(default_factory=dict)
    why_not: Callable[[BenchmarkJob], str | None] = lambda job: None


class Fp16DDPStrategy(DDPStrategy):
    """DDPStrategy with torch's fp16_compress_hook, which halves the bytes of an all-reduce.

    Lightning silently ignores ddp_comm_hook on any device other than CUDA (2.6, `_register_ddp_hooks`).
    """

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeedStrategy on CPUs.

    Lightning's strategy refuses any accelerator other than CUDA (2.6, `setup_environment`) and needs devices with an index. DeepSpeed
    itself runs on CPUs, over gloo, for which torch has a single device.
    """

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        assert self.parallel_devices is not None
        self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
        super(DeepSpeedStrategy, self).setup_environment()  # skip the check of the accelerator


class ShardedGPT(GPT):
    """GPT with each block, and the remaining parameters, sharded over the data-parallel axis by FSDP2."""

    syncs_each_microbatch = True
    reshards = True

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshards)
        fully_shard(self, mesh=mesh)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        accumulated = self.trainer.accumulate_grad_batches
        last = (batch_idx + 1) % accumulated == 0
        made: Any = self  # fully_shard has made it an FSDPModule
        if not self.syncs_each_microbatch:
            made.set_requires_gradient_sync(last)
        if not self.reshards:
            made.set_reshard_after_backward(last)


class UnsyncedGPT(ShardedGPT):
    """ShardedGPT whose gradients are reduced after the last microbatch only, and unsharded until then."""

    syncs_each_microbatch = False


class KeptGPT(UnsyncedGPT):
    """UnsyncedGPT whose parameters also stay unsharded from the first microbatch to the last."""

    reshards = False


def make_fsdp2(job: BenchmarkJob) -> Strategy:
    """Lightning's strategy for FSDP2, over all processes."""
    return ModelParallelStrategy(
        data_parallel_size=job.world_size, tensor_parallel_size=1, process_group_backend="gloo"
    )


def make_deepspeed(job: BenchmarkJob) -> Strategy:
    """DeepSpeed's ZeRO-3 with its defaults."""
    return CPUDeepSpeedStrategy(stage=3, process_group_backend="gloo")


def why_not_deepspeed(job: BenchmarkJob) -> str | None:
    """DeepSpeed must be installed separately: it is not a dependency of this package."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install -c constraints.txt deepspeed)"
    return None


def make_layered(gradient_sync: str = "auto") -> Callable[[BenchmarkJob], Strategy]:
    """Layered gradient accumulation over all processes, with sharded parameters."""
    return lambda job: HolmesStrategy(
        pipeline_parallel_size=1,
        sharded_parameters=True,
        num_microbatches=job.workload.microbatches,
        gradient_sync=gradient_sync,
    )


def make_with_nodes(
    count: int = 1, *, keeps: bool = False, gradient_sync: str = "auto"
) -> Callable[[BenchmarkJob], Strategy]:
    """Layered gradient accumulation over all processes, with parameters and optimizer states on optimizer nodes."""
    return lambda job: HolmesStrategy(
        pipeline_parallel_size=1,
        optimizer_nodes=count,
        keep_parameters=keeps,
        num_microbatches=job.workload.microbatches,
        gradient_sync=gradient_sync,
    )


def make_staged_with_nodes(job: BenchmarkJob) -> Strategy:
    """Stages alternate between the clusters, with an optimizer node in each. Three stages per rank if there are enough layers: with one,
    a rank would wait for the other's whole share of the layers at the beginning of each step."""
    clusters = len(job.topology.clusters)
    return HolmesStrategy(
        pipeline_parallel_size=clusters,
        num_chunks=max(1, min(3, job.workload.num_layers // clusters)),
        partition="uniform",
        optimizer_nodes=clusters,
        num_microbatches=max(clusters, job.workload.microbatches),
    )


def why_not_staged(job: BenchmarkJob) -> str | None:
    """The staged contender needs two clusters, with an optimizer node for each."""
    return None if len(job.topology.clusters) == 2 else "needs two clusters"


def why_not_exchanged(job: BenchmarkJob) -> str | None:
    """Exchanging contenders need one process per host: several would listen on the same port."""
    return None if job.processes_per_host == 1 else "needs one process a host"


def in_order(job: BenchmarkJob) -> list[str]:
    """The hosts in topology order, with rank 0 on the first host, whose address optimizer nodes are given."""
    return [host.name for host in job.topology.hosts]


def make_breadth_first(job: BenchmarkJob) -> Strategy:
    """A breadth-first pipeline of all processes, with one layer per stage if the number of layers is divisible by the world size."""
    return HolmesStrategy(
        pipeline_parallel_size=job.world_size,
        schedule="breadth_first",
        num_chunks=max(1, job.workload.num_layers // job.world_size),
        num_microbatches=max(job.world_size, job.workload.microbatches),
        partition="uniform",
    )


def make_pipeline_with_zero1(job: BenchmarkJob) -> Strategy:
    """Two stages with 1F1B and, if there are replicas, a sharded optimizer."""
    return HolmesStrategy(
        pipeline_parallel_size=2,
        schedule="1f1b",
        num_microbatches=max(2, job.workload.microbatches),
        sharded_optimizer=job.world_size > 2,
    )


def hosts_of_blind_stages(job: BenchmarkJob) -> list[list[str]]:
    """The hosts of each stage of a pipeline that ignores network cards: stage s is on the s-th host of every cluster.

    Megatron-LM's numbering (pipeline ranks N/p apart) places stages like this if the launcher numbers the nodes of two
    clusters alternately.
    """
    return [[host.name for host in hosts] for hosts in zip(*(c.hosts for c in job.topology.clusters), strict=True)]


def make_blind_strategy(job: BenchmarkJob) -> Strategy:
    """A strategy whose topology has a cluster for each of these stages, of hosts without network cards."""
    clusters = tuple(
        Cluster(name=f"stage{stage}", hosts=tuple(Host(name=name, devices=job.processes_per_host) for name in names))
        for stage, names in enumerate(hosts_of_blind_stages(job))
    )
    return HolmesStrategy(topology=Topology(clusters=clusters))


def why_not_blind(job: BenchmarkJob) -> str | None:
    """The blind contender needs clusters of equal size, with two hosts or more."""
    sizes = {len(cluster.hosts) for cluster in job.topology.clusters}
    return "needs clusters of one size with two hosts or more" if len(sizes) != 1 or sizes == {1} else None


_holmes = functools.partial(Contender, accumulates=False, gloo_on_ethernet=False)
"""A Holmes contender: the strategy splits a batch and finds network cards itself."""
_with_nodes = functools.partial(_holmes, node_order=in_order)
"""A Holmes contender with optimizer nodes."""
_BESIDE = "no communication, beside bare sockets that carry"
_bare_sockets = functools.partial(
    Contender,
    make_strategy=lambda job: SingleDeviceStrategy(device="cpu"),
    alone=True,
    node_order=in_order,
)
"""A control: each process trains independently while bytes are transferred over bare sockets."""

_ALL = (
    # the lower bound: no way of training on these hosts computes or waits less
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
        make_strategy=make_fsdp2,
        make_module=lambda job: ShardedGPT(**job.workload.model_arguments),
    ),
    Contender(
        name="fsdp2-no-sync",
        title="FSDP2, reduced after the last microbatch",
        make_strategy=make_fsdp2,
        make_module=lambda job: UnsyncedGPT(**job.workload.model_arguments),
    ),
    Contender(
        name="fsdp2-kept",
        title="FSDP2, likewise, and all kept whole meanwhile",
        make_strategy=make_fsdp2,
        make_module=lambda job: KeptGPT(**job.workload.model_arguments),
    ),
    Contender(
        name="deepspeed",
        title="DeepSpeed ZeRO-3",
        make_strategy=make_deepspeed,
        env={"DS_ACCELERATOR": "cpu"},  # otherwise it uses a GPU if there is one
        why_not=why_not_deepspeed,
    ),
    _holmes(
        name="layered",
        title="Holmes, layered, parameters in shards",
        make_strategy=make_layered(),
    ),
    _holmes(
        name="layered-reduce-scatter",
        title="Holmes, layered, by gloo's reduce-scatter",
        make_strategy=make_layered("reduce_scatter"),
    ),
    _holmes(
        name="layered-p2p",
        title="Holmes, layered, by messages",
        make_strategy=make_layered("p2p"),
    ),
    _holmes(
        name="layered-whole",
        title="Holmes, layered, ZeRO-1, parameters whole",
        make_strategy=lambda job: HolmesStrategy(
            pipeline_parallel_size=1,
            schedule="breadth_first",
            sharded_optimizer=job.world_size > 1,
            num_microbatches=job.workload.microbatches,
        ),
    ),
    _holmes(
        name="breadth-first",
        title="Holmes, breadth-first pipeline of all hosts, bubble (P-1)/(M V)",
        make_strategy=make_breadth_first,
    ),
    _with_nodes(
        name="optimizer-node",
        title="Holmes, an optimizer node",
        make_strategy=make_with_nodes(),
        optimizer_nodes=1,
    ),
    _with_nodes(
        name="optimizer-node-kept",
        title="Holmes, an optimizer node, parameters kept to the backward",
        make_strategy=make_with_nodes(keeps=True),
        optimizer_nodes=1,
    ),
    *(
        _with_nodes(
            name=f"optimizer-node-{route}",
            title=f"Holmes, an optimizer node, {said}",
            make_strategy=make_with_nodes(gradient_sync=route),
            optimizer_nodes=1,
        )
        for route, said in (("star", "each worker for itself"), ("aggregator", "a worker for each cluster"))
    ),
    *(
        _with_nodes(
            name=f"optimizer-nodes-{count}",
            title=f"Holmes, {count} optimizer nodes",
            make_strategy=make_with_nodes(count),
            optimizer_nodes=count,
        )
        for count in (2, 4)
    ),
    _with_nodes(
        name="optimizer-nodes-staged",
        title="Holmes, a stage and an optimizer node in each cluster",
        make_strategy=make_staged_with_nodes,
        optimizer_nodes=2,
        why_not=why_not_staged,
    ),
    _bare_sockets(name="sockets", title=f"{_BESIDE} P out and 2 P in", carried=(1, 2)),
    _bare_sockets(name="sockets-kept", title=f"{_BESIDE} P out and P in", carried=(1, 1)),
    _bare_sockets(
        name="sockets-layered",
        title=f"{_BESIDE} 3 P (D-1)/D to the next process",
        exchanged=3,
        why_not=why_not_exchanged,
    ),
    _bare_sockets(
        name="sockets-once",
        title=f"{_BESIDE} P (D-1)/D to the next process",
        exchanged=1,
        why_not=why_not_exchanged,
    ),
    _holmes(
        name="zero1",
        title="Holmes, two stages, 1F1B with ZeRO-1",
        make_strategy=make_pipeline_with_zero1,
    ),
    Contender(
        name="blind",
        title="pipeline, blind to cards",
        make_strategy=make_blind_strategy,
        node_order=lambda job: [name for names in hosts_of_blind_stages(job) for name in names],
        why_not=why_not_blind,
    ),
    _holmes(
        name="holmes",
        title="Holmes",
        make_strategy=lambda job: HolmesStrategy(),
    ),
    _holmes(
        name="holmes-depth-first",
        title="Holmes, interleaved 1F1B",
        make_strategy=lambda job: HolmesStrategy(schedule="eager_interleaved_1f1b"),
    ),
    _holmes(
        name="holmes-fast",
        title="Holmes, fast links everywhere",
        make_strategy=lambda job: HolmesStrategy(),
        fast_everywhere=True,
    ),
)
CONTENDERS: dict[str, Contender] = {contender.name: contender for contender in _ALL}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkCase:
    """A comparison: its contenders, and the defaults of the command line for network and training.

    Attributes:
        hosts: number of hosts of each cluster.
        ethernet: the rate between clusters.
        fast: the rate inside clusters.
        node_rate: the rate of an optimizer node.
        node_clusters: the indices of the clusters that each have one of the hosts for optimizer nodes, with the same cards as the
            cluster's other hosts; (): these hosts are in no cluster, and have Ethernet only.
        cpu_share, node_cpu_share: cores of each host, and of each optimizer node; None: as many as a host.
    """

    contenders: tuple[str, ...]
    hosts: tuple[int, ...] = (2, 2)
    ethernet: str = "100mbit"
    fast: str = "1gbit"
    node_rate: str = "1gbit"
    node_clusters: tuple[int, ...] = ()
    microbatches: int = 1
    cpu_share: float = 0.45
    node_cpu_share: float | None = None


CASES = {
    "clusters": BenchmarkCase(contenders=("floor", "ddp", "ddp-fp16", "fsdp2", "blind", "holmes", "holmes-fast")),
    "layered": BenchmarkCase(
        contenders=("floor", "ddp", "fsdp2", "fsdp2-no-sync", "fsdp2-kept", "layered", "sockets-layered", "zero1"),
        hosts=(4,),
        ethernet="1gbit",
        microbatches=4,
    ),
    **{
        f"ethernet-{rate}": BenchmarkCase(
            contenders=("floor", "ddp", "fsdp2", "fsdp2-no-sync", "layered", "layered-whole", "zero1"),
            hosts=(4,),
            ethernet=rate,
            fast=rate,
            microbatches=4,
        )
        for rate in ("1gbit", "250mbit")
    },
    "reductions": BenchmarkCase(
        contenders=("floor", "layered-reduce-scatter", "layered-p2p"), hosts=(4,), ethernet="1gbit", microbatches=4
    ),
    "optimizer-node": BenchmarkCase(
        contenders=(
            *("floor", "ddp", "fsdp2", "fsdp2-no-sync", "deepspeed", "layered", "optimizer-node"),
            *("optimizer-node-kept", "sockets", "sockets-kept"),
        ),
        hosts=(4,),
        ethernet="1gbit",
        node_rate="4gbit",
        microbatches=4,
        cpu_share=0.36,
    ),
    # the optimizer nodes' links are the bottleneck
    "optimizer-node-count": BenchmarkCase(
        contenders=("floor", "optimizer-node", "optimizer-nodes-2", "optimizer-nodes-4"),
        hosts=(4,),
        ethernet="1gbit",
        node_rate="100mbit",
        microbatches=4,
        cpu_share=0.3,
        node_cpu_share=0.15,
    ),
    "optimizer-node-clusters": BenchmarkCase(
        contenders=(
            *("floor", "ddp", "holmes", "optimizer-nodes-staged"),
            *("optimizer-node-star", "optimizer-node-aggregator"),
        ),
        node_rate="100mbit",
        node_clusters=(0, 1),
        microbatches=4,
        cpu_share=0.3,
    ),
    # how much a network that processors carry slows computation, and what breadth-first order among the candidates of "auto" gains
    "limits": BenchmarkCase(contenders=("floor", "sockets-once", "holmes", "holmes-depth-first")),
    "breadth-first": BenchmarkCase(
        contenders=("floor", "breadth-first", "zero1"), hosts=(4,), ethernet="1gbit", microbatches=4
    ),
}
