"""The cards that hosts use together: the same for planner and run, whatever cards they have and in whatever order
they come."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_holmes.cluster.network import Cluster, Host, Link, Nic, TransportKind
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.comm.group_transports import GroupTransports
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.transport import TransportChoice, TransportChooser

MAIN = Nic(name="main", kind="ethernet", bandwidth_bytes_per_s=1e8)


def of_hosts(*clusters: Sequence[Sequence[Nic]], links: tuple[Link, ...] = ()) -> Topology:
    """Return clusters c0, c1 ... of hosts with one device and these cards."""
    made = [
        Cluster(name=f"c{c}", hosts=tuple(Host(name=f"c{c}h{h}", devices=1, nics=(*n,)) for h, n in enumerate(hosts)))
        for c, hosts in enumerate(clusters)
    ]
    return Topology(clusters=tuple(made), links=links)


def card(kind: TransportKind, fabric: str | None = None, *, name: str = "card", rate: float = 1e9) -> Nic:
    return Nic(name=name, kind=kind, fabric=fabric, bandwidth_bytes_per_s=rate, interface=name)


cards = st.builds(
    dict,
    kind=st.sampled_from(["infiniband", "roce", "roce", "ethernet"]),
    fabric=st.sampled_from([None, "x", "y", "roce/c0"]),
    bandwidth_bytes_per_s=st.sampled_from([1e9, 2e9, 8e9]),
    up=st.sampled_from([True, True, True, False]),
    addresses=st.sampled_from([(), ("10.0.0.1",)]),
)
hosts = st.lists(cards, max_size=3).map(lambda own: (*(Nic(name=f"n{i}", **nic) for i, nic in enumerate(own)), MAIN))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.lists(hosts, min_size=1, max_size=3), min_size=1, max_size=2), st.booleans())
def test_comparison_and_run_agree(data: st.DataObject, clusters: list[list[tuple[Nic, ...]]], sockets: bool) -> None:
    topology = of_hosts(*clusters)
    network = Network(topology, local_bytes_per_s=1e11, sockets=sockets)
    chooser = TransportChooser(topology, sockets=sockets)
    ranks = data.draw(st.permutations(range(topology.num_devices)))
    ranks = ranks[: data.draw(st.integers(1, len(ranks)))]
    choice = chooser.choose(ranks)
    assert choice == chooser.choose(sorted(ranks)), "the order of hosts says nothing"
    channel = network.group(ranks)
    assert channel.transport == choice.kind
    for rank in ranks:
        assert set(choice.rails.get(rank, ())) <= set(chooser.reaching(rank, ranks))
    if choice.kind == "local":
        return
    assert channel.card_bytes_per_s == min(rate_of(choice, rank, sockets) for rank in ranks)
    assert_one_network(choice, topology)
    if len(ranks) == 2:
        assert network.between_hosts(*ranks) == channel


def rate_of(choice: TransportChoice, rank: int, sockets: bool) -> float:
    """Return the stated rate of a rank's cards that the group uses."""
    nic = choice.nic_of(rank)
    assert nic is not None
    used = choice.rails[rank] if choice.is_rdma and not sockets else (nic,)
    return sum(nic.bandwidth_bytes_per_s or 0.0 for nic in used)


def assert_one_network(choice: TransportChoice, topology: Topology) -> None:
    """The cards are up and of one kind; RDMA cards name the same fabric, or none of them names one and they are in
    one cluster."""
    assert all(nic.up and nic.kind == choice.kind for nic in choice.nics.values())
    if choice.is_rdma:
        places = topology.places()
        named = {nic.fabric or f"{nic.kind}/{places[rank][0].name}" for rank, nic in choice.nics.items()}
        assert len(named) == 1


@pytest.mark.parametrize(
    ("clusters", "kind"),
    [
        pytest.param([[card("roce")], [card("roce", "y")]], "ethernet", id="one names none"),
        pytest.param([[card("roce", "x")], [card("roce", "y")], [card("roce")]], "ethernet", id="two, and one names none"),
        pytest.param([[card("roce")], [card("roce")]], "roce", id="none is named"),
        pytest.param([[card("roce")], [card("roce", "roce/c0")]], "roce", id="the name of those without one"),
    ],
)  # fmt: skip
def test_cards_that_name_no_fabric_share_that_of_their_cluster(clusters: list[list[Nic]], kind: str) -> None:
    topology = of_hosts([[*own, MAIN] for own in clusters])
    for order in (range(len(clusters)), reversed(range(len(clusters)))):
        assert TransportChooser(topology).choose([*order]).kind == kind


@pytest.mark.parametrize(("sockets", "inside"), [(True, "eth1"), (False, "eth0")], ids=["gloo", "nccl"])
def test_of_ethernet_cards_the_faster_subnet_counts_where_each_group_has_its_own(sockets: bool, inside: str) -> None:
    rates = {"eth0": 1e9 / 8, "eth1": 25e9 / 8}
    own = [card("ethernet", f"of {name}", name=name, rate=rate) for name, rate in rates.items()]
    topology = of_hosts([own, own], [own])
    network = Network(topology, local_bytes_per_s=1e11, sockets=sockets)
    chooser = TransportChooser(topology, sockets=sockets)
    for ranks, used in (([1, 0], inside), ([0, 2], "eth0")):
        assert {nic.name for nic in chooser.choose(ranks).nics.values()} == {used}
        assert network.group(ranks).bytes_per_s == rates[used]
    transports = GroupTransports(chooser, rank=0, backend="gloo" if sockets else "nccl")
    found = transports.interface([0, 1]) if sockets else transports.nccl_environment([[0, 1]])["NCCL_SOCKET_IFNAME"]
    assert found.removeprefix("=") == inside


def test_a_link_counts_for_groups_of_its_transport() -> None:
    link = Link(ends=("c0", "c1"), transport="roce", bandwidth_bytes_per_s=5e8, latency_s=1e-3)
    apart = [[card("roce"), MAIN]]
    joined = [[card("roce", "x"), MAIN]]
    across = Network(of_hosts(joined * 2, joined, links=(link,)), local_bytes_per_s=1e11)
    assert across.group([0, 1]).bytes_per_s == 1e9
    assert (across.group([0, 2]).transport, across.group([0, 2]).bytes_per_s) == ("roce", 5e8)
    assert across.group([0, 1, 2]).links == (((0, 1), 5e8),) and not across.link_notes()
    # no fabric connects them: groups use Ethernet, and the rate of a RoCE link says nothing about it
    network = Network(of_hosts(apart * 2, apart, links=(link,)), local_bytes_per_s=1e11)
    assert (network.group([0, 2]).transport, network.group([0, 2]).bytes_per_s) == ("ethernet", 1e8)
    (note,) = network.link_notes()
    assert (
        note.startswith("link c0 - c1: each pair of hosts is taken to have its own") and "transport: ethernet" in note
    )
    unknown = Network(of_hosts([[card("roce")]], [[card("roce")]], links=(link,)), local_bytes_per_s=1e11)
    with pytest.raises(ConfigurationError, match=r"'c0' and 'c1' by ethernet, .* no roce fabric .* write in the topo"):
        unknown.group([0, 1])
