"""lightning-holmes testbed: the hosts of a topology file on this machine, from the command line.

    lightning-holmes testbed up two_clusters.yaml --cpu-share 0.45 --ethernet 100mbit
    lightning-holmes testbed run --torchrun --shuffle -- train.py
    lightning-holmes testbed set node-0.mlx5_0 down
    lightning-holmes testbed status
    lightning-holmes testbed down

It owns the arguments and the printing; the testbed is in lightning_holmes.cluster.testbed. A testbed stays up between
commands; --id distinguishes several testbeds.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_holmes.cluster.record import parse_bandwidth
from lightning_holmes.cluster.testbed import Testbed, TestbedOptions
from lightning_holmes.cluster.testbed.bed import remove_abandoned, remove_remains
from lightning_holmes.cluster.testbed.layout import DEFAULT_PREFIX, MAX_SHAPED_BYTES_PER_S
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.commands.topology_table import bandwidth
from lightning_holmes.errors import ConfigurationError

_DEFAULT_ID = "main"
_TC_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_rate(text: str, *, source: str) -> float:
    """Convert a rate in tc's notation (50mbit) or a topology file's (50 Mbit/s) to bytes per second. Raises ConfigurationError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?bit)\s*", text.lower())
    if found:
        return float(found.group(1)) * _TC_UNITS[found.group(2)] / 8
    try:
        return float(parse_bandwidth(text))
    except ValueError as error:
        raise ConfigurationError(f"{source}: {error}") from None


def show_rate(bandwidth_bytes_per_s: float | None) -> str:
    """Format a rate, in the largest unit that keeps it above 1; "unshaped" if it is not limited."""
    unshaped = bandwidth_bytes_per_s is None or bandwidth_bytes_per_s > MAX_SHAPED_BYTES_PER_S
    return "unshaped" if unshaped else bandwidth(bandwidth_bytes_per_s)


def main(args: list[str]) -> None:
    """Run the command line `args`. Raises HolmesError for errors that the user can fix."""
    parser = make_parser()
    command = args.index("--") if "--" in args else len(args)
    options = parser.parse_args(args[:command])
    options.command = args[command + 1 :]
    options.action(options)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; the parsed options' `action` is the function to call."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--id", default=_DEFAULT_ID, help="name of the testbed, if there are several (default: %(default)s)"
    )
    parser = argparse.ArgumentParser(
        prog="lightning-holmes testbed",
        description="The hosts of a topology on this machine: namespaces, shaped network cards, a share of the CPU each.",
    )
    actions = parser.add_subparsers(required=True, metavar="up | run | set | status | down")

    up = actions.add_parser("up", parents=[shared], help="build the testbed of a topology file")
    up.add_argument("file", help="a topology file")
    up.add_argument("--cpu-share", type=float, help="cores of each host, such as 0.45 (default: no limit)")
    up.add_argument("--cpu-period", type=float, default=0.02, help="period of the CPU quota in seconds (0.02)")
    up.add_argument("--ethernet", metavar="RATE", help="rate of every Ethernet card, such as 100mbit")
    up.add_argument("--rdma", metavar="RATE", help="rate of every InfiniBand and RoCE card, such as 1gbit")
    up.set_defaults(action=_up)

    run = actions.add_parser(
        "run",
        parents=[shared],
        help="run a command on every host",
        usage="lightning-holmes testbed run [options] -- COMMAND",
    )
    run.add_argument(
        "--torchrun",
        nargs="?",
        type=int,
        const=0,
        metavar="N",
        help="start COMMAND (a script, or -m and a module) by torchrun, N processes a host (default: its devices)",
    )
    run.add_argument("--shuffle", action="store_true", help="number the nodes in another order than the file's")
    run.add_argument(
        "--host", action="append", metavar="NAME", help="run on this host only; may be given several times"
    )
    run.add_argument(
        "--timeout", type=float, default=600.0, help="seconds after which all processes are ended (%(default).0f)"
    )
    run.set_defaults(action=_run)

    change = actions.add_parser("set", parents=[shared], help="change a network card")
    change.add_argument("nic", metavar="HOST.NIC")
    change.add_argument("change", metavar="rate=RATE | down | up")
    change.set_defaults(action=_set)

    status = actions.add_parser("status", parents=[shared], help="list every network card with its rate and its bytes")
    status.set_defaults(action=_status)
    down = actions.add_parser("down", parents=[shared], help="remove the testbed, also a partly removed one")
    down.set_defaults(action=_down)
    return parser


def _up(options: argparse.Namespace) -> None:
    bed = Testbed(
        Topology.from_yaml(options.file),
        TestbedOptions(
            cpu_share=options.cpu_share,
            cpu_period_s=options.cpu_period,
            ethernet_bandwidth_bytes_per_s=_rate_option(options.ethernet, "--ethernet"),
            rdma_bandwidth_bytes_per_s=_rate_option(options.rdma, "--rdma"),
        ),
        bed_id=options.id,
    )
    bed.build()
    _print_status(bed)


def _rate_option(text: str | None, flag: str) -> float | None:
    return None if text is None else parse_rate(text, source=flag)


def _run(options: argparse.Namespace) -> None:
    if not options.command:
        raise ConfigurationError("no command to run; write it after --: lightning-holmes testbed run -- COMMAND")
    bed = Testbed.attach(options.id)
    arguments: dict[str, Any] = {
        "hosts": options.host,
        "timeout_s": options.timeout,
        "echo": lambda host, line: print(f"[{host}] {line}", flush=True),
    }
    if options.torchrun is None:
        results = bed.run(options.command, shuffle=options.shuffle, **arguments)
    else:
        processes = options.torchrun or None
        results = bed.torchrun(options.command, nproc_per_node=processes, shuffle_nodes=options.shuffle, **arguments)
    failed = False
    for host, result in results.items():
        if result.exit_code != 0:
            failed = True
            how = f"exit {result.exit_code}" if result.exit_code is not None else "ended with the others"
            print(f"{host}: {f'ended after {options.timeout:g} s' if result.timed_out else how}", file=sys.stderr)
    if failed:
        sys.exit(1)


def _set(options: argparse.Namespace) -> None:
    bed = Testbed.attach(options.id)
    name, _, value = options.change.partition("=")
    if name == "rate" and value:
        bed.set_rate(options.nic, parse_rate(value, source="rate"))
    elif options.change == "down":
        bed.set_down(options.nic)
    elif options.change == "up":
        bed.set_up(options.nic)
    else:
        raise ConfigurationError(f"{options.change!r} is no change; write rate=50mbit, down or up")


def _status(options: argparse.Namespace) -> None:
    _print_status(Testbed.attach(options.id))


def _down(options: argparse.Namespace) -> None:
    found = remove_remains(DEFAULT_PREFIX, options.id)
    remove_abandoned(DEFAULT_PREFIX)
    print(f"testbed {options.id} is down" if found else f"there was no testbed {options.id}")


def _print_status(bed: Testbed) -> None:
    table = Table(title=f"testbed {bed.bed_id}")
    for title in ("cluster", "host", "CPU", "NIC", "kind", "interface", "address", "state"):
        table.add_column(title)
    for title in ("rate", "bytes in", "bytes out"):
        table.add_column(title, justify="right")
    for status in bed.status():
        share = bed.layout.host(status.host).cpu_share
        table.add_row(
            status.cluster,
            status.host,
            "all" if share is None else f"{share:g}",
            status.nic.name,
            status.nic.kind,
            status.nic.interface,
            status.nic.address,
            "up" if status.up else "down",
            show_rate(status.bandwidth_bytes_per_s),
            f"{status.bytes.received:,}",
            f"{status.bytes.sent:,}",
        )
    # without a terminal the width is not known: use one at which no column is folded
    Console(width=None if sys.stdout.isatty() else 160).print(table)
