"""The same training by several strategies, side by side on a testbed.

    python tests/benchmarks/bench.py
    python tests/benchmarks/bench.py --network three-clusters --contenders floor ddp holmes
    python tests/benchmarks/bench.py --network one-cluster --microbatches 4 --contenders floor fsdp2 \
        'holmes:{"pipeline_parallel_size": 1, "num_microbatches": 4}'
    python tests/benchmarks/bench.py --contenders floor 'holmes:{"monitor": true}'      # traces and timeline.png, too

Every contender is started by torchrun on every host, with the nodes numbered at random. The floor (training without
communication) is measured first and last, and all its steps count. Needs root for the testbed; nothing else may run on the machine.
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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from benchmarks.bench_report import Report, Result, show_seconds
from benchmarks.contenders import CONTENDERS, Contender, make_contender
from benchmarks.workload import Workload
from testbed import Testbed, TestbedError, TestbedOptions
from testbed.bed import raise_if_failed

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology, TransportKind
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.optim.node.role import DEFAULT_PORT, SECRET

TESTS = Path(__file__).resolve().parents[1]
FLOOR = "floor"
_FAST_KINDS: tuple[TransportKind, ...] = ("infiniband", "roce")
_ETHERNET = "eth0"
_NODE = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Clusters of hosts, and the workload that is measured on them.

    Attributes:
        hosts: number of hosts of each cluster.
        fast, ethernet: the rates inside clusters and between them.
        cpu_share: cores of a host, one for all or one for each cluster.
        node_rate: the rate of an optimizer node's card.
    """

    hosts: tuple[int, ...] = (2, 2)
    fast: str = "1 Gbit/s"
    ethernet: str = "100 Mbit/s"
    cpu_share: tuple[float, ...] = (0.45,)
    node_rate: str = "1 Gbit/s"
    workload: Workload = field(default_factory=Workload)

    def make_topology(self) -> Topology:
        """Clusters alternately with InfiniBand and RoCE. Host names do not contain the cluster's name."""
        clusters, number = [], 0
        for index, size in enumerate(self.hosts):
            kind = _FAST_KINDS[index % len(_FAST_KINDS)]
            nics = (
                Nic(name="mlx5_0", kind=kind, bandwidth_bytes_per_s=self.fast),
                Nic(name=_ETHERNET, kind="ethernet", bandwidth_bytes_per_s=self.ethernet),
            )
            hosts = tuple(Host(name=f"node{number + i}", devices=1, nics=nics) for i in range(size))
            clusters.append(Cluster(name=f"{kind}{index}", hosts=hosts))
            number += size
        return Topology(clusters=tuple(clusters))

    def host_cpu_shares(self, hosts: Topology) -> dict[str, float]:
        """Cores of each host; an optimizer node outside the clusters has as many as a host of the last one."""
        shares = self.cpu_share * (len(self.hosts) if len(self.cpu_share) == 1 else 1)
        last = len(shares) - 1
        return {
            host.name: shares[min(index, last)]
            for index, cluster in enumerate(hosts.clusters)
            for host in cluster.hosts
        }


_THIRD = {"cpu_share": (0.15,), "ethernet": "45 Mbit/s", "fast": "450 Mbit/s"}  # so that six hosts fit on two cores
NETWORKS = {
    "two-clusters": Network(),
    "deep": Network(workload=Workload(hidden_size=192, num_layers=16, batch_size=16)),
    "wide": Network(workload=Workload(hidden_size=384, num_layers=6, batch_size=16)),
    "three-clusters": Network(hosts=(2, 2, 2), workload=Workload(batch_size=36), **_THIRD),
    "two-and-four": Network(hosts=(2, 4), workload=Workload(batch_size=36), **_THIRD),
    "unlike": Network(cpu_share=(0.25, 0.125), ethernet="40 Mbit/s", fast="400 Mbit/s"),
    "one-cluster": Network(hosts=(4,), ethernet="1 Gbit/s"),
}


def main(args: list[str]) -> None:
    """Run the command line `args`; exit with 1 if a contender failed."""
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--network", choices=list(NETWORKS), default="two-clusters")
    parser.add_argument(
        "--contenders",
        nargs="+",
        metavar="NAME",
        default=[FLOOR, "ddp", "fsdp2", "holmes"],
        help=f"{', '.join(CONTENDERS)}, and holmes:JSON with arguments of HolmesStrategy",
    )
    parser.add_argument("--rounds", type=int, default=1, help="how many times all contenders are measured in turn")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a contender may take")
    parser.add_argument("--output", default="runs/bench", help="the folder for bench.json")
    parser.add_argument("--verbose", action="store_true", help="show the output of the hosts")
    for settings, own in ((Network, "network"), (Workload, "workload")):
        for setting in dataclasses.fields(settings):
            if setting.name != "workload":
                many = setting.name in ("hosts", "cpu_share")
                kind = {"hosts": int, "cpu_share": float}.get(setting.name) or (str if own == "network" else int)
                parser.add_argument(
                    f"--{setting.name.replace('_', '-')}", type=kind, nargs="+" if many else None, help=f"of the {own}"
                )
    options = parser.parse_args(args)

    def changed(settings: Network | Workload) -> dict[str, object]:
        given = {f.name: getattr(options, f.name, None) for f in dataclasses.fields(settings)}
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }

    network = NETWORKS[options.network]
    network = dataclasses.replace(network, **changed(network))
    network = dataclasses.replace(network, workload=dataclasses.replace(network.workload, **changed(network.workload)))
    if len(network.cpu_share) not in (1, len(network.hosts)):
        raise ConfigurationError(
            f"--cpu-share: give one for all hosts, or one for each of the {len(network.hosts)} clusters"
        )
    if network.workload.batch_size % sum(network.hosts):
        raise ConfigurationError(
            f"--batch-size {network.workload.batch_size} does not divide among {sum(network.hosts)} processes; give a multiple"
        )
    report = run_benchmark(
        network,
        [make_contender(text) for text in options.contenders],
        rounds=options.rounds,
        timeout_s=options.timeout,
        command=shlex.join(["bench.py", *args]),
        output=Path(options.output),
        verbose=options.verbose,
    )
    report.print()
    print(f"written: {report.write(Path(options.output))}")
    if any(result.failed for result in report.results):
        sys.exit(1)


def run_benchmark(
    network: Network,
    contenders: Sequence[Contender],
    *,
    rounds: int,
    timeout_s: float,
    command: str,
    output: Path,
    verbose: bool,
) -> Report:
    """Run the contenders in turn on one testbed."""
    order = [contender for _ in range(rounds) for contender in contenders]
    order += [contender for contender in contenders if contender.name == FLOOR]  # again at the end, to show drift
    found: dict[str, list[Result]] = {contender.name: [] for contender in contenders}
    with make_bed(network, num_nodes=max(contender.optimizer_nodes for contender in contenders)) as bed:
        for number, contender in enumerate(order, start=1):
            print(f"[{number}/{len(order)}] {contender.title}", end=" ... ", flush=True)
            result = run_contender(bed, contender, network, timeout_s=timeout_s, output=output, verbose=verbose)
            print(f"{show_seconds(result.step_s)} s a step" if result.step_s is not None else "no figures", flush=True)
            found[contender.name].append(result)
    workload, sizes = network.workload, "+".join(map(str, network.hosts))
    return Report(
        results=[join(results) for results in found.values()],
        floor=FLOOR,
        network=(
            f"{sizes} hosts, {' and '.join(f'{share:g}' for share in network.cpu_share)} core each, {network.fast} inside clusters, "
            f"{network.ethernet} across; GPT of {workload.num_parameters / 1e6:.3g} M parameters, batch {workload.batch_size} x "
            f"{workload.sequence_length}"
            + (f" in {workload.microbatches} batches" if workload.microbatches > 1 else "")
        ),
        command=command,
        facts={"hardware": _hardware(), "commit": _commit(), "torch": version("torch"), "rounds": rounds},
        unlike_hosts=len(set(network.cpu_share)) > 1,
    )


def make_bed(network: Network, *, num_nodes: int = 0, node_clusters: Sequence[int] = ()) -> Testbed:
    """The testbed of a network, not yet built. Optimizer nodes are on hosts of their own: one in each of the clusters
    ``node_clusters`` (indices), with the cards of the cluster's other hosts, too; the rest are in no cluster, with Ethernet only."""
    topology = network.make_topology()
    ethernet = Nic(name=_ETHERNET, kind="ethernet", bandwidth_bytes_per_s=network.node_rate)
    clusters = list(topology.clusters)
    for number, place in enumerate(node_clusters):
        host = Host(name=f"{_NODE}{number}", devices=1, nics=(clusters[place].hosts[0].nics[0], ethernet))
        clusters[place] = dataclasses.replace(clusters[place], hosts=(*clusters[place].hosts, host))
    outside = range(len(node_clusters), num_nodes)
    if outside:
        hosts = tuple(Host(name=f"{_NODE}{number}", devices=1, nics=(ethernet,)) for number in outside)
        clusters.append(Cluster(name="optimizer-nodes", hosts=hosts))
    topology = dataclasses.replace(topology, clusters=tuple(clusters))
    return Testbed(topology, TestbedOptions(host_cpu_shares=network.host_cpu_shares(topology), precedence=True))


def run_contender(
    bed: Testbed,
    contender: Contender,
    network: Network,
    *,
    timeout_s: float,
    output: Path | None = None,
    verbose: bool = False,
) -> Result:
    """Run one contender once. output: what the Trainer writes there stays (the timeline, with monitor=True)."""
    if (why_not := contender.why_not()) is not None:
        return Result(name=contender.name, title=contender.title, problem=why_not, can_run=False)
    topology, workload = network.make_topology(), network.workload
    names = [host.name for host in topology.hosts]
    clusters = {host.name: host.cluster for host in bed.layout.hosts}
    with tempfile.TemporaryDirectory(prefix="holmes-bench-") as folder_name:
        folder = Path(folder_name)
        job = {"world_size": len(names), "workload": dataclasses.asdict(workload)}
        (folder / "job.json").write_text(json.dumps({**job, "output": str((output or folder).resolve())}))
        echo = (lambda host, line: print(f"[{host}] {line}", flush=True)) if verbose else None
        with_nodes = contender.optimizer_nodes > 0
        env = {
            "WANDB_MODE": "offline",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
            **contender.env,
            **({SECRET: secrets.token_hex(16)} if with_nodes else {}),
        }

        def of_host(host: str) -> dict[str, str]:
            found = {"GLOO_SOCKET_IFNAME": bed.ethernet_interface(host)} if contender.gloo_on_ethernet else {}
            if with_nodes and clusters[host] != "optimizer-nodes":
                found["HOLMES_CLUSTER"] = clusters[host]
            return found

        with optimizer_nodes(
            bed, contender, master=names[0], env=env, host_env=of_host, timeout_s=timeout_s, echo=echo
        ):
            results = bed.torchrun(
                [str(TESTS / "benchmarks" / "bench_worker.py"), contender.name, str(folder)],
                nproc_per_node=1,
                shuffle_nodes=not with_nodes,  # nodes are given the address of rank 0
                hosts=names,
                env=env,
                host_env=of_host,
                folder=folder,
                timeout_s=timeout_s,
                echo=echo,
            )
        try:
            raise_if_failed(results, timeout_s)
        except TestbedError as error:
            return Result(name=contender.name, title=contender.title, problem=str(error))
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(len(names))]
    return Result(
        name=contender.name,
        title=contender.title,
        rank_steps_s=[rank["steps_s"] for rank in ranks],
        ethernet_bytes=max(rank["sent_bytes"][_ETHERNET] for rank in ranks) / workload.steps,
        fast_bytes=max(sum(rank["sent_bytes"].values()) - rank["sent_bytes"][_ETHERNET] for rank in ranks)
        / workload.steps,
        peak_bytes=max(rank["peak_bytes"] for rank in ranks),
        plans=[] if ranks[0]["plan"] is None else [ranks[0]["plan"]],
    )


@contextlib.contextmanager
def optimizer_nodes(
    bed: Testbed,
    contender: Contender,
    *,
    master: str,
    env: dict[str, str],
    host_env: Callable[[str], dict[str, str]],
    timeout_s: float,
    echo: Callable[[str, str], None] | None,
) -> Generator[None, None, None]:
    """Run the contender's optimizer nodes on their hosts while the context is entered; they end with the job."""
    address = f"{bed.layout.host(master).ethernet.address}:{DEFAULT_PORT}"
    python = os.environ.get("PYTHON_EXEC", sys.executable)

    def serve(number: int) -> None:
        command = [python, "-m", "lightning_holmes.optim.node", address, str(number)]
        bed.run(command, hosts=[f"{_NODE}{number}"], env=env, host_env=host_env, timeout_s=timeout_s, echo=echo)

    with ThreadPoolExecutor(max_workers=max(1, contender.optimizer_nodes)) as pool:
        served = [pool.submit(serve, number) for number in range(contender.optimizer_nodes)]
        yield
    for each in served:
        each.result()


def join(results: Sequence[Result]) -> Result:
    """Join the results of one contender's runs: the steps of all runs, the bytes sent of the first successful run."""
    good = [result for result in results if result.problem is None]
    if not good:
        return results[0]
    problems = [result.problem for result in results if result.problem is not None]
    of_ranks = zip(*(result.rank_steps_s for result in good), strict=True)
    return dataclasses.replace(
        good[0],
        rank_steps_s=[[seconds for steps in of_rank for seconds in steps] for of_rank in of_ranks],
        peak_bytes=max(result.peak_bytes for result in good),
        plans=[plan for result in good for plan in result.plans],
        problem=f"{len(problems)} of {len(results)} runs failed: {problems[0]}" if problems else None,
    )


def _hardware() -> str:
    """The processor's model and number of cores."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores"


def _commit() -> str:
    command = ["git", "-C", str(TESTS), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


if __name__ == "__main__":
    main(sys.argv[1:])
