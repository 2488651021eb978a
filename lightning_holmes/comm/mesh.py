"""The process groups of a placement: replicas, pipelines, and an edge for each ordered pair that talks.

Every rank must build them, in the same order. The first use of a group happens here, in one global order: two NCCL communicators first used in different orders on two
ranks would wait for each other.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_holmes.comm.edges import DistributedEdges
from lightning_holmes.plan.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """One rank's groups; None where a group would have one member. ``owned``: all of them, for :func:`release`."""

    pipeline_rank: int
    data_parallel_rank: int
    pipeline: dist.ProcessGroup | None
    data_parallel: dist.ProcessGroup | None
    edges: DistributedEdges | None
    owned: list[dist.ProcessGroup]


def release(owned: list[dist.ProcessGroup]) -> None:
    """Let go of groups: each of gloo's has threads of its own, which wake a hundred times a second."""
    if dist.is_initialized():
        for group in owned:
            with contextlib.suppress(ValueError, RuntimeError):  # gone with WORLD
                dist.destroy_process_group(group)
    owned.clear()


def build_process_groups(
    placement: Placement,
    *,
    rank: int,
    backend: str,
    device: torch.device,
    timeout: timedelta | None,
    pairs: Iterable[tuple[int, int]],
) -> ProcessGroups:
    """Create and warm up the groups of ``rank``. Every rank of WORLD must call, with the same arguments.

    Args:
        backend: "gloo" or "nccl", for tensors; messages travel by gloo.
        pairs: ordered pairs (source, destination) of pipeline ranks that send tensors.
    """
    pipeline_rank, data_parallel_rank = placement.coordinate(rank)

    owned: list[dist.ProcessGroup] = []

    def group(ranks: Sequence[int], name: str, kind: str = backend) -> dist.ProcessGroup | None:
        made = _new_group(ranks, name, rank, kind, device, timeout)
        if made is not None:
            owned.append(made)
        return made

    data_parallel = None
    for stage_rank in range(placement.pipeline_parallel_size):
        made = group(placement.data_parallel_group(stage_rank), f"holmes_data_parallel_{stage_rank}")
        data_parallel = made or data_parallel
    pipeline = messages = None
    outgoing: dict[int, dist.ProcessGroup] = {}
    incoming: dict[int, dist.ProcessGroup] = {}
    for replica in range(placement.data_parallel_size):
        ranks = placement.pipeline_group(replica)
        pipeline = group(ranks, f"holmes_pipeline_{replica}") or pipeline
        messages = group(ranks, f"holmes_messages_{replica}", "gloo") or messages
        for source, destination in sorted(set(pairs)):
            made = group((ranks[source], ranks[destination]), f"holmes_edge_{replica}_{source}_{destination}")
            if made is None:
                continue
            _pass_one_number(ranks[source], ranks[destination], made, rank, device if backend != "gloo" else None)
            if ranks[source] == rank:
                outgoing[destination] = made
            else:
                incoming[source] = made
    edges = None
    if messages is not None:
        edges = DistributedEdges(
            placement.pipeline_group(data_parallel_rank),
            pipeline_rank,
            outgoing=outgoing,
            incoming=incoming,
            messages=messages,
            device=device,
        )
    return ProcessGroups(
        pipeline_rank=pipeline_rank,
        data_parallel_rank=data_parallel_rank,
        pipeline=pipeline,
        data_parallel=data_parallel,
        edges=edges,
        owned=owned,
    )


def join_shared(
    groups: ProcessGroups,
    placement: Placement,
    shared: Sequence[tuple[int, ...]],
    *,
    rank: int,
    backend: str,
    device: torch.device,
    timeout: timedelta | None,
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for each set of pipeline ranks that hold the same parameters, in this rank's pipeline.

    Every rank of WORLD must call with the same ``shared``. Sets of all pipeline ranks use the
    pipeline's own group.
    """
    joined: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for replica in range(placement.data_parallel_size):
        ranks = placement.pipeline_group(replica)
        for members in sorted(set(shared)):
            if len(members) == len(ranks):
                group = groups.pipeline if rank in ranks else None
            else:
                name = f"holmes_shared_{replica}_{'_'.join(map(str, members))}"
                group = _new_group([ranks[m] for m in members], name, rank, backend, device, timeout)
                if group is not None:
                    groups.owned.append(group)
            if group is not None:
                joined[members] = group
    return joined


def _new_group(
    ranks: Sequence[int], name: str, rank: int, backend: str, device: torch.device, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """Create a group and use it once; None on ranks outside it and for a single one.

    Every rank of WORLD takes part, members or not: with use_local_synchronization torch names a group by how
    many groups a rank has, which differs between ranks, and its members would wait for each other for ever.
    """
    if len(ranks) < 2:
        return None
    created: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)
    if rank not in ranks:
        return None
    dist.all_reduce(torch.zeros(1, device=torch.device("cpu") if backend == "gloo" else device), group=created)
    return created


def _pass_one_number(
    source: int, destination: int, group: dist.ProcessGroup, rank: int, device: torch.device | None
) -> None:
    """Use an edge once: NCCL makes a communicator of its own for the first transfer between two ranks."""
    number = torch.zeros(1, device=device or torch.device("cpu"))
    if rank == source:
        dist.send(number, destination, group=group)
    else:
        dist.recv(number, source, group=group)


def edge_pairs(pipeline_parallel_size: int, num_chunks: int) -> list[tuple[int, int]]:
    """The ordered pairs of pipeline ranks between which activations or gradients travel."""
    pairs = set()
    for stage in range(pipeline_parallel_size * num_chunks - 1):
        source, destination = stage % pipeline_parallel_size, (stage + 1) % pipeline_parallel_size
        pairs |= {(source, destination), (destination, source)}
    return sorted(pairs)
