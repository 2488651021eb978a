"""Routes between hosts, shared cards, seconds and memory of a run: small cases worked out by hand."""

import dataclasses

import pytest
from refusals import refusal

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import find_device_type
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.prediction import predict
from lightning_holmes.plan.route import DEFAULT_LATENCY_S, Network
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.self_adapting import solve
from lightning_holmes.plan.simulator import StepCosts, simulate
from lightning_holmes.plan.training import Training

TWO = """
clusters:
  - name: east
    hosts:
      - {name: e, count: 2, devices: 2, nics: [{name: ib, kind: infiniband, bandwidth: 8e9},
                                               {name: eth, kind: ethernet, bandwidth: 1e9}]}
  - name: west
    hosts:
      - {name: w, count: 2, devices: 2, nics: [{name: roce, kind: roce, bandwidth: 4e9},
                                               {name: eth, kind: ethernet, bandwidth: 1e9}]}
links:
  - {ends: [east, west], transport: ethernet, bandwidth: 5e8, latency: 1 ms}
"""
DEVICE = find_device_type("speed=1e12,memory=1e12,local=1e11")
LAYER = LayerCost(forward=1e12, backward=2e12, parameter_bytes=1e9, activation_bytes=1e7, held_bytes=1e8)
MODEL = ModelCost(
    microbatch_samples=1,
    before=LayerCost(forward=0, backward=0, parameter_bytes=3e9, activation_bytes=1e7),
    layers=(LAYER,) * 4,
    after=LayerCost(forward=1e12, backward=2e12, parameter_bytes=3e9, held_bytes=5e8),
)


def cost_model(text: str = TWO, model: ModelCost = MODEL, devices=None, **training) -> CostModel:
    topology = Topology.from_yaml_text(text)
    network = Network(topology, local_bytes_per_s=1e11, local_latency_s=0.0)
    devices = devices or (DEVICE,) * len(topology.clusters)
    return CostModel(model, network, devices=devices, training=Training(batch_samples=8, **training))


def shape(layout: Layout, **changes) -> RunShape:
    values = {"schedule": "1f1b", "num_microbatches": 4, "microbatch_samples": 1, **changes}
    return RunShape(layout=layout, **values)


def test_routes() -> None:
    network = cost_model().network
    assert network.between_hosts(0, 0).transport == "local"
    assert network.between_hosts(0, 1) == network.group([0, 1])
    assert (network.between_hosts(0, 1).transport, network.between_hosts(0, 1).bytes_per_s) == ("infiniband", 8e9)
    assert (network.between_hosts(3, 2).transport, network.between_hosts(3, 2).bytes_per_s) == ("roce", 4e9)
    across = network.between_hosts(1, 2)
    assert (across.transport, across.bytes_per_s, across.latency_s) == ("ethernet", 5e8, 1e-3)
    assert network.group([0, 1, 2]).transport == "ethernet" and network.group([0, 1, 2]).bytes_per_s == 5e8


@pytest.mark.parametrize(
    ("text", "hosts", "words"),
    [
        (
            TWO[: TWO.index("links")].replace("ethernet, bandwidth: 1e9", "ethernet"),
            (0, 2),
            ["'east' and 'west'", "links:"],
        ),
        (
            TWO.replace("infiniband, bandwidth: 8e9", "infiniband"),
            (0, 1),
            ["NIC 'ib' (infiniband)", "'e-0'", "bandwidth:"],
        ),
        (
            "clusters: [{name: c, hosts: [{name: h, count: 2, devices: 1}]}]",
            (0, 1),
            ["cluster 'c'", "host 'h-0'", "nics:"],
        ),
    ],
)
def test_missing_speeds_name_the_link(text: str, hosts: tuple[int, int], words: list[str]) -> None:
    with refusal(*words):
        cost_model(text).network.between_hosts(*hosts)


def test_measured_speeds_count_for_sockets_and_stated_ones_for_rdma() -> None:
    text = TWO.replace("{name: ib, kind: infiniband,", "{name: ib, kind: infiniband, addresses: [10.0.0.1],")
    topology = Topology.from_yaml_text(text)
    speed = {"transport": "infiniband", "bandwidth_bytes_per_s": 2e9, "latency_s": 1e-5, "measured": True}
    from lightning_holmes.cluster.topology import LinkSpeed

    east = dataclasses.replace(topology.clusters[0], speeds=(LinkSpeed(**speed),))
    topology = dataclasses.replace(topology, clusters=(east, topology.clusters[1]))
    rdma, sockets = (Network(topology, local_bytes_per_s=1e11, sockets=flag) for flag in (False, True))
    assert (rdma.between_hosts(0, 1).bytes_per_s, sockets.between_hosts(0, 1).bytes_per_s) == (8e9, 2e9)
    assert rdma.between_hosts(0, 1).latency_s == 1e-5


def test_step_costs_by_hand() -> None:
    costs = cost_model().step_costs(shape(Layout(pipeline=2, data=4)), Partition((2, 2)))
    assert costs.forward_s == (2.0, 3.0) and costs.backward_s == (4.0, 6.0)
    # rank 0: 2 layers and the embedding, fp32: 5e9 bytes over two members on each of two hosts
    inside, across = 2 * (1 / 2) * 5e9 / 1e11, 2 * (1 / 2) * 2.5e9 / 4e9  # each member half a card for half the bytes
    flat_ring = 2 * (3 / 4) * 5e9 / 8e9
    assert costs.reduce_s[0] == pytest.approx(min(inside + across, flat_ring), rel=1e-3)
    # each Ethernet card carries the activations of the two devices of its host, the link those of all four
    cards = dict(costs.routes[0, 1].hops)
    assert cards.pop("link 0>1") == pytest.approx(4 / 5e8)
    assert list(cards) == ["ethernet 0 out", "ethernet 2 in"] and set(cards.values()) == {2 / 5e8}
    assert costs.routes[0, 1].latency_s == 1e-3
    assert "link 1>0" in dict(costs.routes[1, 0].hops), "each direction has its own"


def test_a_sum_over_clusters_in_two_levels_costs_the_sum_of_its_parts_and_less_than_a_flat_one() -> None:
    costs, layout = cost_model(), Layout(pipeline=1, data=8)
    num_bytes = 1e10  # four layers, embedding and head; two members on each of two hosts in each cluster
    host = 2 * (1 / 2) * num_bytes / 1e11
    inside = 2 * (1 / 2) * (num_bytes / 2) / 2e9  # in the slower cluster, by halves of a card
    across = 2 * (1 / 2) * num_bytes / 5e8 + 2 * 1e-3
    found = costs.step_costs(shape(layout), Partition((4,))).reduce_s[0]
    assert found == pytest.approx(host + inside + across, rel=1e-3)
    (group,) = costs.facts(layout).groups
    (flat, _), (in_levels, _) = (
        costs._reduction(dataclasses.replace(group, levels=levels), num_bytes, False) for levels in (None, group.levels)
    )
    assert found == pytest.approx(in_levels) and in_levels < 0.8 * flat


def test_mfu_counts_no_forward_that_is_run_again() -> None:
    """A forward that the module runs again counts once for MFU; it counts in the hardware's FLOPs only."""
    own = dataclasses.replace(LAYER, backward=LAYER.forward + LAYER.backward, recomputed=LAYER.forward)
    checkpointed = dataclasses.replace(MODEL, layers=(own,) * 4)
    layout, partition = Layout(pipeline=2, data=4), Partition((2, 2))
    computed, again, peak = 8 * (4 * 3e12 + 3e12), 8 * 4 * 1e12, 8 * 1e12  # eight samples, layers and head; devices
    for model in (MODEL, checkpointed):
        found = predict(cost_model(model=model), shape(layout), partition)
        runs_again = again if model is checkpointed else 0.0
        assert found.mfu == pytest.approx(computed / found.step_s / peak)
        assert found.flops_per_s_per_device == pytest.approx((computed + runs_again) / found.step_s / 8)


def many_hosts(hosts: int, link: str | None) -> str:
    """Return two clusters of this many hosts with one device each, with the given description of the link between
    them."""
    nics = "nics: [{name: ib, kind: infiniband, bandwidth: 25e9}, {name: eth, kind: ethernet, bandwidth: 1.25e9}]"
    lines = [f"  - {{name: {c}, hosts: [{{name: {c}h, count: {hosts}, devices: 1, {nics}}}]}}" for c in "ab"]
    ends = "{ends: [a, b], transport: ethernet, latency: 0, bandwidth: 10 Gbit/s"
    return "\n".join(["clusters:", *lines, "" if link is None else f"links: [{ends}{link}}}]"])


@pytest.mark.parametrize(
    ("link", "sharers"), [("", 16), (", measured: true", 16), (None, 1)], ids=["stated", "measured", "not given"]
)
def test_a_link_between_clusters_is_shared_by_all_hosts(link: str | None, sharers: int) -> None:
    """2 x 16 hosts over one link of 10 Gbit/s: the bytes of sixteen replicas cross it, whichever collective is used."""
    model = cost_model(many_hosts(16, link))
    across = model.step_costs(shape(Layout(pipeline=2, data=16)), Partition((2, 2)))
    slowest = max(seconds for _, seconds in across.routes[0, 1].hops)
    assert slowest == pytest.approx(sharers / 1.25e9)
    timeline = simulate(shape(Layout(pipeline=2, data=16)).make_schedule(), across)
    transfers = [span.end_s - span.start_s for span in timeline.spans[0] if span.kind == "transfer"]
    latency_s = DEFAULT_LATENCY_S["between clusters"] if link is None else 0.0
    assert transfers == pytest.approx([1e7 * sharers / 1.25e9 + latency_s] * 4)
    # gradients of both stages cross it at the same time
    data = model.step_costs(
        shape(Layout(pipeline=2, data=16, grid=(tuple(range(0, 32, 2)), tuple(range(1, 32, 2))))), Partition((2, 2))
    )
    # in two levels: inside over 25e9, then over the link that both stages share, or over each pair's own
    inside_s, across_s = 2 * (7 / 8) * 5e9 / 25e9, 5e9 / (1.25e9 / 2 if sharers > 1 else 8 * 1.25e9)
    assert data.reduce_s[0] == pytest.approx(inside_s + across_s, rel=1e-3)
    assert ("link 0>1" in data.reduce_cards[0]) == (sharers > 1)


@pytest.mark.parametrize(
    ("hosts", "link", "noted"),
    [(16, ", measured: true", False), (16, "", False), (16, None, True), (1, None, False)],
    ids=["measured", "stated", "not given", "not given, the only pair"],
)
def test_a_link_that_counts_for_each_pair_is_noted(hosts: int, link: str | None, noted: bool) -> None:
    text = many_hosts(hosts, link)
    network = Network(Topology.from_yaml_text(text), local_bytes_per_s=1e11, efficiency=0.9)
    notes = network.link_notes()
    assert len(notes) == noted
    if noted:
        assert "link a - b: each pair of hosts is taken to have its own" in notes[0]
        assert network.between_hosts(0, hosts).links == ()


def test_pairs_of_clusters_without_a_link_are_noted_in_one_line() -> None:
    nics = "nics: [{name: eth, kind: ethernet, bandwidth: 1.25e9}]"
    lines = [f"  - {{name: {c}, hosts: [{{name: {c}h, count: 2, devices: 1, {nics}}}]}}" for c in "abcd"]
    (note,) = Network(Topology.from_yaml_text("\n".join(["clusters:", *lines])), local_bytes_per_s=1e11).link_notes()
    assert note.startswith("link a - b (and 5 more): each pair of hosts")


def test_a_link_is_not_noted_where_a_fabric_reaches_across() -> None:
    text = many_hosts(2, ", measured: true").replace("kind: infiniband", "kind: infiniband, fabric: x")
    assert not Network(Topology.from_yaml_text(text), local_bytes_per_s=1e11).link_notes()


def test_what_processors_carry_by_hand() -> None:
    text = TWO.replace("devices: 2", "devices: 1")
    layout, partition = Layout(pipeline=2, data=2), Partition((2, 2))
    slow = find_device_type("speed=5e11,memory=1e12,local=1e11")

    def made(**training) -> StepCosts:
        return cost_model(text, devices=(DEVICE, slow), byte_s=1e-9, **training).step_costs(shape(layout), partition)

    whole = made()
    # measured on the slower cluster; the other one takes half as long
    assert whole.byte_s == (5e-10, 1e-9) and {route.carried for route in whole.routes.values()} == {1.0}
    # an all-reduce of two hosts sends and receives all 5e9 bytes of a rank's gradients
    assert whole.reduce_own_s == pytest.approx((5.0, 10.0)) and not any(whole.gather_own_s)
    halves = made(sharded_optimizer=True, activation_ratio_across=0.5)
    assert halves.reduce_own_s == halves.gather_own_s == pytest.approx((2.5, 5.0))
    assert {route.carried for route in halves.routes.values()} == {0.5}
    assert made(gradient_ratio_across=0.5).reduce_own_s == whole.reduce_own_s, "replicas of a stage lie in one cluster"
    assert cost_model(text, devices=(DEVICE, slow)).step_costs(shape(layout), partition).byte_s == ()
    with_own = made(own_s=8.0).update_s  # the same holds for a rank's own time around its microbatches
    assert [own - none for own, none in zip(with_own, whole.update_s, strict=True)] == pytest.approx([4.0, 8.0])


def test_memory_by_hand_and_as_simulated() -> None:
    model = cost_model(state_ratio=2.0)
    run = shape(Layout(pipeline=2, data=4))
    peaks = simulate(run.make_schedule(), model.step_costs(run, Partition((3, 1)))).peak_memory_bytes
    # parameters, gradients and two AdamW states; rank 0 holds two microbatches in flight, rank 1 one
    assert peaks == pytest.approx((4 * 6e9 + 2 * 3e8, 4 * 4e9 + 1 * (1e8 + 5e8)))
    balance = model.balance(run)
    assert tuple(balance.memory((3, 1))) == pytest.approx(peaks)
    assert balance.loads((3, 1)) == pytest.approx([9.0, 3.0 + 3.0])
    sharded = cost_model(sharded_optimizer=True)
    assert sharded.step_costs(run, Partition((3, 1))).static_bytes[0] == pytest.approx((1 + 1 + 2 / 4) * 6e9)
    half = cost_model(gradient_ratio=2.0, state_ratio=6.0)
    assert half.step_costs(run, Partition((3, 1))).static_bytes[0] == pytest.approx(9 * 6e9)


def test_tensor_parallel_divides_and_pays() -> None:
    # two devices of a host hold a layer together: an all-reduce of 1e7 bytes inside the host takes 1e-4 s
    run = shape(Layout(pipeline=2, tensor=2, data=2))
    costs = cost_model().step_costs(run, Partition((2, 2)))
    assert costs.forward_s[0] == pytest.approx(1.0 + 2 * 2 * 1e-4)
    assert costs.tensor_backward_s[0] == pytest.approx(2 * 2 * 1e-4)
    assert costs.static_bytes[0] == pytest.approx(4 * 5e9 / 2)
    # both devices of a host reduce their half through its card at the same time
    assert costs.reduce_s[0] == pytest.approx(2 * (1 / 2) * 2.5e9 / 4e9, rel=1e-3)


def test_hosts_of_a_cluster_may_have_unlike_devices() -> None:
    slow = find_device_type("speed=5e11,memory=5e11,local=1e11")
    topology = Topology.from_yaml_text(TWO)
    network = Network(topology, local_bytes_per_s=1e11)
    costs = CostModel(MODEL, network, devices=(DEVICE, slow, DEVICE, DEVICE), training=Training(batch_samples=8))
    assert costs.speeds(Layout(pipeline=2, data=4)) == (5e11, 1e12)
    assert costs.facts(Layout(pipeline=2, data=4)).memory == (0.92 * 5e11, 0.92 * 1e12)
    assert costs.peak_flops_per_s() == 6 * 1e12 + 2 * 5e11


def test_the_slowest_device_sets_a_stages_speed() -> None:
    slow = find_device_type("speed=5e11,memory=1e12")
    model = cost_model(devices=(DEVICE, slow))
    run = shape(Layout(pipeline=2, data=4))
    assert model.speeds(run.layout) == (1e12, 5e11)
    assert solve(model.balance(run)) == (3, 1)
    assert model.speeds(Layout(pipeline=2, data=4, grid=((0, 2, 4, 6), (1, 3, 5, 7)))) == (5e11, 5e11)


def test_gradients_of_tied_embeddings_are_sent_between_the_ends_where_they_are_trained() -> None:
    run, partition = shape(Layout(pipeline=2, data=4)), Partition((2, 2))
    tied = dataclasses.replace(MODEL, shared_bytes=3e9)
    shared_s, plain_s = (cost_model(model=model).step_costs(run, partition).reduce_s[0] for model in (tied, MODEL))
    assert shared_s == pytest.approx(plain_s + 3e9 * 4 / 5e8 + 2e-3), "four devices share the link"

    before, after = (dataclasses.replace(place, gradient_bytes=0.0) for place in (MODEL.before, MODEL.after))
    frozen = [dataclasses.replace(model, before=before, after=after) for model in (tied, MODEL)]
    of_tied, of_others = (cost_model(model=model) for model in frozen)
    assert predict(of_tied, run, partition).step_s == predict(of_others, run, partition).step_s
