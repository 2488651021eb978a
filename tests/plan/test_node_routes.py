"""Who speaks with optimizer nodes for a cluster, and over which card."""

from collections.abc import Sequence

import pytest

from lightning_holmes.cluster.topology import Cluster, Host, Nic
from lightning_holmes.plan.node_routes import assign, clusters_apart, cut_in_units, near_addresses

TWO_AND_TWO = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("ranks", "of_nodes", "known", "expected"),
    [
        ((0, 1, 2, 3), ["a"], True, [(2, 3)]),
        ((0, 1, 2, 3), ["a", "b"], True, [(0, 1), (2, 3)]),
        ((0, 1, 2, 3), ["c"], True, [(0, 1), (2, 3)]),
        ((0, 1, 2, 3), [None], True, [(0, 1), (2, 3)]),  # it can be in one of them at most
        ((0, 1), ["a"], True, []),
        ((0, 1), [None], True, []),
        ((0, 1), [None], False, [(0, 1)]),
        ((0, 1), ["a"], False, []),
        ((0, 2), ["c"], False, []),  # one worker each
        ((1, 2, 3), ["a"], True, [(2, 3)]),
    ],
)
def test_one_speaks_for_a_cluster_that_lies_apart_from_a_node(
    ranks: tuple[int, ...], of_nodes: Sequence[str | None], known: bool, expected: list[tuple[int, ...]]
) -> None:
    assert clusters_apart(ranks, TWO_AND_TWO, of_nodes, known=known) == expected


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


def test_a_stage_is_cut_in_whole_parameters_for_as_many_nodes() -> None:
    sizes = {"norm": 1, "qkv": 30, "out": 10, "up": 40, "down": 40}
    assert cut_in_units(sizes, 1) == [list(sizes)]
    assert cut_in_units(sizes, 2) == [["qkv", "up"], ["norm", "out", "down"]]
    assert cut_in_units(sizes, 4) == [["up"], ["down"], ["qkv"], ["norm", "out"]]
    assert cut_in_units({"a": 1}, 3) == [["a"]]


def test_units_of_a_stage_lie_on_different_nodes_and_all_nodes_hold_as_much() -> None:
    stage_of = {unit: unit // 2 for unit in range(8)}
    num_bytes = {unit: 70 if unit % 2 else 50 for unit in range(8)}
    places = assign(num_bytes, 2, stage_of)
    assert all({places[2 * stage], places[2 * stage + 1]} == {0, 1} for stage in range(4))
    loads = [sum(num_bytes[unit] for unit in places if places[unit] == place) for place in (0, 1)]
    assert loads == [240, 240]
    assert assign({0: 10, 1: 40, 2: 30, 3: 20}, 2, {0: 0, 1: 1, 2: 2, 3: None}) == {1: 0, 2: 1, 3: 1, 0: 0}
    assert sorted(assign({0: 1, 1: 1, 2: 1}, 2, dict.fromkeys(range(3))).values()) == [0, 0, 1], "more units than nodes"
