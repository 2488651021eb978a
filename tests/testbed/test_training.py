"""Training on testbeds: clusters are found by themselves, gradients use fast cards, losses equal those of one process."""

import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import forked_executable, forked_python
from training_worker import FEATURES, ROWS, STEPS, Stack, train

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from testbed import Testbed, TestbedOptions

pytestmark = [
    pytest.mark.usefixtures("testbed_works"),
    pytest.mark.xdist_group("testbed_training"),
    pytest.mark.timeout(900),
]
WORKER = Path(__file__).with_name("training_worker.py")
FAST, SLOW = 125e6, 12.5e6  # 1 Gbit/s and 100 Mbit/s
ETHERNET = Nic(name="eth0", kind="ethernet", bandwidth_bytes_per_s=SLOW)


def cluster(name: str, count: int, *kinds: str) -> Cluster:
    cards = tuple(Nic(name=f"mlx5_{i}", kind=kind, bandwidth_bytes_per_s=FAST) for i, kind in enumerate(kinds))  # type: ignore[arg-type]
    hosts = tuple(Host(name=f"{name}{index}", devices=1, nics=(*cards, ETHERNET)) for index in range(count))
    return Cluster(name=name, hosts=hosts)


@cache
def plain() -> tuple[tuple[float, ...], float]:
    """Return the losses and weights of one process."""
    trainer, watch = train()
    weights = float(sum(p.detach().double().abs().sum() for p in trainer.lightning_module.parameters()))
    return tuple(watch.losses), weights


@dataclass
class Outcome:
    """The results of the ranks, by rank, and the host of each."""

    ranks: list[dict[str, Any]]
    hosts: list[str]

    @property
    def stages(self) -> list[set[str]]:
        """Return the hosts of each stage."""
        return [{self.hosts[rank] for rank in row} for row in self.ranks[0]["grid"]]

    def transports(self, axis: str) -> dict[frozenset[str], str]:
        """Return, for each group of an axis and by its hosts, its transport with the reason."""
        return {
            frozenset(self.hosts[rank] for rank in ranks): f"{transport}: {reason}"
            for kind, ranks, transport, reason in self.ranks[0]["groups"]
            if kind == axis
        }


def run(
    clusters: Sequence[Cluster],
    tmp_path: Path,
    *,
    order: Sequence[str],
    prepare: Callable[[Testbed], Any] = lambda bed: None,
    host_env: Callable[[str], Mapping[str, str]] = lambda host: {},
    torchrun: bool = False,
    strategy: Mapping[str, Any] | None = None,
) -> Outcome:
    """Train on a testbed of ``clusters``, with nodes numbered in ``order``; check losses and weights against one
    process.

    ``strategy``: its arguments; None: Trainer(strategy="holmes").
    """
    options = json.dumps({"num_nodes": len(order), "strategy": strategy})
    folder = tmp_path / "found"
    folder.mkdir()
    with Testbed(Topology(clusters=tuple(clusters)), TestbedOptions()) as bed:
        prepare(bed)
        command = [str(WORKER), str(folder), options]
        bed.run(
            command if torchrun else [*forked_python(), *command],
            processes_per_host=1 if torchrun else None,
            node_order=order,
            env={"PYTHON_EXEC": forked_executable()},  # the executable that torchrun starts
            host_env=host_env,
            timeout_s=200,
            check=True,
        )
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(len(order))]
    losses, weights = plain()
    for found in ranks:
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["weights"] == pytest.approx(weights, rel=1e-6)
        assert found["grid"] == ranks[0]["grid"]
        names, coordinate = found["mesh"]
        assert names == ["pipeline", "data_parallel", "tensor_parallel"]
        assert found["grid"][coordinate[0]][coordinate[1]] == found["rank"] and coordinate[2] == 0
    return Outcome(ranks, list(order))


def check_counters(outcome: Outcome, *, ethernet: Sequence[str] = ()) -> None:
    """Compare the bytes that each card has sent with the computed ones: gradients and activations inside a cluster
    use its fast cards, everything else uses Ethernet.

    Two replicas, so that each of them sends every gradient once; activations go from stage to stage, their gradients
    back. At batches 2 and 4 a trial sends four samples, and twice two of them, forward. The plan may give a rank several
    stages. A host is named after its cluster. ``ethernet``: clusters without working fast cards.
    """
    ranks, hosts = outcome.ranks, outcome.hosts
    grid, rows = ranks[0]["grid"], ranks[0]["rows"]
    activations = 4 * (12 // len(grid[0])) * ROWS * FEATURES * (STEPS - 1)
    trials = 4 * 2 * (4 + 2 + 2) * ROWS * FEATURES if ranks[0]["num_microbatches"] > 1 else 0

    def card(rank: int, other: int) -> str:
        own, peer = hosts[rank].rstrip("0123456789"), hosts[other].rstrip("0123456789")
        return "fast" if own == peer and own not in ethernet else "eth0"

    for rank, found in enumerate(ranks):
        mine, place = next((number, row.index(rank)) for number, row in enumerate(grid) if rank in row)
        num_layers = sum(count for row, count in zip(rows, found["layers"], strict=True) if row == mine)
        parameters = num_layers * (FEATURES * FEATURES + FEATURES) + (FEATURES + 1) * (rows[-1] == mine)
        computed = {"fast": 0, "eth0": 0}
        for other in grid[mine]:
            computed[card(rank, other)] += 4 * parameters * (STEPS - 1) if other != rank else 0
        for source, target in itertools.pairwise(rows):
            if source != target and mine in (source, target):
                other = grid[target if mine == source else source][place]
                computed[card(rank, other)] += activations + trials * (mine == source)
        sent = {"eth0": found["sent"]["eth0"], "fast": 0}
        sent["fast"] = sum(count for name, count in found["sent"].items() if name.startswith(("ib", "roce")))
        facts = f"rank {rank} on {hosts[rank]}: sent {sent}, computed {computed}"
        for name, volume in computed.items():
            # where no bytes are computed: control messages, and bytes that a shaped queue held back
            assert volume <= sent[name] <= 1.1 * volume + 0.05 * activations * (volume == 0), facts


def test_two_clusters_found_by_themselves_keep_gradients_on_their_fast_cards(tmp_path: Path) -> None:
    clusters = [cluster("ib", 2, "infiniband"), cluster("roce", 2, "roce")]
    order = ["roce1", "ib0", "roce0", "ib1"]
    outcome = run(clusters, tmp_path, order=order, torchrun=True, strategy=None)
    assert sorted(map(sorted, outcome.stages)) == [["ib0", "ib1"], ["roce0", "roce1"]]
    assert any("FLOPs counted" in note for note in outcome.ranks[0]["notes"]), outcome.ranks[0]["notes"]
    data = outcome.transports("data_parallel")
    assert data[frozenset({"ib0", "ib1"})].startswith("gloo on ib0: gradients of one stage; infiniband")
    assert data[frozenset({"roce0", "roce1"})].startswith("gloo on roce0: gradients of one stage; roce")
    assert all("gloo on eth0" in text and "crosses" in text for text in outcome.transports("pipeline").values())
    control = outcome.transports("messages") | outcome.transports("world")
    assert len(control) == 3 and all(text.startswith("gloo on eth0: ") for text in control.values())
    check_counters(outcome)


def test_three_clusters_one_without_rdma(tmp_path: Path) -> None:
    clusters = [cluster("a", 2, "infiniband"), cluster("b", 2, "roce"), cluster("c", 2)]
    outcome = run(clusters, tmp_path, order=["c0", "a1", "b0", "b1", "c1", "a0"])
    assert outcome.stages == [{"a0", "a1"}, {"b0", "b1"}, {"c0", "c1"}]
    assert all("gloo on eth0" in text for text in outcome.transports("pipeline").values())
    data = outcome.transports("data_parallel")
    assert "no RDMA card" in data[frozenset({"c0", "c1"})]
    check_counters(outcome, ethernet=["c"])


def test_clusters_of_unlike_sizes_share_out_stages_of_equal_size(tmp_path: Path) -> None:
    clusters = [cluster("a", 2, "infiniband"), cluster("b", 4, "roce")]
    outcome = run(clusters, tmp_path, order=["b3", "a1", "b0", "b1", "a0", "b2"])
    assert len(outcome.stages) == 3 and {"a0", "a1"} in outcome.stages
    assert any("a stage of 2 ranks divides every cluster" in note for note in outcome.ranks[0]["notes"])
    used = outcome.transports("data_parallel").values()
    assert sorted(text.split(":")[0] for text in used) == ["gloo on ib0", "gloo on roce0", "gloo on roce0"]
    inside = [hosts for hosts in outcome.transports("pipeline") if all(h.startswith("b") for h in hosts)]
    assert inside and all("gloo on roce0" in outcome.transports("pipeline")[hosts] for hosts in inside)
    check_counters(outcome)


def test_only_ethernet_and_a_cluster_named_by_hand(tmp_path: Path) -> None:
    """Without RDMA all hosts of a subnet are one cluster, unless HOLMES_CLUSTER says otherwise."""
    clusters = [cluster("a", 1), cluster("b", 1)]
    (tmp_path / "alone").mkdir()
    alone = run(clusters, tmp_path / "alone", order=["b0", "a0"])
    assert alone.stages == [{"a0", "b0"}]
    assert "no RDMA card" in alone.transports("data_parallel")[frozenset({"a0", "b0"})]
    named = run(clusters, tmp_path, order=["b0", "a0"], host_env=lambda host: {"HOLMES_CLUSTER": host})
    assert sorted(map(sorted, named.stages)) == [["a0"], ["b0"]] and sorted(named.ranks[0]["clusters"]) == ["a0", "b0"]


def test_a_fast_card_that_is_down_sends_its_group_to_ethernet_with_a_warning(tmp_path: Path) -> None:
    clusters = [cluster("ib", 2, "infiniband"), cluster("roce", 2, "roce")]
    outcome = run(
        clusters,
        tmp_path,
        order=["roce1", "ib0", "roce0", "ib1"],
        prepare=lambda bed: bed.set_down("ib1.mlx5_0"),
        strategy={"save_distributed_checkpoint": False},
    )
    assert sorted(map(sorted, outcome.stages)) == [["ib0", "ib1"], ["roce0", "roce1"]]
    data = outcome.transports("data_parallel")
    assert "gloo on eth0" in data[frozenset({"ib0", "ib1"})] and "down" in data[frozenset({"ib0", "ib1"})]
    assert data[frozenset({"roce0", "roce1"})].startswith("gloo on roce0")
    assert any("mlx5_0" in text for text in outcome.ranks[0]["warnings"])
    check_counters(outcome, ethernet=["ib"])
    # rank 0, which writes the file, does not hold the first stage; the ranks of a stage ascend
    assert outcome.ranks[0]["grid"] == [[1, 3], [0, 2]]
    saved = torch.load(tmp_path / "found" / "run.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(Stack().state_dict())
    weights = float(sum(value.double().abs().sum() for value in saved["state_dict"].values()))
    assert weights == pytest.approx(plain()[1], rel=1e-6)
    assert len(saved["optimizer_states"][0]["state"]) == len(list(Stack().parameters()))
    assert len(Stack().layers) == sum(outcome.ranks[0]["layers"])


def test_a_topology_file_wins_over_what_is_found(tmp_path: Path) -> None:
    clusters = [cluster("ib", 2, "infiniband")]
    path = tmp_path / "topology.yaml"
    path.write_text(
        "clusters:\n- name: first\n  hosts: [{name: ib1, devices: 1}]\n- name: second\n  hosts: [{name: ib0, devices: 1}]\n"
    )
    outcome = run(clusters, tmp_path, order=["ib0", "ib1"], strategy={"topology": str(path)})
    assert outcome.stages == [{"ib1"}, {"ib0"}] and outcome.ranks[0]["clusters"] == ["first", "second"]


def test_the_users_interface_carries_all_and_one_that_ends_at_the_border_is_refused(tmp_path: Path) -> None:
    clusters = [cluster("a", 2, "infiniband")]
    outcome = run(clusters, tmp_path, order=["a1", "a0"], host_env=lambda host: {"GLOO_SOCKET_IFNAME": "eth0"})
    used = outcome.transports("data_parallel")[frozenset({"a0", "a1"})]
    assert used.startswith("gloo on eth0:") and "GLOO_SOCKET_IFNAME=eth0 in the environment is respected" in used
    check_counters(outcome, ethernet=["a"])
    apart = [cluster("a", 1, "infiniband"), cluster("b", 1, "roce")]
    with Testbed(Topology(clusters=tuple(apart)), TestbedOptions()) as bed:
        cards = {"a0": "ib0", "b0": "roce0"}
        given = {"num_nodes": 2, "strategy": {}}
        output = output_of_failure(bed, tmp_path, given, host_env=lambda host: {"GLOO_SOCKET_IFNAME": cards[host]})
    for name, card, host in (("ib0", "infiniband", "a0"), ("roce0", "roce", "b0")):
        assert f"GLOO_SOCKET_IFNAME={name} in the environment means {name} on host {host}" in output, output[-3000:]
        assert f"the group of ranks 0, 1 cannot be connected: {card} card mlx5_0, which ends there" in output


def test_what_one_host_refuses_is_told_on_the_others(tmp_path: Path) -> None:
    with Testbed(Topology(clusters=(cluster("a", 1, "roce"), cluster("b", 1, "roce"))), TestbedOptions()) as bed:
        results = bed.run(
            [*forked_python(), str(WORKER), str(tmp_path), json.dumps({"num_nodes": 2, "strategy": {}})],
            host_env=lambda host: {"GLOO_SOCKET_IFNAME": "nowhere0"} if host == "a0" else {},
            timeout_s=60,
        )
    for host, result in results.items():
        assert result.exit_code and not result.timed_out, host
        assert "GLOO_SOCKET_IFNAME=nowhere0 in the environment: host a0 has no interface" in result.output, host


def test_listeners_keep_to_the_kernels_port_range_and_only_pairs_that_talk_are_connected(tmp_path: Path) -> None:
    clusters = [cluster("a", 4, "infiniband"), cluster("b", 4, "roce")]
    order = ["b3", "a1", "b0", "b1", "a0", "b2", "a2", "a3"]
    of_address: dict[str, str] = {}

    def narrow(bed: Testbed) -> None:
        """Set the kernel's port range."""
        code = "open('/proc/sys/net/ipv4/ip_local_port_range', 'w').write('21000 21999')"
        bed.run([sys.executable, "-c", code], check=True)
        of_address.update({nic.address: host.name for host in bed.layout.hosts for nic in host.nics})

    outcome = run(clusters, tmp_path, order=order, prepare=narrow)
    grid, world = outcome.ranks[0]["grid"], len(order)
    assert len(grid) == 2
    pairs = set()
    for rank, found in enumerate(outcome.ranks):
        assert found["opened"] and all(21000 <= port <= 21999 for port in found["opened"]), "of this package"
        assert found["listening"] and all(21000 <= port <= 21999 for port in found["listening"]), "gloo's"
        pairs |= {(rank, order.index(of_address[address])) for address in found["peers"]}
    across = {(one, other) for one, other in pairs if order[one][0] != order[other][0]}
    pipelines = {ends for column in zip(*grid, strict=True) for ends in (column, column[::-1])}
    # WORLD's collectives use rings and powers of two
    rings = {(one, (one + sign * step) % world) for one in range(world) for step in (1, 2, 4) for sign in (1, -1)}
    assert pipelines <= across <= pipelines | rings
    assert len(across) < 2 * 4 * 4, "not everyone with everyone"


def swallow(bed: Testbed, interface: str, addresses: Mapping[str, str], one: str, other: str) -> None:
    """Route the packets of two hosts to each other's addresses to a card that does not exist."""
    for host, peer in ((one, other), (other, one)):
        code = (
            f"import pyroute2; ip = pyroute2.IPRoute(); index = ip.link_lookup(ifname={interface!r})[0]\n"
            f"ip.neigh('replace', dst={addresses[peer]!r}, lladdr='02:00:00:00:00:99', ifindex=index, state=0x80)"
        )
        bed.run([sys.executable, "-c", code], hosts=[host], check=True)


def output_of_failure(bed: Testbed, folder: Path, given: dict[str, Any], **options: Any) -> str:
    """Return what all hosts print in a run that fails on each of them."""
    command = [*forked_python(), str(WORKER), str(folder), json.dumps(given)]
    results = bed.run(command, timeout_s=150, **options)
    assert all(result.exit_code for result in results.values())
    return "".join(result.output for result in results.values())


def test_a_blocked_connection_is_named_with_both_ends_interface_and_port(tmp_path: Path) -> None:
    """The topology file says that two hosts share a fabric, but packets of the fast cards are dropped between them."""
    hosts = cluster("ib", 2, "infiniband")
    path = tmp_path / "topology.yaml"
    path.write_text("clusters:\n- name: only\n  hosts: [{name: ib0, devices: 1}, {name: ib1, devices: 1}]\n")
    with Testbed(Topology(clusters=(hosts,)), TestbedOptions()) as bed:
        fast = {host.name: host.nics[0].address for host in bed.layout.hosts}
        swallow(bed, "ib0", fast, "ib0", "ib1")
        output = output_of_failure(bed, tmp_path, {"num_nodes": 2, "strategy": {"topology": str(path)}, "timeout_s": 6})
    assert "UnreachableError: a group of 2 ranks cannot be connected" in output, output[-3000:]
    for host, rank in (("ib0", 0), ("ib1", 1)):
        assert f"rank {rank} on {host} (ib0 {fast[host]})" in output
    for address in fast.values():
        assert re.search(rf"it listens on {re.escape(address)}:\d{{4,5}}\b", output), output[-3000:]


def test_a_blocked_connection_of_all_ranks_says_what_finds_it(tmp_path: Path) -> None:
    """Two hosts reach the master, but not each other: the error says which group waited, and what tries every connection."""
    with Testbed(Topology(clusters=(cluster("e", 3),)), TestbedOptions()) as bed:
        addresses = {host.name: host.nics[0].address for host in bed.layout.hosts}
        swallow(bed, "eth0", addresses, "e1", "e2")
        output = output_of_failure(
            bed, tmp_path, {"num_nodes": 3, "strategy": {"pipeline_parallel_size": 3}, "timeout_s": 6}
        )
    assert re.search(
        r"ConnectionLostError: connection lost on rank \d in the group of all ranks: nothing came", output
    ), output[-3000:]
    assert "`lightning-holmes topology` under torchrun tries every connection" in output
