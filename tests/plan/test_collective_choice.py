"""The collective of each pipeline rank's replicas follows from the links between them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.collective_choice import choose_collectives, notes_of
from lightning_holmes.plan.collective_cost import all_reduce_s, ring_all_reduce_s
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.route import Channel

FOUR, TWO_STAGES = Placement(((0, 1, 2, 3),)), Placement(((0, 1), (2, 3)))


def clusters(inside: str, between: str, *, hosts: int = 2) -> Topology:
    """Two clusters of ``hosts`` hosts each; rates in Gbit/s, "" if not known."""
    rate = f", bandwidth: {inside} Gbit/s" if inside else ""
    nics = f"nics: [{{name: e, kind: ethernet{rate}}}]"
    text = "".join(f"  - {{name: {n}, hosts: [{{name: {n}, count: {hosts}, devices: 1, {nics}}}]}}\n" for n in "ab")
    link = (
        f"links: [{{ends: [a, b], transport: ethernet, bandwidth: {between} Gbit/s, latency: 0.1 ms}}]\n"
        if between
        else ""
    )
    return Topology.from_yaml_text(f"clusters:\n{text}{link}")


@pytest.mark.parametrize(
    ("inside", "between", "name"),
    [
        ("1", "0.1", "hierarchical"),  # half of the bytes twice over the slow link, instead of three quarters
        ("0.1", "1", "all_reduce"),  # levels inside a cluster would send more over its slow links
        ("", "", "hierarchical"),  # nothing is known
    ],
)
def test_across_clusters_the_links_decide(inside: str, between: str, name: str) -> None:
    topology = clusters(inside, between)
    assert choose_collectives("auto", FOUR, topology, sharding="none", sockets=True) == (name,)
    assert choose_collectives("auto", TWO_STAGES, topology, sharding="none", sockets=True) == ("all_reduce",) * 2
    assert choose_collectives("auto", FOUR, topology, sharding="none", sockets=True, by_links=False) == ("all_reduce",)
    assert choose_collectives("p2p", FOUR, topology, sharding="none", sockets=True) == ("p2p",)


def test_shares_are_summed_without_the_rest() -> None:
    topology = clusters("1", "0.1")
    for sockets, name in ((True, "p2p"), (False, "reduce_scatter")):
        for sharding in ("optimizer", "parameters"):
            found = choose_collectives("auto", TWO_STAGES, topology, sharding=sharding, sockets=sockets)  # type: ignore[arg-type]
            assert found == (name, name)
        assert choose_collectives("auto", FOUR, topology, sharding="parameters", sockets=sockets) == (name,)
    assert (
        choose_collectives("hierarchical", TWO_STAGES, topology, sharding="none", sockets=True) == ("all_reduce",) * 2
    )
    assert (
        choose_collectives("auto", Placement(((0,), (1,))), clusters("1", "1", hosts=1), sharding="none", sockets=True)
        == ()
    )


def test_what_no_group_can_use_is_refused_and_what_has_nothing_to_do_is_noted() -> None:
    inside, crossing = ["a", "a", "b", "b"], ["a", "b", "a", "b"]
    for placement, of_ranks in ((TWO_STAGES, inside), (TWO_STAGES, crossing), (FOUR, ["a", "a", "a", "b"])):
        with pytest.raises(ConfigurationError, match="in each of several clusters"):
            notes_of("hierarchical", placement, of_ranks)
    assert notes_of("hierarchical", FOUR, crossing) == []
    assert "there is one replica" in " ".join(notes_of("p2p", Placement(((0,), (1,))), ["a", "b"]))


@given(st.integers(1, 40), st.floats(0, 1e9), st.floats(1e6, 1e11), st.floats(0, 1e-3))
def test_ring_step_by_step(size: int, num_bytes: float, bandwidth: float, latency: float) -> None:
    clock = 0.0
    for _ in range(size - 1):  # in each step every member sends one part to its neighbour
        clock += latency + (num_bytes / size) / bandwidth
    how = {"size": size, "bandwidth": bandwidth, "latency": latency}
    assert ring_all_reduce_s(num_bytes, **how) == pytest.approx(2 * clock)


@given(st.integers(1, 8), st.integers(1, 64), st.floats(1, 1e9), st.floats(1e6, 1e10))
def test_the_best_is_no_slower_than_any_and_no_faster_than_the_bytes(
    local: int, hosts: int, num_bytes: float, bandwidth: float
) -> None:
    inside, between = Channel("local", 3e11, 1e-6), Channel("ethernet", bandwidth, 1e-5)
    best = all_reduce_s(num_bytes, local=inside, channel=between, local_size=local, num_hosts=hosts)
    if hosts == 1:
        assert best <= ring_all_reduce_s(num_bytes, size=local, bandwidth=3e11, latency=1e-6)
    else:
        # a ring inside each host, and one over the hosts for the part of each member
        parts_s = ring_all_reduce_s(num_bytes / local, size=hosts, bandwidth=bandwidth / local, latency=1e-5)
        levels_s = ring_all_reduce_s(num_bytes, size=local, bandwidth=3e11, latency=1e-6) + parts_s
        assert best <= levels_s * (1 + 1e-9)
        # every host sends at least (n-1)/n of the sum and receives as much
        assert best >= 2 * (hosts - 1) / hosts * num_bytes / bandwidth * (1 - 1e-9)
    assert math.isfinite(best)
