"""lightning-holmes bench: the same training by several strategies, side by side on a testbed.

    lightning-holmes bench
    lightning-holmes bench --hosts 2 4 --ethernet 50mbit --contenders floor ddp holmes --output runs/unequal
    lightning-holmes bench --case layered            # layered accumulation against FSDP2's three ways
    lightning-holmes bench --case optimizer-node     # parameters and states on an additional host
    lightning-holmes bench --case optimizer-node-count      # on 1, 2 and 4 hosts whose links are the limit
    lightning-holmes bench --case optimizer-node-clusters   # across clusters
    lightning-holmes bench --contenders floor holmes --timeline      # with the seconds of a step by kind

It owns the arguments and the order of the runs; contenders, worker and report are in lightning_holmes.commands.benchmark,
the hosts in lightning_holmes.cluster.testbed. Every contender is started by torchrun on every host, with the nodes
numbered at random unless the contender sets their order. The floor (training without communication) is measured first and last,
and all its steps count. Needs root for the testbed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from lightning_holmes.cluster.testbed import Testbed, TestbedOptions
from lightning_holmes.cluster.testbed.bed import raise_if_failed
from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology, TransportKind
from lightning_holmes.commands.bench_predict import run_partitions, run_predictions
from lightning_holmes.commands.benchmark.bare_sockets import FAR_END
from lightning_holmes.commands.benchmark.bench_report import (
    Report,
    Result,
    load_figure_class,
    mean_by_kind,
    show_seconds,
)
from lightning_holmes.commands.benchmark.contenders import CASES, CONTENDERS, BenchmarkJob, Contender
from lightning_holmes.commands.benchmark.worker import TIMELINE
from lightning_holmes.commands.benchmark.workload import Workload
from lightning_holmes.commands.testbed import parse_rate, show_rate
from lightning_holmes.errors import ConfigurationError, TestbedError
from lightning_holmes.optim.node.server import DEFAULT_PORT, SECRET

FLOOR = "floor"
_WORKER = "lightning_holmes.commands.benchmark.worker"
_FAST_KINDS: tuple[TransportKind, ...] = ("infiniband", "roce")
_ETHERNET = "eth0"
_NODE = "memory"


def main(args: list[str]) -> None:
    """Run the command line `args`; exit with 1 if a contender failed, or if predictions miss an aim."""
    options = make_parser().parse_args(args)
    load_figure_class()  # fail before the runs if matplotlib is missing
    command = shlex.join(["lightning-holmes", "bench", *args])
    if options.predict or options.partitions:
        facts = {"command": command, "hardware": _hardware(), "commit": _commit(), "torch": version("torch")}
        missed: list[str] = []
        if options.predict:
            missed += run_predictions(
                options.beds,
                make_topology,
                rounds=options.rounds,
                output=Path(options.output),
                timeout_s=options.timeout,
                facts=facts,
            ).missed()
        if options.partitions:
            output = Path(options.output)
            missed += run_partitions(make_topology, output=output, timeout_s=options.timeout, facts=facts)["missed"]
        for aim in missed:
            print(f"aim missed: {aim}")
        if missed:
            sys.exit(1)
        return
    case = CASES[options.case]
    topology = make_topology(
        options.hosts or case.hosts,
        devices=options.processes,
        fast_bytes_per_s=parse_rate(options.fast or case.fast, source="--fast"),
        ethernet_bytes_per_s=parse_rate(options.ethernet or case.ethernet, source="--ethernet"),
    )
    workload = Workload(
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        num_heads=options.heads,
        sequence_length=options.sequence_length,
        batch_size=options.batch_size,
        microbatches=options.microbatches or case.microbatches,
        warmup_steps=options.warmup,
        steps=options.steps,
    )
    cpu_shares = options.cpu_share or [case.cpu_share]
    if len(cpu_shares) not in (1, len(topology.clusters)):
        raise ConfigurationError(
            f"--cpu-share {' '.join(f'{share:g}' for share in cpu_shares)}: give one for all hosts, or one for each of the "
            f"{len(topology.clusters)} clusters"
        )
    job = BenchmarkJob(topology=topology, processes_per_host=options.processes, workload=workload)
    if workload.batch_size % job.world_size:
        raise ConfigurationError(
            f"--batch-size {workload.batch_size} does not divide among {job.world_size} processes; give a multiple"
        )
    names = options.contenders or case.contenders
    report = run_benchmark(
        job,
        [CONTENDERS[name] for name in CONTENDERS if name in names],
        cpu_shares=cpu_shares * (len(topology.clusters) // len(cpu_shares)),
        node_rate=parse_rate(options.node_rate or case.node_rate, source="--node-rate"),
        node_clusters=case.node_clusters,
        node_cpu_share=options.node_cpu_share or case.node_cpu_share,
        rounds=options.rounds,
        timeout_s=options.timeout,
        command=command,
        verbose=options.verbose,
        timelines=Path(options.output) if options.timeline else None,
    )
    report.print()
    for path in report.write(Path(options.output)):
        print(f"written: {path}")
    if any(result.failed for result in report.results):
        sys.exit(1)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    defaults = Workload()
    parser = argparse.ArgumentParser(
        prog="lightning-holmes bench",
        description="Run the same training with several strategies, side by side on a testbed of two or more clusters.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    network = parser.add_argument_group("network")
    parser.add_argument(
        "--case", choices=list(CASES), default="clusters", help="which strategies are compared, and on which network"
    )
    network.add_argument(
        "--hosts", type=int, nargs="+", metavar="N", help="number of hosts of each cluster; by default the case's"
    )
    network.add_argument("--processes", type=int, default=1, help="processes on each host")
    network.add_argument(
        "--cpu-share",
        type=float,
        nargs="+",
        metavar="CORES",
        help="cores of each host, or one value for each cluster; by default the case's",
    )
    network.add_argument(
        "--node-cpu-share", type=float, metavar="CORES", help="cores of each optimizer node; by default the case's"
    )
    network.add_argument("--fast", help="rate of the network inside clusters; by default the case's")
    network.add_argument("--ethernet", help="rate of the Ethernet between clusters; by default the case's")
    network.add_argument("--node-rate", help="rate of an optimizer node's network card; by default the case's")
    training = parser.add_argument_group("training")
    training.add_argument("--hidden-size", type=int, default=defaults.hidden_size)
    training.add_argument("--layers", type=int, default=defaults.num_layers)
    training.add_argument("--heads", type=int, default=defaults.num_heads)
    training.add_argument("--sequence-length", type=int, default=defaults.sequence_length)
    training.add_argument(
        "--batch-size", type=int, default=defaults.batch_size, help="samples of a step, over all replicas"
    )
    training.add_argument(
        "--microbatches", type=int, help="number of microbatches of each replica; by default the case's"
    )
    training.add_argument("--steps", type=int, default=defaults.steps, help="measured steps of each run")
    training.add_argument("--warmup", type=int, default=defaults.warmup_steps, help="steps before the measured ones")
    predictions = parser.add_argument_group("predictions compared with runs (instead of the contenders)")
    predictions.add_argument(
        "--predict", action="store_true", help="compare predicted and measured step times of many plans"
    )
    predictions.add_argument("--beds", nargs="+", metavar="NAME", help="run only these testbeds of --predict")
    predictions.add_argument(
        "--partitions",
        action="store_true",
        help="compare all partitions on hosts of different speed with the one that is chosen",
    )
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="run only these strategies")
    parser.add_argument(
        "--rounds", type=int, default=1, help="how many times all contenders, or a testbed's runs, are measured in turn"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds that a contender, or ten runs of a testbed, may take"
    )
    parser.add_argument("--output", default="runs/bench", help="folder for bench.json, bench.png and timelines")
    parser.add_argument(
        "--timeline",
        action="store_true",
        help="monitor the steps of HolmesStrategy (monitor=True): report where the time goes, and plot a step beside its prediction",
    )
    parser.add_argument("--verbose", action="store_true", help="show the output of the hosts")
    return parser


def make_topology(
    sizes: Sequence[int], *, devices: int, fast_bytes_per_s: float, ethernet_bytes_per_s: float
) -> Topology:
    """Make clusters of these sizes, alternately with InfiniBand and RoCE. Host names do not contain the cluster's name."""
    if min(sizes) < 1:
        raise ConfigurationError(f"--hosts {' '.join(map(str, sizes))}: each cluster needs a host or more")
    clusters, number = [], 0
    for index, size in enumerate(sizes):
        kind = _FAST_KINDS[index % len(_FAST_KINDS)]
        nics = (
            Nic(name="mlx5_0", kind=kind, bandwidth_bytes_per_s=fast_bytes_per_s),
            Nic(name=_ETHERNET, kind="ethernet", bandwidth_bytes_per_s=ethernet_bytes_per_s),
        )
        hosts = tuple(Host(name=f"node{number + i}", devices=devices, nics=nics) for i in range(size))
        clusters.append(Cluster(name=f"{kind}{index}", hosts=hosts))
        number += size
    return Topology(clusters=tuple(clusters))


def run_benchmark(
    job: BenchmarkJob,
    contenders: Sequence[Contender],
    *,
    cpu_shares: Sequence[float],
    node_rate: float,
    node_clusters: Sequence[int] = (),
    node_cpu_share: float | None = None,
    rounds: int,
    timeout_s: float,
    command: str,
    verbose: bool,
    timelines: Path | None = None,
) -> Report:
    """Run the contenders in turn on one testbed.

    Args:
        cpu_shares: cores of a host, for each cluster.
        node_rate: bytes/s of an optimizer node's Ethernet card.
        node_clusters: see BenchmarkCase.
        node_cpu_share: cores of an optimizer node; None: as many as a host of the last cluster.
        timelines: a folder for the timelines of the last run of each Holmes contender.
    """
    order = [contender for _ in range(rounds) for contender in contenders]
    order += [contender for contender in contenders if contender.name == FLOOR]  # again at the end, to show drift
    found: dict[str, list[Result]] = {contender.name: [] for contender in contenders}
    of_hosts = {
        host.name: share
        for cluster, share in zip(job.topology.clusters, cpu_shares, strict=True)
        for host in cluster.hosts
    }
    num_nodes = max(contender.optimizer_nodes or int(any(contender.carried)) for contender in contenders)
    hosts = with_node_hosts(job.topology, num_nodes, node_rate, in_clusters=node_clusters)
    of_hosts = {host.name: of_hosts.get(host.name, node_cpu_share or cpu_shares[-1]) for host in hosts.hosts}
    with Testbed(hosts, TestbedOptions(host_cpu_shares=of_hosts, precedence=True)) as bed:
        for number, contender in enumerate(order, start=1):
            print(f"[{number}/{len(order)}] {contender.title}", end=" ... ", flush=True)
            result = run_contender(bed, contender, job, timeout_s=timeout_s, verbose=verbose, timelines=timelines)
            print(f"{show_seconds(result.step_s)} s a step" if result.step_s is not None else "no figures", flush=True)
            found[contender.name].append(result)
    parts = job.workload.microbatches
    fast, ethernet = (nic.bandwidth_bytes_per_s for nic in job.topology.clusters[0].hosts[0].nics)
    sizes = "+".join(str(len(cluster.hosts)) for cluster in job.topology.clusters)
    return Report(
        results=[join(results) for results in found.values()],
        floor=FLOOR,
        network=(
            f"{sizes} hosts, {' and '.join(f'{share:g}' for share in dict.fromkeys(cpu_shares))} core each, {show_rate(fast)} inside clusters, {show_rate(ethernet)} across; "
            f"GPT of {job.workload.num_parameters / 1e6:.3g} M parameters, "
            f"batch {job.workload.batch_size} x {job.workload.sequence_length}"
            + (f" in {parts} microbatches a process" if parts > 1 else "")
        ),
        command=command,
        facts={"hardware": _hardware(), "commit": _commit(), "torch": version("torch"), "rounds": rounds},
        unlike_hosts=len(set(cpu_shares)) > 1,
    )


def run_contender(
    bed: Testbed,
    contender: Contender,
    job: BenchmarkJob,
    *,
    timeout_s: float,
    verbose: bool,
    timelines: Path | None = None,
) -> Result:
    """Run one contender once."""
    if (why_not := contender.why_not(job)) is not None:
        return Result(name=contender.name, title=contender.title, problem=why_not, can_run=False)
    _set_ethernet(bed, job, fast=contender.fast_everywhere)
    with tempfile.TemporaryDirectory(prefix="holmes-bench-") as name:
        folder = Path(name)
        written = {
            "topology": job.topology.to_yaml(),
            "processes_per_host": job.processes_per_host,
            "workload": job.workload.to_json(),
            "timeline": timelines is not None,
        }
        (folder / "job.json").write_text(json.dumps(written))
        order = contender.node_order(job)
        echo = (lambda host, line: print(f"[{host}] {line}", flush=True)) if verbose else None
        secret = {SECRET: secrets.token_hex(16)} if contender.optimizer_nodes else {}
        own = {cluster.name for cluster in job.topology.clusters} if contender.optimizer_nodes else set()
        clusters = {host.name: host.cluster for host in bed.layout.hosts if host.cluster in own}

        names = [host.name for host in job.topology.hosts]
        following = dict(zip(names, names[1:] + names[:1], strict=True))

        def of_host(host: str) -> dict[str, str]:
            ethernet = {"GLOO_SOCKET_IFNAME": bed.ethernet_interface(host)} if contender.gloo_on_ethernet else {}
            far = {}
            if contender.exchanged:
                far = {FAR_END: f"{bed.layout.host(following[host]).ethernet.address}:{DEFAULT_PORT}"}
            cluster = {"HOLMES_CLUSTER": clusters[host]} if host in clusters else {}
            return ethernet | cluster | far

        with _beside(bed, contender, job, env=secret, host_env=of_host, timeout_s=timeout_s, echo=echo) as found:
            results = bed.torchrun(
                ["-m", _WORKER, contender.name, str(folder)],
                nproc_per_node=job.processes_per_host,
                shuffle_nodes=order is None,
                node_order=order,
                hosts=names,
                env={"WANDB_MODE": "offline", "PYTHONWARNINGS": "ignore"} | dict(contender.env) | secret | found,
                host_env=of_host,
                folder=folder,
                timeout_s=timeout_s,
                echo=echo,
            )
        try:
            raise_if_failed(results, timeout_s)
        except TestbedError as error:
            return Result(name=contender.name, title=contender.title, problem=str(error))
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(job.world_size)]
        seconds_by_kind = {} if timelines is None else _keep_timeline(folder, timelines, contender)
    # processes of one host see the same cards, so that one process per host is enough
    sent = {rank["host"]: rank["sent_bytes"] for rank in ranks}
    return Result(
        name=contender.name,
        title=contender.title,
        rank_steps_s=[rank["steps_s"] for rank in ranks],
        ethernet_bytes=max(cards[_ETHERNET] for cards in sent.values()) / job.workload.steps,
        fast_bytes=max(sum(cards.values()) - cards[_ETHERNET] for cards in sent.values()) / job.workload.steps,
        received_bytes=max(rank["received_bytes"] for rank in ranks) / job.workload.steps,
        peak_bytes=max(rank["peak_bytes"] for rank in ranks),
        plans=[] if ranks[0]["plan"] is None else [ranks[0]["plan"]],
        seconds_by_kind=seconds_by_kind,
    )


@contextlib.contextmanager
def _beside(
    bed: Testbed,
    contender: Contender,
    job: BenchmarkJob,
    *,
    env: dict[str, str],
    host_env: Callable[[str], dict[str, str]],
    timeout_s: float,
    echo: Callable[[str, str], None] | None,
) -> Generator[dict[str, str], None, None]:
    """Run the contender's optimizer nodes, or the other end of its bare sockets, on the hosts for nodes while the context is entered;
    they end with the job. Yields environment variables for the contender's processes."""
    master = bed.layout.host(job.topology.hosts[0].name).ethernet.address
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    commands = [
        ["-m", "lightning_holmes.optim.node", f"{master}:{DEFAULT_PORT}", str(number)]
        for number in range(contender.optimizer_nodes)
    ]
    told = {}
    if any(contender.carried):
        far = f"{bed.layout.host(f'{_NODE}0').ethernet.address}:{DEFAULT_PORT}"
        commands.append(["-m", "lightning_holmes.commands.benchmark.bare_sockets", far, str(job.world_size)])
        told = {FAR_END: far}

    def serve(number: int, command: list[str]) -> None:
        host = f"{_NODE}{number}"
        bed.run([python, *command], hosts=[host], env=env, host_env=host_env, timeout_s=timeout_s, echo=echo)

    with ThreadPoolExecutor(max_workers=max(1, len(commands))) as pool:
        served = [pool.submit(serve, *entry) for entry in enumerate(commands)]
        yield told
    for each in served:
        each.result()


def with_node_hosts(
    topology: Topology, count: int, bandwidth_bytes_per_s: float, in_clusters: Sequence[int] = ()
) -> Topology:
    """Add ``count`` hosts for optimizer nodes, with Ethernet cards of this rate: one in each of the clusters ``in_clusters`` (indices),
    with the RDMA cards of the cluster's other hosts, too, and the rest in a cluster of their own with Ethernet only."""
    ethernet = Nic(name=_ETHERNET, kind="ethernet", bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    clusters = list(topology.clusters)
    for number, place in enumerate(in_clusters[:count]):
        cards = tuple(nic for nic in clusters[place].hosts[0].nics if nic.kind != "ethernet")
        host = Host(name=f"{_NODE}{number}", devices=1, nics=(*cards, ethernet))
        clusters[place] = dataclasses.replace(clusters[place], hosts=(*clusters[place].hosts, host))
    outside = range(len(in_clusters), count)
    hosts = tuple(Host(name=f"{_NODE}{number}", devices=1, nics=(ethernet,)) for number in outside)
    nodes = (Cluster(name="optimizer-nodes", hosts=hosts),) if hosts else ()
    return dataclasses.replace(topology, clusters=(*clusters, *nodes))


def _keep_timeline(folder: Path, output: Path, contender: Contender) -> dict[str, float]:
    """Copy the timeline of a Holmes run to the output; return its step's seconds by kind, averaged over ranks. Empty without a timeline."""
    written = folder / TIMELINE
    if not written.exists():
        return {}
    output.mkdir(parents=True, exist_ok=True)
    for path in (written, written.with_suffix(".png")):
        shutil.copyfile(path, output / f"timeline-{contender.name}{path.suffix}")
    return mean_by_kind(json.loads(written.read_text())["seconds_by_kind"])


def join(results: Sequence[Result]) -> Result:
    """Join the results of one contender's runs: the steps of all runs, the bytes sent of the first successful run."""
    good = [result for result in results if result.problem is None]
    if not good:
        return results[0]
    problems = [result.problem for result in results if result.problem is not None]
    return Result(
        name=good[0].name,
        title=good[0].title,
        rank_steps_s=[
            [seconds for steps in of_rank for seconds in steps]
            for of_rank in zip(*(result.rank_steps_s for result in good), strict=True)
        ],
        ethernet_bytes=good[0].ethernet_bytes,
        fast_bytes=good[0].fast_bytes,
        received_bytes=good[0].received_bytes,
        peak_bytes=max(result.peak_bytes for result in good),
        plans=[plan for result in good for plan in result.plans],
        seconds_by_kind=mean_by_kind([result.seconds_by_kind for result in good]),
        problem=f"{len(problems)} of {len(results)} runs failed: {problems[0]}" if problems else None,
    )


def _set_ethernet(bed: Testbed, job: BenchmarkJob, *, fast: bool) -> None:
    for cluster in job.topology.clusters:
        for host in cluster.hosts:
            rate = host.nics[0 if fast else 1].bandwidth_bytes_per_s
            assert rate is not None
            bed.set_rate(f"{host.name}.{_ETHERNET}", rate)


def _hardware() -> str:
    """The processor's model and number of cores."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores"


def _commit() -> str:
    """The commit of a checkout, or the version of an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version("lightning-holmes")
