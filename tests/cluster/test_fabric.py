"""Grouping: which hosts form one cluster, for every kind of evidence."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_holmes.cluster.fabric import NicEnd, group_hosts
from lightning_holmes.cluster.hardware import HostInventory
from lightning_holmes.cluster.interfaces import Interface
from lightning_holmes.cluster.rdma import DEFAULT_PREFIX, RdmaPort
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError


def infiniband(
    *,
    prefix: str | None = DEFAULT_PREFIX,
    lid: int | None = 1,
    ip: str | None = None,
    up: bool = True,
    name: str = "mlx5_0",
) -> RdmaPort:
    return RdmaPort(
        name=name,
        kind="infiniband",
        rate_bytes_per_s=25e9,
        state="ACTIVE" if up else "DOWN",
        up=up,
        sm_lid=lid if up else None,
        subnet_prefix=prefix,
        interface="ib0" if ip else None,
        addresses=(ip,) if ip else (),
    )


def roce(ip: str | None, *, up: bool = True, name: str = "mlx5_1", rate: float = 12.5e9) -> RdmaPort:
    return RdmaPort(
        name=name,
        kind="roce",
        rate_bytes_per_s=rate,
        state="ACTIVE",
        up=up,
        interface="fast0",
        addresses=(ip,) if ip else (),
    )


def host(name: str, *rdma: RdmaPort, eth: str | None = "10.0.0.{}/24", **more: object) -> HostInventory:
    number = sum(map(ord, name)) % 200 + 1
    interfaces = [Interface(name="eth0", kind="ethernet", up=True, addresses=(eth.format(number),))] if eth else []
    return replace(
        HostInventory(
            name=name, identity=name, rdma=rdma, interfaces=tuple(interfaces), main_interface="eth0" if eth else None
        ),
        **more,  # type: ignore[arg-type]
    )


def clusters(topology: Topology) -> dict[str, str]:
    return {cluster.name: " ".join(host.name for host in cluster.hosts) for cluster in topology.clusters}


def group(inventories: Sequence[HostInventory], apart: Sequence[tuple[str, str]] = (), tests: bool = False) -> Topology:
    """Group hosts with connection tests: all pairs reach each other except those in ``apart``."""

    def reachable(one: NicEnd, other: NicEnd) -> bool | None:
        separate = (one.host, other.host) in apart or (other.host, one.host) in apart
        return not separate if tests or apart else None

    return group_hosts(inventories, reachable=reachable)


def test_infiniband_here_roce_there_in_any_order_of_ranks() -> None:
    inventories = [
        *[host(f"ib{index}", infiniband()) for index in (1, 2, 10)],
        *[host(f"ro{index}", roce(f"10.7.0.{index}/16")) for index in (1, 2)],
    ] * 2
    expected = group(inventories)
    assert clusters(expected) == {"infiniband": "ib1 ib2 ib10", "roce": "ro1 ro2"}
    assert [cluster.fabric for cluster in expected.clusters] == ["infiniband", "roce"]
    assert expected.warnings == ()
    for seed in range(5):
        order = list(range(len(inventories)))
        random.Random(seed).shuffle(order)
        shuffled = group([inventories[index] for index in order])
        assert clusters(shuffled) == clusters(expected)
        for rank, index in enumerate(order):
            assert shuffled.host_of_rank(rank).name == inventories[index].name
        plain = [replace(h, ranks=None) for h in shuffled.hosts]
        assert plain == [replace(h, ranks=None) for h in expected.hosts]
    nic = expected.host_of_rank(3).nics[0]
    assert (nic.fabric, nic.addresses, nic.up) == ("roce/10.7.0.0/16", ("10.7.0.1",), True)


def test_three_unequal_clusters_one_without_rdma() -> None:
    topology = group(
        [
            *[host(f"a{index}", infiniband(prefix="fec0:0000:0000:0001")) for index in range(2)],
            *[host(f"b{index}", infiniband(prefix="fec0:0000:0000:0002")) for index in range(4)],
            *[host(f"c{index}") for index in range(3)],
        ]
    )
    assert clusters(topology) == {"infiniband-1": "a0 a1", "infiniband-2": "b0 b1 b2 b3", "ethernet": "c0 c1 c2"}
    assert topology.clusters[2].fabric == "ethernet"


def test_all_ethernet() -> None:
    assert clusters(group([host("a"), host("b")])) == {"ethernet": "a b"}
    apart = group([host("a"), host("b", eth="10.1.0.{}/24"), host("c")])
    assert clusters(apart) == {"ethernet-1": "a c", "ethernet-2": "b"}
    # host routes, as some clouds configure, say nothing about the subnet
    assert clusters(group([host("a", eth="10.0.0.{}/32"), host("b", eth="10.0.7.{}/32")])) == {"ethernet": "a b"}
    assert clusters(group([host("a", eth=None), host("b", eth=None)])) == {"ethernet-1": "a", "ethernet-2": "b"}


def test_connection_tests_part_what_hints_join() -> None:
    inventories = [host(name, infiniband(ip=f"10.8.0.{index}/24")) for index, name in enumerate("abcd", start=1)]
    assert clusters(group(inventories)) == {"infiniband": "a b c d"}
    topology = group(inventories, apart=[("a", "c"), ("a", "d")])
    assert clusters(topology) == {"infiniband-1": "a b", "infiniband-2": "c d"}
    assert "c (mlx5_0)" in topology.warnings[0] and "HOLMES_CLUSTER" in topology.warnings[0]
    fabrics = [cluster.hosts[0].nics[0].fabric for cluster in topology.clusters]
    assert fabrics == [f"infiniband/{DEFAULT_PREFIX}/1#1", f"infiniband/{DEFAULT_PREFIX}/1#2"]


def test_the_same_private_address_twice_is_two_networks() -> None:
    inventories = [host("a", roce("10.8.0.1/24")), host("b", roce("10.8.0.2/24")), host("c", roce("10.8.0.1/24"))]
    assert len(group(inventories).clusters) == 2


def test_a_host_with_two_fabrics_goes_to_the_faster_then_the_larger() -> None:
    ib = [host(f"ib{index}", infiniband()) for index in range(2)]
    ro = [host(f"ro{index}", roce(f"10.7.0.{index}/24", rate=25e9)) for index in range(3)]
    slow, alike = (host("gate", infiniband(), roce("10.7.0.9/24", rate=rate)) for rate in (12.5e9, 25e9))
    assert clusters(group([slow, *ib, *ro])) == {"infiniband": "gate ib0 ib1", "roce": "ro0 ro1 ro2"}
    assert clusters(group([alike, *ib, *ro])) == {"infiniband": "ib0 ib1", "roce": "gate ro0 ro1 ro2"}
    assert clusters(group([alike, *ib, *ro[:2]])) == {"infiniband": "gate ib0 ib1", "roce": "ro0 ro1"}
    alone = host("gate", infiniband(), roce("10.9.0.9/24", rate=100e9))  # the fastest card, which no other host shares
    assert clusters(group([alone, *ib])) == {"infiniband": "gate ib0 ib1"}
    both = [host(f"h{index}", infiniband(), roce(f"10.7.0.{index}/24")) for index in range(2)]
    (cluster,) = group(both).clusters
    assert cluster.fabric == "infiniband"
    assert [nic.fabric for nic in cluster.hosts[0].nics][1] == "roce/10.7.0.0/24"


@pytest.mark.parametrize("hosts_each", [1, 4])
@pytest.mark.parametrize("below", ["bond0", "enp1s0", "bond0.100"])
def test_an_rdma_card_that_carries_all_traffic_joins_no_two_sites(hosts_each: int, below: str) -> None:
    """Two sites of InfiniBand whose Ethernet, a bond of a card that can do RDMA, too, is one network of 25 Gbit/s."""
    ethernet = replace(roce("10.0.0.1/24", rate=3.125e9, name="mlx5_bond_0"), interface=below.partition(".")[0])
    main = Interface(
        name="bond0" if below == "enp1s0" else below,
        kind="bond",
        up=True,
        addresses=("10.0.0.1/24",),
        members=("enp1s0", "enp1s1"),
    )

    def site(name: str, fabric: RdmaPort, first: int) -> list[HostInventory]:
        return [
            host(
                f"{name}{index}",
                fabric,
                replace(ethernet, addresses=(f"10.0.0.{first + index}/24",)),
                interfaces=(main,),
                main_interface=main.name,
            )
            for index in range(hosts_each)
        ]

    north, south = infiniband(prefix="fec0:0000:0000:0001"), infiniband(prefix="fec0:0000:0000:0002")
    topology = group([*site("north", north, 1), *site("south", south, 101)])
    assert [cluster.fabric for cluster in topology.clusters] == ["infiniband", "infiniband"]
    assert [len(cluster.hosts) for cluster in topology.clusters] == [hosts_each, hosts_each]
    # hosts that have no other card share its network as ever
    plain = [replace(found, rdma=found.rdma[1:]) for found in site("plain", north, 201)]
    assert clusters(group(plain)) == {"roce": " ".join(found.name for found in plain)}


def test_rails_make_one_cluster() -> None:
    hosts = [
        host(f"h{index}", *[roce(f"10.{rail}.0.{index + 1}/24", name=f"mlx5_{rail}") for rail in range(8)])
        for index in range(4)
    ]
    (cluster,) = group(hosts).clusters
    assert len(cluster.hosts) == 4 and cluster.fabric == "roce"
    assert len({nic.fabric for nic in cluster.hosts[0].nics if nic.kind == "roce"}) == 8


@pytest.mark.parametrize(
    ("up", "down"),
    [
        (roce("10.7.0.1/24"), roce("10.7.0.2/24", up=False)),
        (infiniband(ip="10.7.0.1/24"), infiniband(ip="10.7.0.2/24", up=False)),
        (infiniband(prefix="fec0:0000:0000:0001"), infiniband(prefix="fec0:0000:0000:0001", up=False)),
    ],
)
def test_a_down_nic_still_hints_at_its_fabric(up: RdmaPort, down: RdmaPort) -> None:
    other = infiniband(prefix="fec0:0000:0000:0009") if up.kind == "infiniband" else infiniband()
    topology = group([host("x", other), host("y", other), host("a", up), host("b", down)])
    name = f"{up.kind}-1" if other.kind == up.kind else up.kind
    by_hosts = {hosts: name for name, hosts in clusters(topology).items()}
    assert set(by_hosts) == {"a b", "x y"} and by_hosts["a b"] == name
    cluster = topology.cluster_of_rank(3)
    assert cluster.fabric == up.kind
    assert cluster.fallback is not None and "host b: " in cluster.fallback and "is down" in cluster.fallback
    assert any(cluster.fallback in warning and "Ethernet" in warning for warning in topology.warnings)
    nic_a, nic_b = (host.nics[0] for host in cluster.hosts)
    assert (nic_a.up, nic_b.up) == (True, False) and nic_a.fabric == nic_b.fabric
    assert topology.cluster_of_rank(0).fallback is None


def test_down_nics_without_evidence() -> None:
    # only the default prefix and a common Ethernet: a minority joins; if as many hosts are up as down, they do not
    up, down = infiniband(), infiniband(up=False)
    assert clusters(group([host("a", up), host("b", up), host("c", down)])) == {"infiniband": "a b c"}
    assert clusters(group([host("a", up), host("b", down)])) == {"infiniband": "a", "ethernet": "b"}
    elsewhere = host("c", down, eth="10.9.0.{}/24")
    assert clusters(group([host("a", up), host("b", up), elsewhere])) == {"infiniband": "a b", "ethernet": "c"}
    # all cards are down: no fabric at all
    topology = group([host("a", down), host("b", down)])
    assert clusters(topology) == {"ethernet": "a b"}
    assert any("a: mlx5_0 down" in warning for warning in topology.warnings)
    # another IP subnet is evidence against
    topology = group(
        [host("a", roce("10.7.0.1/24")), host("z", roce("10.7.0.2/24")), host("b", roce("10.8.0.2/24", up=False))]
    )
    assert clusters(topology) == {"roce": "a z", "ethernet": "b"}


def test_a_working_second_fabric_is_better_than_a_down_first_one() -> None:
    hosts = [
        host("a", infiniband(ip="10.1.0.1/24"), roce("10.2.0.1/24")),
        host("b", infiniband(ip="10.1.0.2/24", up=False), roce("10.2.0.2/24")),
    ]
    (cluster,) = group(hosts).clusters
    assert (cluster.fabric, cluster.fallback) == ("roce", None)


def test_holmes_cluster_wins() -> None:
    inventories = [
        host("a", roce("10.1.0.1/24"), cluster="berlin"),
        host("b", roce("10.2.0.1/24"), cluster="berlin"),
        host("c", infiniband(), cluster="roce"),
        host("d", infiniband()),
        host("e", roce("10.3.0.1/24")),
    ]
    topology = group(inventories, apart=[("a", "b")])
    assert clusters(topology) == {"berlin": "a b", "roce": "c", "infiniband": "d", "roce-1": "e"}
    berlin = topology.cluster_of_rank(0)
    assert berlin.fabric == "roce" and berlin.fallback is None
    assert {h.nics[0].fabric for h in berlin.hosts} == {"roce/berlin"}
    mixed = group([replace(inventories[0], cluster="x"), replace(inventories[2], cluster="x")])
    assert mixed.clusters[0].fabric == "ethernet"


def test_host_names() -> None:
    topology = group([host("vm", identity="vm/1"), host("vm", identity="vm/2"), host("vm-1")])
    assert [h.name for h in topology.hosts] == ["vm-1", "vm-2", "vm-3"]
    with pytest.raises(ConfigurationError, match=r"HOLMES_CLUSTER differs .* host a \(rank 0: x, rank 1: None\)"):
        group([host("a", cluster="x"), host("a")])


_PORTS: st.SearchStrategy[Callable[[int], tuple[RdmaPort, ...]]] = st.sampled_from(
    [
        lambda index: (),
        lambda index: (infiniband(),),
        lambda index: (infiniband(up=False),),
        lambda index: (infiniband(prefix="fec0:0000:0000:0001"),),
        lambda index: (roce(f"10.1.0.{index + 1}/24"),),
        lambda index: (roce(f"10.1.0.{index + 1}/24", up=False),),
        lambda index: (roce(f"10.2.0.{index + 1}/24"), infiniband()),
        lambda index: (roce(None),),
    ]
)


@given(
    kinds=st.lists(_PORTS, min_size=1, max_size=10),
    seed=st.integers(0, 1000),
    apart=st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8),
    named=st.sets(st.integers(0, 9), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_every_host_in_one_cluster_whatever_there_is(
    kinds: list[Callable[[int], tuple[RdmaPort, ...]]], seed: int, apart: set[tuple[int, int]], named: set[int]
) -> None:
    inventories = [
        host(f"h{index}", *ports(index), eth=f"10.0.0.{index + 1}/24", cluster="mine" if index in named else None)
        for index, ports in enumerate(kinds)
    ]
    pairs = [(f"h{one}", f"h{other}") for one, other in apart]
    topology = group(inventories, apart=pairs)
    assert sorted(host.name for host in topology.hosts) == sorted(inventory.name for inventory in inventories)
    order = list(range(len(inventories)))
    random.Random(seed).shuffle(order)
    assert clusters(group([inventories[index] for index in order], apart=pairs)) == clusters(topology)
    assert Topology.from_yaml_text(topology.to_yaml()) == topology
    for cluster in topology.clusters:
        if cluster.fabric in ("infiniband", "roce") and cluster.fallback is None:
            shared = [{nic.fabric for nic in h.nics if nic.up and nic.kind == cluster.fabric} for h in cluster.hosts]
            assert set.intersection(*shared)


def test_a_fabric_that_the_user_parts_is_two_fabrics() -> None:
    """Two sites with InfiniBand's default prefix look like one fabric; the message suggests HOLMES_CLUSTER."""
    topology = group([host("a", infiniband(), cluster="north"), host("b", infiniband(), cluster="south")])
    fabrics = {h.name: [nic.fabric for nic in h.nics if nic.kind == "infiniband"] for h in topology.hosts}
    assert fabrics["a"] != fabrics["b"] and None not in fabrics["a"] + fabrics["b"]
