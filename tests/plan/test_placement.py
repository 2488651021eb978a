"""Placements: the pipeline across clusters, the gradients inside them."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.placement import (
    Placement,
    choose_pipeline_size,
    clusters_of,
    crossing_groups,
    make_placement,
)


def make_topology(**sizes: int) -> Topology:
    return Topology(
        clusters=tuple(
            Cluster(name=name, hosts=(Host(name=f"host-{name}", devices=size),)) for name, size in sizes.items()
        ),
        source="my.yaml",
    )


def test_two_clusters() -> None:
    topology = make_topology(a=4, b=4)
    placement = make_placement(topology, world_size=8, pipeline_parallel_size=2)
    assert placement == Placement(((0, 1, 2, 3), (4, 5, 6, 7)))
    assert placement.data_parallel_group(1) == (4, 5, 6, 7)
    assert placement.pipeline_group(2) == (2, 6)
    assert (placement.pipeline_parallel_size, placement.data_parallel_size) == (2, 4)
    for rank in range(8):
        pipeline_rank, data_parallel_rank, tensor_parallel_rank = placement.coordinate(rank)
        assert placement.grid[pipeline_rank][data_parallel_rank] == rank and tensor_parallel_rank == 0
    assert [clusters_of(placement, topology, stage) for stage in (0, 1)] == [("a",), ("b",)]


def test_uneven_clusters_share_a_pipeline_rank() -> None:
    topology = make_topology(a=3, b=5)
    placement = make_placement(topology, world_size=8, pipeline_parallel_size=2)
    assert clusters_of(placement, topology, 0) == ("a", "b")
    assert clusters_of(placement, topology, 1) == ("b",)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_every_size_that_divides(size: int) -> None:
    placement = make_placement(Topology.single_cluster(2, 3), world_size=6, pipeline_parallel_size=size)
    assert placement.pipeline_parallel_size == size
    assert placement.world_size == 6
    assert sorted(rank for j in range(6 // size) for rank in placement.pipeline_group(j)) == list(range(6))


def test_refused() -> None:
    topology = make_topology(a=4, b=4)
    with pytest.raises(ConfigurationError, match=r"pipeline_parallel_size=3 .* world size 8; .*: 1, 2, 4, 8"):
        make_placement(topology, world_size=8, pipeline_parallel_size=3)
    with pytest.raises(ConfigurationError, match=r"my\.yaml has 8 devices \(a: 4, b: 4\).*world size is 6"):
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
    topology = make_topology(a=4, b=6)
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


def test_the_pipeline_size_counts_tensor_groups() -> None:
    topology = make_topology(a=4, b=6)
    size, reason = choose_pipeline_size(topology, 2)
    assert size == 5 and "a stage of 2 ranks" in reason and "no replicas" in reason
    assert choose_pipeline_size(make_topology(a=8, b=8), 4) == (2, "2, one for each cluster")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Topology, int, int]:
    """A topology of up to 10,000 ranks, and sizes of pipeline and tensor groups that it allows."""
    tensor = draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    most_groups = 10_000 // tensor
    clusters = []
    for cluster in range(draw(st.integers(1, 6))):
        num_hosts = draw(st.integers(1, 60))
        groups = draw(st.integers(1, max(1, most_groups // (6 * num_hosts))))
        hosts = tuple(Host(name=f"host-{cluster}-{host}", devices=groups * tensor) for host in range(num_hosts))
        clusters.append(Cluster(name=f"cluster-{cluster}", hosts=hosts))
    topology = Topology(clusters=tuple(clusters), source="my.yaml")
    assert topology.num_devices <= 10_000
    num_groups = topology.num_devices // tensor
    sizes = [choose_pipeline_size(topology, tensor)[0]]
    sizes += [size for size in range(1, num_groups + 1) if num_groups % size == 0]
    return topology, draw(st.sampled_from(sizes)), tensor


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_any_topology(layout: tuple[Topology, int, int]) -> None:
    topology, pipeline, tensor = layout
    world_size = topology.num_devices
    start = time.process_time()
    placement = make_placement(
        topology, world_size=world_size, pipeline_parallel_size=pipeline, tensor_parallel_size=tensor
    )
    assert time.process_time() - start < 1
    data = placement.data_parallel_size
    assert (placement.pipeline_parallel_size, pipeline * data * tensor) == (pipeline, world_size)
    everyone = list(range(world_size))
    data_groups = [placement.data_parallel_group(s, t) for s in range(pipeline) for t in range(tensor)]
    tensor_groups = [placement.tensor_parallel_group(s, d) for s in range(pipeline) for d in range(data)]
    pipelines = [placement.pipeline_group(d, t) for d in range(data) for t in range(tensor)]
    for groups in (data_groups, tensor_groups, pipelines):
        assert sorted(rank for group in groups for rank in group) == everyone
    for rank in everyone[:: max(1, world_size // 20)]:
        s, d, t = placement.coordinate(rank)
        assert rank == placement.pipeline_group(d, t)[s] == placement.data_parallel_group(s, t)[d]
        assert rank == placement.tensor_parallel_group(s, d)[t]
    places = topology.places()
    for group in tensor_groups:
        assert len({places[rank][1].name for rank in group}) == 1
    # a stage that stays inside a cluster takes data * tensor of its devices: no layout has more of them than this
    most = sum(cluster.num_devices // (data * tensor) for cluster in topology.clusters)
    crossing = crossing_groups(placement, topology)
    assert pipeline - len(crossing) == most
    assert all(len(clusters_of(placement, topology, stage)) > 1 for stage in crossing[:3])
