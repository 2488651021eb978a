"""lightning-holmes topology: lists a host's network cards, or a job's clusters and links.

    lightning-holmes topology                                       # this host's cards
    torchrun --nnodes 4 ... -m lightning_holmes.cli topology        # clusters, links and measured speeds
    lightning-holmes topology --topology my.yaml                    # the content of a topology file

cluster/inventory.py discovers the topology, topology_table.py shows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from datetime import timedelta
from typing import Any

from lightning_holmes.cluster.fabric import group_hosts
from lightning_holmes.cluster.hardware import HostInventory, probe_host
from lightning_holmes.cluster.inventory import discover_topology
from lightning_holmes.cluster.record import to_data
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.commands.topology_table import print_topology
from lightning_holmes.errors import ConfigurationError

FORMATS = ("table", "yaml", "json")
_STORE_TIMEOUT_S = 120.0


def main(args: list[str]) -> None:
    """Run the command. Raises HolmesError for errors that the user can fix."""
    options = parse(args)
    given = Topology.from_yaml(options.topology) if options.topology is not None else None
    rank, world_size = _rank_and_world_size()
    if world_size is not None:
        store = _open_store(rank, world_size)
        try:
            topology = discover_topology(store, rank, world_size, given=given, connects=not options.no_probe)
        finally:
            _leave_together(store, rank, world_size)
        if rank == 0:
            _show(topology, options.format)
    elif given is not None:
        _show(given, options.format)
    else:
        inventory = probe_host()
        for warning in inventory.warnings:
            print(f"lightning-holmes: {warning}", file=sys.stderr)
        _show(make_single_host(inventory), options.format)


def parse(args: list[str]) -> Namespace:
    """Parse the command's options; a mistake ends the process with a message, as in the other commands."""
    parser = ArgumentParser(
        prog="lightning-holmes topology",
        description="List this host's network cards; under torchrun, find clusters and measure the links.",
        allow_abbrev=False,
    )
    parser.add_argument("--format", default="table", choices=FORMATS, help="what is printed; default: table")
    parser.add_argument("--topology", metavar="FILE", help="a topology file to show, or to complete under torchrun")
    parser.add_argument("--no_probe", action="store_true", help="open no connection and measure nothing")
    return parser.parse_args(args)


def make_single_host(inventory: HostInventory) -> Topology:
    """Make a topology of this host alone, with a device for each GPU (at least one), as a template for a topology file."""
    topology = group_hosts([inventory] * max(1, inventory.num_gpus))
    (cluster,) = topology.clusters
    hosts = tuple(replace(host, ranks=None) for host in cluster.hosts)
    return replace(topology, clusters=(replace(cluster, hosts=hosts),))


def _show(topology: Topology, form: str) -> None:
    if form == "yaml":
        print(topology.to_yaml(), end="")
    elif form == "json":
        print(json.dumps(to_data(replace(topology, source=None), aliases=True), indent=2))
    else:
        print_topology(topology)


def _open_store(rank: int, world_size: int) -> Any:
    """Open the job's store at MASTER_ADDR and MASTER_PORT: torchrun's own if it offers one, else rank 0 creates it."""
    import torch.distributed  # imported late: it takes seconds, and a single host does not need it

    dist: Any = torch.distributed  # the stores are public, but not declared as exported
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port or not port.isdecimal():
        raise ConfigurationError(f"MASTER_ADDR={address} and MASTER_PORT={port}: set both to where rank 0 listens")
    offered = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address,
            int(port),
            world_size,
            is_master=rank == 0 and not offered,
            timeout=timedelta(seconds=_STORE_TIMEOUT_S),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"rank {rank} cannot open the job's store at {address}:{port}: {str(error).splitlines()[0]}; start all "
            f"{world_size} processes with torchrun and the same --master_addr and --master_port"
        ) from error
    return dist.PrefixStore(f"holmes/topology/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _leave_together(store: Any, rank: int, world_size: int) -> None:
    """Let rank 0, which may own the store, wait until all ranks have read from it, for 10 seconds at most."""
    with contextlib.suppress(Exception):
        store.add("left", 1)
        end = time.monotonic() + 10
        while rank == 0 and store.add("left", 0) < world_size and time.monotonic() < end:
            time.sleep(0.02)


def _rank_and_world_size() -> tuple[int, int | None]:
    """Rank and world size from torchrun's RANK and WORLD_SIZE; (0, None) outside a job."""
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return 0, None
    if not (rank and world_size and rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise ConfigurationError(
            f"RANK={rank} and WORLD_SIZE={world_size}: set both, as torchrun does, with RANK below WORLD_SIZE; unset "
            "both to list this host's cards"
        )
    return int(rank), int(world_size)
