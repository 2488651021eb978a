"""Placements: the pipeline across clusters, the gradients inside them."""

import pytest

from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.placement import Placement, clusters_of, make_placement


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
        pipeline_rank, data_parallel_rank = placement.coordinate(rank)
        assert placement.grid[pipeline_rank][data_parallel_rank] == rank
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
