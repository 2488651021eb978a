"""Ranks build the inventory together: over a store, in threads, with hosts on loopback addresses."""

import time
from dataclasses import replace
from typing import Any

import pytest
from launch import in_threads
from torch.distributed import HashStore

from lightning_holmes.cluster.hardware import HostInventory
from lightning_holmes.cluster.interfaces import Interface
from lightning_holmes.cluster.inventory import Store, discover_topology
from lightning_holmes.cluster.network import Nic
from lightning_holmes.cluster.rdma import RdmaPort
from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.errors import ConfigurationError, HolmesError, RemoteError


@pytest.fixture(autouse=True)
def no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)


def discover(inventories: list[HostInventory], store: Store | None = None, **options: Any) -> list[Any]:
    shared: Store = store or HashStore()
    return in_threads(
        len(inventories),
        lambda rank: discover_topology(shared, rank, len(inventories), local=inventories[rank], **options),
    )


def agreed(results: list[Any]) -> Topology:
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert result == results[0]
    topology = results[0]
    assert isinstance(topology, Topology)
    return topology


def host(name: str, number: int, kind: str | None = None, fast: str | None = None) -> HostInventory:
    # simulated interfaces: a real one would be bound to, and loopback addresses are not reachable through it
    eth = Interface(name="plain0", kind="ethernet", up=True, addresses=(f"127.0.0.{number}/24",), speed_bytes_per_s=1e8)
    port = RdmaPort(
        name="mlx5_0",
        kind="infiniband" if kind == "infiniband" else "roce",
        rate_bytes_per_s=1e9,
        state="ACTIVE",
        up=True,
        sm_lid=1 if kind == "infiniband" else None,
        subnet_prefix="fe80:0000:0000:0000" if kind == "infiniband" else None,
        interface="fast0",
        addresses=(fast or f"127.2.0.{number}/24",),
    )
    return HostInventory(
        name=name, identity=name, rdma=(port,) if kind is not None else (), interfaces=(eth,), main_interface="plain0"
    )


def test_two_clusters_are_found_and_measured() -> None:
    inventories = [
        host("i1", 1, "infiniband"),
        host("r1", 3, "roce"),
        host("i2", 2, "infiniband"),
        host("r2", 4, "roce"),
    ] * 2
    start = time.monotonic()
    topology = agreed(discover(inventories))
    assert time.monotonic() - start < 10
    assert [(cluster.name, [h.ranks for h in cluster.hosts]) for cluster in topology.clusters] == [
        ("infiniband", [(0, 4), (2, 6)]),
        ("roce", [(1, 5), (3, 7)]),
    ]
    assert topology.warnings == ()
    for cluster in topology.clusters:
        assert [(speed.transport, speed.measured) for speed in cluster.speeds] == [
            (cluster.fabric, True),
            ("ethernet", True),
        ]
    (link,) = topology.links
    assert link.ends == ("infiniband", "roce") and link.measured and link.latency_s > 0


def test_a_host_that_is_not_reached_over_its_fabric_is_apart() -> None:
    inventories = [host("a", 1, "roce"), host("b", 2, "roce"), host("c", 3, "roce", fast="127.2.0.250/24")]
    inventories[2] = replace(inventories[2], rdma=(replace(inventories[2].rdma[0], addresses=("203.0.113.7/24",)),))
    # by the hints c is elsewhere; with the same subnet manager it looks alike, but its address does not answer
    alike = [
        replace(
            inventory,
            rdma=(replace(inventory.rdma[0], kind="infiniband", subnet_prefix="fe80:0000:0000:0000", sm_lid=1),),
        )
        for inventory in inventories
    ]
    topology = agreed(discover(alike, measures=False))
    assert [[h.name for h in cluster.hosts] for cluster in topology.clusters] == [["a", "b"], ["c"]]
    assert any("c (mlx5_0)" in warning and "HOLMES_CLUSTER" in warning for warning in topology.warnings)
    assert any("203.0.113.7" in warning for warning in topology.warnings)


def test_without_probe_no_port_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a listener was opened")

    monkeypatch.setattr("lightning_holmes.cluster.inventory.Listener", refuse)
    topology = agreed(discover([host("a", 1, "roce"), host("b", 2, "roce")], connects=False))
    (cluster,) = topology.clusters
    assert [(speed.transport, speed.measured, speed.bandwidth_bytes_per_s) for speed in cluster.speeds] == [
        ("roce", False, 1e9),
        ("ethernet", False, 1e8),
    ]
    agreed(discover([host("a", 1), host("a", 1)]))  # one host: no other host to reach


def test_a_topology_file_wins_and_is_completed() -> None:
    given = Topology(
        clusters=(
            Cluster(name="x", hosts=(Host(name="b", devices=1),)),
            Cluster(
                name="y",
                hosts=(
                    Host(
                        name="a", devices=1, nics=(Nic(name="fast0", kind="roce"), Nic(name="mlx9", kind="infiniband"))
                    ),
                ),
            ),
        ),
        source="t.yaml",
    )
    results = discover([host("a", 1, "infiniband"), host("b", 2, "infiniband")], given=given, connects=False)
    topology = agreed(results)
    assert [topology.cluster_of_rank(rank).name for rank in (0, 1)] == ["y", "x"]
    fast, gone, eth0 = topology.host_of_rank(0).nics
    assert (fast.kind, fast.interface, fast.addresses, fast.up) == ("roce", "fast0", ("127.2.0.1",), True)
    assert (gone.up, eth0.name) == (False, "plain0")
    assert any("mlx9 of host a" in warning and "mlx5_0, plain0" in warning for warning in topology.warnings)
    assert [nic.name for nic in topology.host_of_rank(1).nics] == ["mlx5_0", "plain0"]
    assert [cluster.fabric for cluster in topology.clusters] == ["infiniband", "infiniband"]
    measured = agreed(discover([host("a", 1, "infiniband"), host("b", 2, "infiniband")], given=given))
    assert measured.links[0].measured
    for result in discover([host("q", 1)], given=given, connects=False):
        assert isinstance(result, ConfigurationError) and "t.yaml has the hosts b, a; the job runs on q" in str(result)


def test_a_rank_that_does_not_come_is_named() -> None:
    store, inventory = HashStore(), host("a", 1)
    results = in_threads(4, lambda r: r == 2 or discover_topology(store, r, 4, local=inventory, timeout_s=2.0))
    for rank in (0, 1, 3):
        assert isinstance(results[rank], RemoteError) and "from rank 2 while" in str(results[rank]), results[rank]


@pytest.mark.parametrize("text", ["{", '{"inventory": {"name": 7}}', "[]", '{"error": "ValueError: broken"}', "\xff"])
def test_a_rank_that_sends_nonsense_is_named(text: str) -> None:
    store = HashStore()

    def work(rank: int) -> Any:
        if rank == 1:
            return store.set("holmes/discovery/1/inventory/1", text.encode("latin-1"))
        return discover_topology(store, rank, 3, local=host("a", 1), timeout_s=5)

    results = in_threads(3, work)
    for rank in (0, 2):
        assert isinstance(results[rank], HolmesError) and "rank 1" in str(results[rank])


def test_64_hosts_in_ten_seconds() -> None:
    inventories = [host(f"h{index}", index + 1, "infiniband" if index < 40 else "roce") for index in range(64)]
    start = time.monotonic()
    topology = agreed(discover(inventories))
    seconds = time.monotonic() - start
    assert [len(cluster.hosts) for cluster in topology.clusters] == [40, 24]
    assert topology.warnings == ()
    print(f"64 hosts found and measured: {seconds:.1f} s")
    assert seconds < 10, seconds
