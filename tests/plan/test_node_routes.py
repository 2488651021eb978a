"""Which nodes hold what, which workers sum before they send, and over which card."""

from collections.abc import Sequence

import pytest

from lightning_holmes.cluster.topology import Cluster, Host, Nic, OptimizerHost
from lightning_holmes.plan.node_routes import cluster_of, near_addresses, place_units, share_nodes, sums_inside


@pytest.mark.parametrize(
    ("of_workers", "of_nodes", "expected"),
    [
        ("aabb", ["a"], True),
        ("aabb", ["a", "b"], True),
        ("aabb", [None], True),  # the node can be in at most one of the clusters
        ("aa", ["a"], False),
        ("aa", ["a", "b"], True),
        ("aa", [None], False),
        ("aa", ["c"], True),
        ("ab", ["c"], False),  # one worker in each cluster
        ("abb", ["a"], False),  # different numbers
    ],
)
def test_workers_sum_in_clusters_that_lie_apart_from_a_node(
    of_workers: str, of_nodes: Sequence[str | None], expected: bool
) -> None:
    assert sums_inside(list(of_workers), of_nodes) == expected


def test_nodes_are_shared_out() -> None:
    assert share_nodes([None] * 2, [None]) == [[0], [0]]
    assert share_nodes([None] * 2, [None] * 3) == [[0, 2], [1]]
    assert share_nodes([None] * 4, [None] * 2) == [[0], [1], [0], [1]]
    assert share_nodes(["a", "b"], ["b", "a"]) == [[1], [0]]
    assert share_nodes(["a", "b", "b"], ["b", "a", "b", "a"]) == [[1, 3], [0], [2]]
    assert share_nodes(["a", None], ["a", "c"]) == [[0], [1]], "those of no rank's cluster"
    assert share_nodes(["a", "b"], ["a"]) == [[0], [0]], "where there is no other"
    hosts = [OptimizerHost(name="cpu.example.org", cluster="a"), OptimizerHost(name="far")]
    assert [cluster_of(name, hosts) for name in ("cpu", "cpu.example.org", "far", "who")] == ["a", "a", None, None]
    assert place_units({0: 10, 1: 40, 2: 30, 3: 20}, 2) == {1: 0, 2: 1, 3: 1, 0: 0}
    of_stages = place_units({0: 10, 1: 40, 2: 30, 3: 30}, 2, {0: 0, 1: 0, 2: 1, 3: None})
    assert of_stages == {1: 0, 2: 1, 3: 1, 0: 1}, "a stage has several, though the other one holds less"


def test_a_node_is_reached_over_the_fastest_card_that_is_in_its_network() -> None:
    def card(name: str, address: str, rate: float, *, up: bool = True) -> Nic:
        return Nic(name=name, kind="roce", bandwidth_bytes_per_s=rate, addresses=(address,), up=up)

    hosts = (
        Host(name="two", devices=1, nics=(card("slow", "10.1.0.1", 1e9), card("fast", "10.2.0.1", 2e9))),
        Host(name="down", devices=1, nics=(card("fast", "10.2.0.2", 2e9, up=False),)),
        Host(name="elsewhere", devices=1, nics=(card("fast", "10.3.0.2", 2e9),)),
        Host(name="plain", devices=1, nics=(Nic(name="eth0", kind="ethernet", addresses=("10.2.0.9",)),)),
    )
    ports = [("roce", "10.1.0.7/16"), ("roce", "10.2.0.7/16"), ("infiniband", "10.3.0.7/16")]
    assert near_addresses(Cluster(name="a", hosts=hosts), ports) == {"two": "10.2.0.7"}
