"""Links between workers and an optimizer node that fail in the middle of a step: the run waits or goes on with the
same losses, or all processes end within half a minute with the node's name, and the run resumes from its snapshot.
Cuts that mostly wait are part of `make bench`."""

import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fault_worker import KILLED_AT, STEPS
from launch import forked_python
from test_faults import Cut, losses, plain, run, shown

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from lightning_holmes.optim.node.role import DEFAULT_PORT, SECRET
from testbed import HostResult, Testbed, TestbedOptions

pytestmark = [
    pytest.mark.usefixtures("testbed_works"),
    pytest.mark.xdist_group("testbed_faults"),
    pytest.mark.timeout(900),
]
WORKERS, NODE = ("a0", "a1"), "node0"
NOTICED_S = 30.0


def topology(*, has_near_node: bool) -> Topology:
    """Two workers' hosts with fast cards, and a host for a node: with a fast card in their cluster, or with Ethernet
    only in a separate cluster."""
    ethernet, fast = Nic(name="eth0", kind="ethernet"), Nic(name="mlx5_0", kind="roce")
    hosts = tuple(Host(name=name, devices=1, nics=(fast, ethernet)) for name in WORKERS)
    node = Host(name=NODE, devices=1, nics=(fast, ethernet) if has_near_node else (ethernet,))
    if has_near_node:
        return Topology(clusters=(Cluster(name="a", hosts=(*hosts, node)),))
    return Topology(clusters=(Cluster(name="a", hosts=hosts), Cluster(name="nodes", hosts=(node,))))


class CutAndTell(Cut):
    """A Cut that creates a file when it has cut the link."""

    def __init__(self, bed: Testbed, nic: str, told: Path, seconds: float | None = None) -> None:
        super().__init__(bed, nic, "waiting", seconds)
        self.told = told

    def __call__(self, host: str, line: str) -> None:
        is_first = self.began is None
        super().__call__(host, line)
        if is_first and self.began is not None:
            self.threads[0].join()
            self.told.touch()


def run_with_node(bed: Testbed, folder: Path, **options: Any) -> tuple[dict[str, HostResult], HostResult]:
    """Run workers and a node; return the results of the workers' hosts and of the node's host."""
    env = {SECRET: secrets.token_hex(16), "TORCHELASTIC_RUN_ID": "links"} | options.pop("env", {})
    clusters = {host.name: host.cluster for host in bed.layout.hosts}
    near = {"host_env": lambda host: {"HOLMES_CLUSTER": clusters[host]}}
    master = bed.layout.host(WORKERS[0]).ethernet.address
    node = [*forked_python(), "-m", "lightning_holmes.optim.node", f"{master}:{DEFAULT_PORT}", "0"]
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(bed.run, node, hosts=[NODE], env=env, timeout_s=200, **near)
        given = {"before": forked_python(), "hosts": list(WORKERS), "env": env, "optimizer_nodes": 1} | near | options
        return run(bed, folder, timeout_s=300, **given), serving.result()[NODE]


CUTS: dict[str, dict[str, Any]] = {
    "a worker's Ethernet for some seconds": {"nic": "a1.eth0", "seconds": 5.0},
    "the node's fast card for some seconds": {"nic": f"{NODE}.mlx5_0", "seconds": 5.0, "near": True},
    "the node's Ethernet while it updates layers on disk": {
        "nic": f"{NODE}.eth0",
        "seconds": 5.0,
        "eager": True,
        "optimizer_states": "states",
    },
}
LONG = ("a worker's Ethernet for some seconds",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.benchmark if case in LONG else ()) for case in CUTS]
)
def test_a_link_that_is_cut_for_seconds_in_mid_step_costs_seconds_and_nothing_else(case: str, tmp_path: Path) -> None:
    """The link to the node fails for less than 20 s. Baseline: one process, to 1e-5."""
    about = CUTS[case]
    with Testbed(topology(has_near_node="near" in about), TestbedOptions()) as bed:
        cut = CutAndTell(bed, about["nic"], tmp_path / "cut", about.get("seconds"))
        waits = ("pushing" if about.get("eager") else "training_step", str(tmp_path / "cut"))
        given = {"pipeline": 1} | {key: about[key] for key in about.keys() - {"nic", "seconds", "near"}}
        if "optimizer_states" in given:
            given["optimizer_states"] = str(tmp_path / given["optimizer_states"])
        results, node = run_with_node(bed, tmp_path, echo=cut, waits=waits, **given)
        everything = shown(results | {NODE: node})
        assert cut.began is not None, everything
        cut.end()
    assert all(result.exit_code == 0 for result in (*results.values(), node)), everything
    known = [losses(tmp_path, rank) for rank in range(2)]
    assert {step: (known[0][step] + known[1][step]) / 2 for step in known[0]} == pytest.approx(plain(), rel=1e-5)


@pytest.mark.parametrize(
    ("nic", "eager"), [(f"{NODE}.mlx5_0", False), pytest.param(f"{NODE}.eth0", True, marks=pytest.mark.benchmark)]
)
def test_a_link_to_an_optimizer_node_that_fails_for_longer_ends_all_soon_and_the_run_goes_on_from_its_snapshot(
    nic: str, eager: bool, tmp_path: Path
) -> None:
    """A card fails for good, or a link is cut, also while the node has updated only some layers of a step; at the next
    start, a host that has lost its card uses Ethernet. Baseline: one process, to 1e-5. The timeout is five minutes."""
    waits = ("pushing" if eager else "training_step", str(tmp_path / "cut"))
    options: dict[str, Any] = {"snapshots": str(tmp_path / "memory"), "waits": waits, "eager": eager}
    with Testbed(topology(has_near_node="mlx5" in nic), TestbedOptions()) as bed:
        cut = CutAndTell(bed, nic, tmp_path / "cut")
        results, node = run_with_node(bed, tmp_path, echo=cut, pipeline=1, **options)
        assert cut.end() < NOTICED_S + 10.0, shown(results)  # plus the end of the processes
        everything = shown(results | {NODE: node})
        assert all(result.exit_code for result in (*results.values(), node)), everything
        said = "".join(result.output for result in results.values())
        named = "optimizer node 0 failed: ConnectionLostError: (nothing has been heard of|the fast card roce0 of host)"
        assert re.search(named, said), everything
        if "eth0" in nic:  # no other card reaches rank 0
            bed.set_up(nic)
        again = {"TORCHELASTIC_RESTART_COUNT": "1"}
        results, node = run_with_node(bed, tmp_path, env=again, pipeline=1, **options)
    everything = shown(results | {NODE: node})
    assert all(result.exit_code == 0 for result in (*results.values(), node)), everything
    assert "goes on from the snapshot of step" in results["a0"].output, everything
    before, after = ([losses(tmp_path, rank, attempt=attempt) for rank in range(2)] for attempt in range(2))
    assert KILLED_AT - 1 <= min(after[0]) - 1 <= KILLED_AT + 1 and max(after[0]) == STEPS, everything
    known = [one | other for one, other in zip(before, after, strict=True)]
    means = {step: (known[0][step] + known[1][step]) / 2 for step in known[0]}
    assert list(means) == list(range(1, STEPS + 1)) and means == pytest.approx(plain(), rel=1e-5)
