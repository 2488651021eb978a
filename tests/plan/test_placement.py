"""Placements: pipelines cross clusters, gradients stay inside them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from counting import count_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import topology_of

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology, TransportKind
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.groups import GroupPlan, plan_groups
from lightning_holmes.plan.placement import (
    Placement,
    choose_pipeline_size,
    clusters_of,
    crossing_groups,
    make_placement,
)


def test_two_clusters() -> None:
    topology = topology_of(a=4, b=4)
    placement = make_placement(topology, world_size=8, pipeline_parallel_size=2)
    assert placement == Placement(((0, 1, 2, 3), (4, 5, 6, 7)))
    assert placement.data_parallel_group(1) == (4, 5, 6, 7)
    assert placement.pipeline_group(2) == (2, 6)
    assert (placement.pipeline_parallel_size, placement.data_parallel_size) == (2, 4)
    for rank in range(8):
        pipeline_rank, data_parallel_rank, tensor_parallel_rank = placement.coordinate(rank)
        assert placement.grid[pipeline_rank][data_parallel_rank] == rank and tensor_parallel_rank == 0
    assert [clusters_of(placement, topology, stage) for stage in (0, 1)] == [("a",), ("b",)]


def test_refused() -> None:
    topology = topology_of(a=4, b=4)
    with pytest.raises(ConfigurationError, match=r"pipeline_parallel_size=3 .* world size 8; .*: 1, 2, 4, 8"):
        make_placement(topology, world_size=8, pipeline_parallel_size=3)
    with pytest.raises(ConfigurationError, match=r"here\.yaml has 8 devices \(a: 4, b: 4\).*world size is 6"):
        make_placement(topology, world_size=6, pipeline_parallel_size=2)
    for grid in (((0, 1), (2,)), ((0, 0),), ((1, 2),), ()):
        with pytest.raises(ConfigurationError, match="placement"):
            Placement(grid)
    with pytest.raises(ValueError, match="rank 9"):
        Placement(((0,),)).coordinate(9)


def test_tensor_groups() -> None:
    placement = make_placement(
        Topology.single_cluster(2, 4), world_size=8, pipeline_parallel_size=2, tensor_parallel_size=2
    )
    assert placement.grid == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (placement.data_parallel_size, placement.tensor_parallel_size, placement.world_size) == (2, 2, 8)
    assert [placement.tensor_parallel_group(1, data) for data in (0, 1)] == [(4, 5), (6, 7)]
    assert [placement.data_parallel_group(1, part) for part in (0, 1)] == [(4, 6), (5, 7)]
    assert placement.pipeline_group(1, 1) == (3, 7)
    assert placement.coordinate(6) == (1, 1, 0)


def test_a_tensor_group_that_no_host_holds_is_refused() -> None:
    topology = topology_of(a=4, b=6)
    with pytest.raises(ConfigurationError, match=r"=4 does not divide the 6 devices of host host-b.*: 1, 2$"):
        make_placement(topology, world_size=10, pipeline_parallel_size=1, tensor_parallel_size=4)
    with pytest.raises(ConfigurationError, match=r"tensor_parallel_size=3 .* 4 devices of host host-a"):
        choose_pipeline_size(topology, 3)
    with pytest.raises(
        ConfigurationError, match=r"=10 does not divide the 5 tensor groups of 2 in .* 10; these would: 1, 5"
    ):
        make_placement(topology, world_size=10, pipeline_parallel_size=10, tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match="rows of 3 ranks"):
        Placement(((0, 1, 2),), 2)
    with pytest.raises(ConfigurationError, match=r"\[0, 3, 1, 2\]: .* must ascend; number the processes host by host"):
        Placement(((0, 3, 1, 2),), 2)


def test_the_pipeline_size_counts_tensor_groups() -> None:
    topology = topology_of(a=4, b=6)
    size, reason = choose_pipeline_size(topology, 2)
    assert size == 5 and "a stage of 2 ranks" in reason and "no replicas" in reason, "five groups are not two stages"
    assert choose_pipeline_size(topology_of(a=8, b=8), 4) == (2, "2, one for each cluster")


def test_clusters_of_nearly_one_size_do_not_make_a_long_pipeline() -> None:
    for topology in (topology_of(a=56, b=64), topology_of(a=64, b=56)):
        size, reason = choose_pipeline_size(topology)
        assert size == 2 and "one for each cluster nearly" in reason and "would be 15" in reason
    size, reason = choose_pipeline_size(topology_of(a=56, b=64), 8)
    assert size == 3 and "would be 15" in reason, "seven and eight tensor groups are not halved"
    for devices in (56, 64):
        assert choose_pipeline_size(topology_of(a=devices)) == (1, "1, one for each cluster")
    assert choose_pipeline_size(topology_of(a=2, b=4))[0] == 3, "no group leaves its cluster"


def card(kind: TransportKind, fabric: str, *, up: bool = True) -> Nic:
    return Nic(name=f"{kind} {fabric} {up}", kind=kind, fabric=fabric, up=up)


def on_fabrics(hosts: Sequence[tuple[int, Sequence[str]]]) -> Topology:
    """Return one cluster of hosts, each with its devices and the fabrics of its cards."""
    return Topology(
        clusters=(
            Cluster(
                name="mine",
                hosts=tuple(
                    Host(name=f"h{i}", devices=devices, nics=tuple(card("roce", fabric) for fabric in fabrics))
                    for i, (devices, fabrics) in enumerate(hosts)
                ),
            ),
        )
    )


@pytest.mark.parametrize(
    ("hosts", "size", "stages"),
    [
        ([(1, "A"), (1, "AB"), (1, "A"), (1, "AB")], 2, 2),
        ([(2, "A"), (2, "AB"), (2, "AB")], 3, 2),
        ([(1, "ABCDEFGH")] * 4, 2, 2),
        ([(4, "AB"), (2, "C"), (2, "C"), (4, "A")], 4, 3),
        ([(1, "A"), (1, "B"), (1, "C"), (1, "D")], 2, 0),
    ],
)
def test_hosts_on_the_same_fabrics_form_stages(hosts: list[tuple[int, str]], size: int, stages: int) -> None:
    topology = on_fabrics(hosts)
    world_size = topology.num_devices
    placement = make_placement(topology, world_size=world_size, pipeline_parallel_size=world_size // size)
    fabrics = [frozenset(nic.fabric for nic in host.nics) for _, host in topology.places()]
    assert sum(bool(frozenset.intersection(*(fabrics[rank] for rank in row))) for row in placement.grid) == stages


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Topology, int, int]:
    """Draw a topology of up to 10,000 ranks, and sizes of pipeline and tensor groups that it allows.

    Hosts of a cluster have different numbers of devices; each has working cards of one fabric or none; hosts are
    numbered at random.
    """
    tensor = draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    num_clusters = draw(st.integers(1, 6))
    shares_fabrics = draw(st.booleans())  # a file may say that cards of two clusters reach each other
    random = Random(draw(st.integers(0, 2**32)))
    plans = []
    for _ in range(num_clusters):
        num_hosts = draw(st.integers(1, 60))
        most = max(1, min(10_000 // (num_clusters * num_hosts), 4096) // tensor)  # a host has 4,096 at most
        groups = draw(st.lists(st.integers(1, most), min_size=1, max_size=3))
        kinds = draw(st.lists(st.sampled_from(["infiniband", "roce", "down", "none"]), min_size=1, max_size=4))
        plans.append([(random.choice(groups) * tensor, random.choice(kinds)) for _ in range(num_hosts)])
    numbered = [(cluster, index) for cluster, plan in enumerate(plans) for index in range(len(plan))]
    random.shuffle(numbered)
    ranks, first = {}, 0
    for cluster, index in numbered:
        ranks[cluster, index] = tuple(range(first, first + plans[cluster][index][0]))
        first += plans[cluster][index][0]
    clusters = []
    for cluster, plan in enumerate(plans):
        hosts = []
        for index, (devices, kind) in enumerate(plan):
            fabric = f"fabric {0 if shares_fabrics else cluster}"
            nics = [Nic(name="eth0", kind="ethernet"), card("roce", fabric, up=False)]
            if kind in ("infiniband", "roce"):
                working = card("infiniband" if kind == "infiniband" else "roce", fabric)
                nics += [working, replace(working, name="another port")]
            random.shuffle(nics)
            mine = ranks[cluster, index]
            hosts.append(Host(name=f"host-{cluster}-{index}", devices=devices, nics=tuple(nics), ranks=mine))
        clusters.append(Cluster(name=f"cluster-{cluster}", hosts=tuple(hosts)))
    topology = Topology(clusters=tuple(clusters), source="here.yaml")
    assert topology.num_devices <= 10_000
    num_groups = topology.num_devices // tensor
    sizes = [choose_pipeline_size(topology, tensor)[0]]
    sizes += [size for size in range(1, num_groups + 1) if num_groups % size == 0]
    return topology, draw(st.sampled_from(sizes)), tensor


def fabric_of(place: tuple[Cluster, Host]) -> tuple[str, str]:
    """Return the network that a host shares with others: its fabric or, without a working card, the Ethernet of its
    cluster."""
    cluster, host = place
    working = [nic for nic in host.nics if nic.up and nic.kind != "ethernet"]
    return (working[0].kind, str(working[0].fabric)) if working else ("ethernet", cluster.name)


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_any_topology(layout: tuple[Topology, int, int]) -> None:
    topology, pipeline, tensor = layout
    world_size = topology.num_devices
    placement, calls = count_calls(
        lambda: make_placement(
            topology, world_size=world_size, pipeline_parallel_size=pipeline, tensor_parallel_size=tensor
        )
    )
    assert calls < 120 * world_size + 1000
    data = placement.data_parallel_size
    assert (placement.pipeline_parallel_size, pipeline * data * tensor) == (pipeline, world_size)
    everyone = list(range(world_size))
    data_groups = [placement.data_parallel_group(s, t) for s in range(pipeline) for t in range(tensor)]
    tensor_groups = [placement.tensor_parallel_group(s, d) for s in range(pipeline) for d in range(data)]
    pipelines = [placement.pipeline_group(d, t) for d in range(data) for t in range(tensor)]
    assert all(list(group) == sorted(group) for group in (*data_groups, *tensor_groups)), "torch sorts a group's ranks"
    for groups in (data_groups, tensor_groups, pipelines):
        assert sorted(rank for group in groups for rank in group) == everyone
    for rank in everyone[:: max(1, world_size // 20)]:
        s, d, t = placement.coordinate(rank)
        assert rank == placement.pipeline_group(d, t)[s] == placement.data_parallel_group(s, t)[d]
        assert rank == placement.tensor_parallel_group(s, d)[t]
    places = topology.places()
    for group in tensor_groups:
        assert len({places[rank][1].name for rank in group}) == 1
    # a stage inside a fabric takes data * tensor of its devices: no layout has more of them than this
    of_fabric = Counter(map(fabric_of, places))
    fabrics_of_stage = [{fabric_of(places[rank]) for rank in row} for row in placement.grid]
    most = sum(count // (data * tensor) for count in of_fabric.values())
    assert sum(len(fabrics) == 1 for fabrics in fabrics_of_stage) == most
    # nor has any layout more stages inside a cluster, unless a fabric leads from one to another
    crossing = crossing_groups(placement, topology)
    if len({(fabric_of(place), place[0].name) for place in places}) == len(of_fabric):
        assert pipeline - len(crossing) == sum(c.num_devices // (data * tensor) for c in topology.clusters)
    assert all(len(clusters_of(placement, topology, stage)) > 1 for stage in crossing[:3])


def groups_of(placement: Placement, clusters: str) -> list[GroupPlan]:
    return plan_groups(placement, (), lambda ranks, use: (f"gloo for {use}", "tested"), list(clusters))


def test_every_group_of_several_ranks_is_in_the_plan_once() -> None:
    groups = groups_of(Placement(((0, 1), (2, 3))), "aaaa")
    assert sorted((g.axis, g.ranks) for g in groups) == [
        *(("data_parallel", (0, 1)), ("data_parallel", (2, 3)), ("messages", (0, 2)), ("messages", (1, 3))),
        *(("pipeline", (0, 2)), ("pipeline", (1, 3)), ("world", (0, 1, 2, 3))),
    ]
    used = {group.axis: group.transport for group in groups}
    assert used["messages"] == "gloo for messages" and used["world"] == "gloo for world"
    assert used["data_parallel"] == used["pipeline"] == "gloo for tensors"
    assert groups_of(Placement(((0,),)), "a") == []
    assert [(group.name, group.ranks) for group in groups_of(Placement(((0, 1, 2, 3),)), "aabb")] == [
        *(
            ("data_parallel_0", (0, 1, 2, 3)),
            ("data_parallel_0_inside_0", (0, 1)),
            ("data_parallel_0_inside_1", (2, 3)),
        ),
        *(("data_parallel_0_across_0", (0, 2)), ("data_parallel_0_across_1", (1, 3)), ("world", (0, 1, 2, 3))),
    ]
