"""Which worker communicates with optimizer nodes for its cluster, and over which card."""

from collections.abc import Sequence

import pytest

from lightning_holmes.cluster.topology import Cluster, Host, Nic
from lightning_holmes.plan.node_routes import clusters_apart, near_addresses, speaking_levels

TWO_AND_TWO = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("ranks", "of_nodes", "known", "expected"),
    [
        ((0, 1, 2, 3), ["a"], True, [(2, 3)]),
        ((0, 1, 2, 3), ["a", "b"], True, [(0, 1), (2, 3)]),
        ((0, 1, 2, 3), ["c"], True, [(0, 1), (2, 3)]),
        ((0, 1, 2, 3), [None], True, [(0, 1), (2, 3)]),  # the node can be in at most one of the clusters
        ((0, 1), ["a"], True, []),
        ((0, 1), [None], True, []),
        ((0, 1), [None], False, [(0, 1)]),
        ((0, 1), ["a"], False, []),
        ((0, 2), ["c"], False, []),  # one worker in each cluster
        ((1, 2, 3), ["a"], True, [(2, 3)]),
    ],
)
def test_one_speaks_for_a_cluster_that_lies_apart_from_a_node(
    ranks: tuple[int, ...], of_nodes: Sequence[str | None], known: bool, expected: list[tuple[int, ...]]
) -> None:
    assert clusters_apart(ranks, TWO_AND_TWO, of_nodes, known=known) == expected


@pytest.mark.parametrize(
    ("members", "levels"),
    [
        ((0, 1, 2, 3), [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]),
        ((0, 1), [[(0, 1)]]),  # one host
        ((0, 2, 4), [[(0, 2, 4)]]),  # one worker per host
        ((0, 1, 2), [[(0, 1, 2)]]),  # different numbers of workers
    ],
)
def test_one_speaks_for_a_host_and_one_of_these_for_the_cluster(
    members: tuple[int, ...], levels: list[list[tuple[int, ...]]]
) -> None:
    assert speaking_levels(members, ["x", "x", "y", "y", "z"]) == levels


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
