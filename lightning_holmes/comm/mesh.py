"""The process groups of a placement: replicas, tensor groups, pipelines, and one group for each ordered pair of pipeline ranks that sends tensors.

Every rank must build them, in the same order.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_holmes.comm.collectives import SyncGroups
from lightning_holmes.comm.gloo import GLOO, GlooDevices
from lightning_holmes.comm.group_transports import GroupTransports
from lightning_holmes.comm.lost import is_lost
from lightning_holmes.comm.p2p import DistributedP2P
from lightning_holmes.errors import UnreachableError
from lightning_holmes.plan.placement import Placement, cluster_levels
from lightning_holmes.plan.schedule import spec_of
from lightning_holmes.torch_private import nccl_options

_single: tuple[dist.ProcessGroup | None, dist.ProcessGroup] | None = None
"""WORLD, and the group of this rank alone that was made in it; None before the first :meth:`GroupBuilder.build_single`."""


class GroupBuilder:
    """Creates process groups, and uses each one once when it is made.

    Every rank of WORLD must create the same groups in the same order, whether or not it is a member: with
    use_local_synchronization torch names a group by the number of groups that a rank has, which differs between ranks,
    and the members would wait for each other for ever.

    Args:
        rank: this global rank.
        backend: "gloo" or "nccl", for tensors.
        device: where tensors live.
        timeout: the groups' timeout.
        transports: chooses the network card of each group; None: the libraries choose.
    """

    def __init__(
        self,
        *,
        rank: int,
        backend: str,
        device: torch.device,
        timeout: timedelta | None,
        transports: GroupTransports | None = None,
    ) -> None:
        self.rank = rank
        self.backend = backend
        self.device = device
        self.timeout = timeout
        self.owned: list[dist.ProcessGroup] = []
        self._on_host: set[str] = set()
        self._gloo = GlooDevices()
        self.transports = transports or GroupTransports(None, rank=rank, backend=backend)

    def build(
        self, ranks: Sequence[int], name: str, *, on_host: bool = False, connects: bool = True
    ) -> dist.ProcessGroup | None:
        """Create the group of ``ranks``; None on ranks outside it and for a single rank.

        ``on_host``: use gloo, whatever the backend of tensors is. The first collective runs here, in one global order:
        two NCCL communicators first used in different orders on two ranks would wait for each other. With ``connects``
        false the caller connects the group.
        """
        if len(ranks) < 2:
            return None
        is_gloo = on_host or self.backend == "gloo"
        created = self._create(ranks, name, on_host=on_host)
        if self.rank not in ranks:
            return None
        self.owned.append(created)
        if on_host:
            self._on_host.add(name)
        if not connects:
            return created
        with self._naming_first_use(created, name):
            dist.all_reduce(torch.zeros(1, device=torch.device("cpu") if is_gloo else self.device), group=created)
        return created

    @contextlib.contextmanager
    def _naming_first_use(self, group: dist.ProcessGroup, name: str) -> Iterator[None]:
        """Raise UnreachableError with the group's name if the group cannot connect: NCCL connects at the first use, and
        its message names the address and port of an unreachable rank if it has them."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost(error):
                raise
            said = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
            raise UnreachableError(
                f"{self.describe(group)} cannot be connected. The library says: {said}. If a firewall lies between the "
                f"hosts, open the ports that sysctl net.ipv4.ip_local_port_range shows; `lightning-holmes topology` under torchrun tries every connection"
            ) from error

    def build_single(self) -> dist.ProcessGroup:
        """The group of this rank alone, which a DeviceMesh needs for an axis of size 1. Every rank of WORLD must call.
        The group is made once for each WORLD and never released (see `keep`)."""
        global _single
        if _single is None or _single[0] is not dist.group.WORLD:
            ranks = range(dist.get_world_size())
            made = [self._create((rank,), f"holmes_single_{rank}", on_host=False) for rank in ranks]
            _single = dist.group.WORLD, made[self.rank]
        return _single[1]

    def describe(self, group: dist.ProcessGroup | None) -> str:
        """Describe a group for messages: its name, its transport, and its members with their hosts and cards."""
        if group is None:
            everyone = self.transports.ends(range(dist.get_world_size()), on_host=True)
            return f"the group of all ranks ({dist.get_backend()}{everyone and '; ' + everyone})"
        ranks = dist.get_process_group_ranks(group)
        on_host = group.group_desc in self._on_host
        transport = "gloo" if on_host else self.transports.describe(ranks)[0]
        ends = self.transports.ends(ranks, on_host=on_host) or f"ranks {', '.join(map(str, ranks))}"
        return f"the group {group.group_desc} ({transport}; {ends})"

    def fast_cards(self) -> dict[str, str]:
        """By the interface of each RDMA card that this rank's groups use, the message for when the card goes down."""
        users: dict[tuple[str, str], list[dist.ProcessGroup]] = {}
        for group in self.owned:
            for card in self.transports.fast_cards(dist.get_process_group_ranks(group)):
                if group.group_desc not in self._on_host:
                    users.setdefault(card, []).append(group)
        return {
            interface: f"{card} went down, which {self.describe(groups[0])}"
            f"{f' and {len(groups) - 1} more groups use' if len(groups) > 1 else ' uses'}"
            for (interface, card), groups in users.items()
        }

    def keep(self, group: dist.ProcessGroup | None) -> None:
        """Never release ``group``, which DTensors use: torch's sharding cache (2.13) gives the results of operators on
        a later, equal DeviceMesh the mesh, and so the groups, of the first one."""
        if group is not None and group in self.owned:
            self.owned.remove(group)

    def _create(self, ranks: Sequence[int], name: str, *, on_host: bool) -> dist.ProcessGroup:
        options: Any = None
        if on_host or self.backend == "gloo":
            backend = GLOO
            if self.rank in ranks:
                transports = self.transports
                interface = transports.host_interface() if on_host else transports.interface(ranks)
                options = self._gloo.on(interface, transports.ends(ranks, on_host=on_host))
        else:
            backend = self.backend
            net_name = self.transports.net_name(ranks) if self.rank in ranks else None
            options = None if net_name is None else nccl_options(net_name)
        created: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=self.timeout, backend=backend, pg_options=options, group_desc=name
        )
        return created

    def build_p2p(self, source: int, destination: int, name: str) -> dist.ProcessGroup | None:
        """Create the group over which global rank ``source`` sends tensors to ``destination``; None on other ranks.

        One transfer runs here, and no collective: NCCL makes a communicator for transfers between two ranks, and another for collectives.
        """
        made = self.build((source, destination), name, connects=False)
        if made is not None:
            number = torch.zeros(1, device=torch.device("cpu") if self.backend == "gloo" else self.device)
            with self._naming_first_use(made, name):
                if self.rank == source:
                    dist.send(number, destination, group=made)
                else:
                    dist.recv(number, source, group=made)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """The process groups of one rank; None where a group would have one member. ``builder`` makes further groups.

    ``gradients``: the groups that sum gradients while ``data_parallel`` carries other collectives.
    ``tensor_p2p``: messages between the ranks of a tensor group; it carries no tensors.
    """

    pipeline_rank: int
    data_parallel_rank: int
    pipeline: dist.ProcessGroup | None
    data_parallel: dist.ProcessGroup | None
    p2p: DistributedP2P | None
    builder: GroupBuilder
    tensor_parallel_rank: int = 0
    tensor_parallel: dist.ProcessGroup | None = None
    tensor_p2p: DistributedP2P | None = None
    gradients: SyncGroups | None = None
    everyone_on_host: dist.ProcessGroup | None = None
    """The gloo group of all ranks if WORLD has another backend; None: WORLD itself is a gloo group."""

    @property
    def replicas_on_host(self) -> dist.ProcessGroup | None:
        """The gloo group of the ranks of ``data_parallel``, for the thread that runs the step."""
        if self.data_parallel is None or self.builder.backend == "gloo":
            return self.data_parallel
        return None if self.gradients is None else self.gradients.host


def release(owned: list[dist.ProcessGroup]) -> None:
    """Destroy groups, which ends their threads, and clear the list."""
    if dist.is_initialized():
        for group in owned:
            with contextlib.suppress(ValueError, RuntimeError):  # already destroyed with WORLD
                dist.destroy_process_group(group)
    owned.clear()


def build_process_groups(
    placement: Placement,
    builder: GroupBuilder,
    *,
    pairs: Iterable[tuple[int, int]],
    clusters: Sequence[str] | None = None,
    sent_dtype: torch.dtype | None = None,
) -> ProcessGroups:
    """Create and warm up the process groups of a rank. Every rank of WORLD must call, with the same arguments.

    ``pairs``: ordered pairs (source, destination) of pipeline ranks that send tensors. ``clusters``: the cluster of
    each rank; None: all ranks are in one. ``sent_dtype``: the dtype in which wider tensors between stages are
    sent across clusters; None: their own.
    """
    pipeline_rank, data_parallel_rank, tensor_parallel_rank = placement.coordinate(builder.rank)
    data_parallel = gradients = None
    for stage_rank, part in _product(placement.pipeline_parallel_size, placement.tensor_parallel_size):
        ranks = placement.data_parallel_group(stage_rank, part)
        made = builder.build(ranks, f"holmes_data_parallel_{stage_rank}_{part}")
        summed = _build_sync_groups(ranks, builder, f"{stage_rank}_{part}", data_parallel=made, clusters=clusters)
        data_parallel, gradients = made or data_parallel, summed or gradients
    tensor_parallel = tensor_messages = None
    for stage_rank, replica in _product(placement.pipeline_parallel_size, placement.data_parallel_size):
        ranks = placement.tensor_parallel_group(stage_rank, replica)
        name = f"{stage_rank}_{replica}"
        tensor_parallel = builder.build(ranks, f"holmes_tensor_parallel_{name}") or tensor_parallel
        builder.keep(tensor_parallel)
        tensor_messages = builder.build(ranks, f"holmes_tensor_messages_{name}", on_host=True) or tensor_messages
    pipeline = messages = None
    outgoing: dict[int, dist.ProcessGroup] = {}
    incoming: dict[int, dist.ProcessGroup] = {}
    for data, part in _product(placement.data_parallel_size, placement.tensor_parallel_size):
        ranks = placement.pipeline_group(data, part)
        name = f"{data}_{part}"
        pipeline = builder.build(ranks, f"holmes_pipeline_{name}") or pipeline
        messages = builder.build(ranks, f"holmes_messages_{name}", on_host=True) or messages
        for source, destination in sorted(set(pairs)):
            name_of_pair = f"holmes_p2p_{name}_{source}_{destination}"
            made = builder.build_p2p(ranks[source], ranks[destination], name_of_pair)
            if made is not None and ranks[source] == builder.rank:
                outgoing[destination] = made
            elif made is not None:
                incoming[source] = made
    p2p = None
    if messages is not None:
        own = placement.pipeline_group(data_parallel_rank, tensor_parallel_rank)
        p2p = DistributedP2P(
            own,
            pipeline_rank,
            outgoing=outgoing,
            incoming=incoming,
            messages=messages,
            everyone=None if builder.backend == "gloo" else pipeline,
            device=builder.device,
            narrowed={
                peer: sent_dtype
                for peer, rank in enumerate(own)
                if sent_dtype is not None and clusters is not None and clusters[rank] != clusters[builder.rank]
            },
            describe=builder.describe,
        )
    everyone = None
    if builder.backend != "gloo":
        everyone = builder.build(range(placement.world_size), "holmes_everyone_on_host", on_host=True)
    tensor_p2p = None
    if tensor_messages is not None:
        tensor_p2p = DistributedP2P(
            placement.tensor_parallel_group(pipeline_rank, data_parallel_rank),
            tensor_parallel_rank,
            outgoing={},
            incoming={},
            messages=tensor_messages,
            device=builder.device,
            describe=builder.describe,
        )
    return ProcessGroups(
        pipeline_rank=pipeline_rank,
        data_parallel_rank=data_parallel_rank,
        pipeline=pipeline,
        data_parallel=data_parallel,
        p2p=p2p,
        builder=builder,
        tensor_parallel_rank=tensor_parallel_rank,
        tensor_parallel=tensor_parallel,
        tensor_p2p=tensor_p2p,
        gradients=gradients,
        everyone_on_host=everyone,
    )


def _build_sync_groups(
    ranks: Sequence[int],
    builder: GroupBuilder,
    name: str,
    *,
    data_parallel: dist.ProcessGroup | None,
    clusters: Sequence[str] | None,
) -> SyncGroups | None:
    """Create the groups that sum the gradients of ``ranks``; None on other ranks and for a single rank.

    With gloo a separate thread sums gradients, so they have their own group: two threads would mix up the order of
    collectives in one group. With NCCL they share ``data_parallel``: a communicator takes device memory, and streams
    keep order.
    """
    if len(ranks) < 2:
        return None
    by_gloo = builder.backend == "gloo"
    whole = builder.build(ranks, f"holmes_gradients_{name}") if by_gloo else data_parallel
    host = whole if by_gloo else builder.build(ranks, f"holmes_replicas_on_host_{name}", on_host=True)
    places = ["" for _ in range(max(ranks) + 1)] if clusters is None else clusters
    inside = across = None
    in_clusters, over_clusters = cluster_levels(ranks, places)
    for number, members in enumerate(in_clusters):
        inside = builder.build(members, f"holmes_gradients_{name}_inside_{number}") or inside
    for number, members in enumerate(over_clusters):
        across = builder.build(members, f"holmes_gradients_{name}_across_{number}") or across
    if whole is None or host is None:
        return None
    crosses = len({places[rank] for rank in ranks}) > 1
    return SyncGroups(
        whole=whole,
        host=host,
        ranks=tuple(ranks),
        crosses=crosses,
        inside=inside,
        across=across,
        describe=builder.describe,
    )


def _product(first: int, second: int) -> list[tuple[int, int]]:
    return list(itertools.product(range(first), range(second)))


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """The groups of pipeline ranks that hold the same parameters: one for tensors, and a gloo group for values on the host."""

    tensors: dist.ProcessGroup
    host: dist.ProcessGroup


def join_shared(
    groups: ProcessGroups, placement: Placement, shared: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], SharedGroup]:
    """Create the groups of each set of pipeline ranks that hold the same parameters; return those that this rank is in.

    Every rank of WORLD must call with the same ``shared``. A set of all pipeline ranks uses the pipeline's own group.
    """
    joined: dict[tuple[int, ...], SharedGroup] = {}
    builder = groups.builder
    for replica, part in _product(placement.data_parallel_size, placement.tensor_parallel_size):
        ranks = placement.pipeline_group(replica, part)
        for members in sorted(set(shared)):
            name = f"{replica}_{part}_{'_'.join(map(str, members))}"
            own = [ranks[m] for m in members]
            if len(members) == len(ranks):
                group = groups.pipeline if builder.rank in ranks else None
            else:
                group = builder.build(own, f"holmes_shared_{name}")
            by_gloo = builder.backend == "gloo"
            host = group if by_gloo else builder.build(own, f"holmes_shared_on_host_{name}", on_host=True)
            if group is not None and host is not None:
                joined[members] = SharedGroup(group, host)
    return joined


def p2p_pairs(pipeline_parallel_size: int, num_chunks: int, schedule: str = "1f1b") -> list[tuple[int, int]]:
    """The ordered pairs of pipeline ranks between which activations or gradients travel."""
    ranks = spec_of(schedule).ranks_of(pipeline_parallel_size, num_chunks)
    pairs = set()
    for source, destination in itertools.pairwise(ranks):
        pairs |= {(source, destination), (destination, source)} if source != destination else set()
    return sorted(pairs)
