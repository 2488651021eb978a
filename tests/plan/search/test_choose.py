"""The choices of "auto" and of the partition rules: the fastest candidate by simulation, within the module's limits."""

import dataclasses
import pickle
from typing import Any

import pytest
from plans import plan_of

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import DeviceType
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.partition import Partition, make_partition, make_uniform_partition
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.plan import WHOLE_MODULE, Plan
from lightning_holmes.plan.planner import Known, choose, complete
from lightning_holmes.plan.prediction import Prediction, fits, predict
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.saved_plan import asked_by
from lightning_holmes.plan.search.refine import GAIN, refine
from lightning_holmes.plan.self_adapting import NothingFitsError
from lightning_holmes.plan.training import Training

LAYER = LayerCost(forward=1.0, backward=2.0, parameter_bytes=1e6, activation_bytes=1e6, held_bytes=2e6)
LAYOUT = Layout(pipeline=2, grid=((0,), (1,)))
TWO = Topology.single_cluster(2, 1)


def costs(
    *,
    speeds: tuple[float, float] = (1.0, 1.0),
    bandwidth: float = 1e12,
    layers: int = 12,
    head: float = 0.0,
    memory: float = 1e12,
    samples: int = 1,
    batch: int = 16,
    **changes: Any,
) -> CostModel:
    """Two hosts in two clusters; a layer takes three seconds per sample at speed 1."""
    card = Nic(name="eth0", kind="ethernet", bandwidth_bytes_per_s=bandwidth)
    clusters = tuple(Cluster(name=name, hosts=(Host(name=name, devices=1, nics=(card,)),)) for name in ("east", "west"))
    network = Network(Topology(clusters=clusters), local_bytes_per_s=1e12)
    model = ModelCost(
        microbatch_samples=1, layers=(LAYER,) * layers, after=LayerCost(forward=head, backward=2 * head), **changes
    )
    devices = [
        DeviceType(name="h", peak_flops_per_s=speed, memory_bytes=memory, local_bytes_per_s=1e12, efficiency=1.0)
        for speed in speeds
    ]
    return CostModel(model, network, devices=devices, training=Training(batch_samples=batch))


def chosen(asked: Asked, model: CostModel, layout: Layout = LAYOUT, **facts: Any) -> Plan:
    """The plan for these costs, with what else is known."""
    assert layout.grid is not None
    known = Known(
        topology=model.network.topology,
        placement=Placement(layout.grid),
        layers="layers",
        num_layers=model.model.num_layers,
        costs=model,
    )
    return choose(dataclasses.replace(known, **facts), asked)


def uncosted(asked: Asked, num_layers: int, batch_size: int = 6, topology: Topology = TWO, **facts: Any) -> Plan:
    """The plan of two pipeline ranks whose costs are not known."""
    known = Known(
        topology=topology,
        placement=Placement(((0,), (1,))),
        layers="layers",
        num_layers=num_layers,
        batch_size=batch_size,
    )
    return choose(dataclasses.replace(known, **facts), asked)


def test_a_host_of_half_the_speed_gets_half_of_the_layers_and_the_reason_is_said() -> None:
    options = Asked(num_microbatches=8, num_chunks=1)
    choice = chosen(options, costs(speeds=(2.0, 1.0)), described="by hand")
    assert choice.partition.layer_counts == (8, 4)
    note = next(note for note in choice.notes if note.startswith("partition"))
    assert "8, 4 layers, self_adapting" in note and "by count a step would take 1.4" in note
    assert any("by hand" in note for note in choice.notes)


def test_interleaving_is_chosen_where_it_pays_and_the_module_allows_it() -> None:
    options = Asked(num_microbatches=2)
    fast = chosen(options, costs())
    assert fast.schedule == "breadth_first" and fast.num_chunks == 6, "a layer a stage saves 4 % of four stages a rank"
    assert fast.partition.num_stages == 2 * fast.num_chunks
    held = chosen(dataclasses.replace(options, num_chunks=3), costs())
    assert held.schedule == "interleaved_1f1b", "as fast with as many stages, and it may hold fewer activations"
    slow = chosen(options, costs(bandwidth=2e5))
    assert slow.num_chunks == 1
    more = Asked(num_microbatches=8)
    hidden = chosen(more, costs(bandwidth=6e5), may_split=False)
    assert hidden.schedule == "eager_interleaved_1f1b", hidden.notes
    refused = chosen(options, costs(), not_interleaved="it does not allow them")
    assert refused.num_chunks == 1 and any("it does not allow them" in note for note in refused.notes)
    few = chosen(options, costs(layers=3))
    assert few.num_chunks == 1 and not any("interleav" in note for note in few.notes)


def test_a_run_says_which_other_length_of_the_pipeline_is_faster_and_keeps_its_own() -> None:
    """Two clusters, for which "auto" takes two stages. Activations are large beside the parameters: data parallelism pays."""
    large = costs(bandwidth=2e4, batch=64)
    found = chosen(Asked(), large)
    assert found.pipeline_parallel_size == 2
    (note,) = (note for note in found.notes if note.startswith("pipeline_parallel_size=1 would take 0."))
    assert note.endswith("set it to have that: the data is then dealt to 2 instead of 1 replicas")
    few_activations = chosen(Asked(), costs(bandwidth=2e5))
    for plan in (chosen(Asked(pipeline_parallel_size=2), large), few_activations):
        assert not any("would take" in note and "samples a step" in note for note in plan.notes), plan.notes


def test_a_longer_warm_up_is_chosen_where_it_hides_transfers() -> None:
    options = Asked(num_microbatches=8, num_chunks=1)
    slow = chosen(options, costs(bandwidth=2e5), may_split=False)
    assert slow.schedule == "eager_1f1b" and any("(1f1b: 1." in note for note in slow.notes)
    fast = chosen(options, costs(), may_split=False)
    assert fast.schedule == "1f1b", "as fast, and holds less"


def test_backwards_are_split_where_that_is_predicted_to_save_enough_and_is_possible() -> None:
    options = Asked(num_microbatches=4, num_chunks=1)
    assert chosen(options, costs()).schedule == "zero_bubble"
    dear = costs()
    dear = dear.with_training(dataclasses.replace(dear.training, split_ratio=1.3))
    assert chosen(options, dear).schedule == "1f1b"
    for layer in (dataclasses.replace(LAYER, recomputed=1.0), dataclasses.replace(LAYER, backward=0.0)):
        model = costs()
        model.model = dataclasses.replace(model.model, layers=(layer, *model.model.layers[1:]))
        assert chosen(options, model).schedule == "1f1b", "it runs a forward again, or does not train"


def test_a_pipeline_across_clusters_whose_costs_are_not_known_leaves_time_for_transfers() -> None:
    options = Asked(num_microbatches=8, num_chunks=1)
    blind = uncosted(options, 12, topology=costs().network.topology)
    assert blind.schedule == "eager_1f1b"
    assert "schedule: " in blind.notes[-1] and "up to 3 microbatches where 1f1b holds 2" in blind.notes[-1]
    assert uncosted(options, 12).schedule == "1f1b"
    several = uncosted(Asked(num_chunks=2), 12, topology=costs().network.topology)
    assert several.schedule == "eager_interleaved_1f1b"


def test_what_is_said_stays() -> None:
    options = Asked(schedule="gpipe", num_microbatches=4, partition=[9, 3], num_chunks=1)
    choice = chosen(options, costs())
    assert (choice.schedule, choice.num_microbatches, choice.partition.layer_counts) == ("gpipe", 4, (9, 3))
    assert [note.split(":")[0] for note in choice.notes] == ["layers", "prediction"]
    listed = Asked(partition=[3, 3, 3, 3])
    choice = chosen(listed, costs())
    assert (choice.schedule, choice.num_chunks) == ("interleaved_1f1b", 2)


def test_cuts_that_lose_a_value_are_avoided() -> None:
    options = Asked(num_microbatches=8, num_chunks=1)
    forbidden = (4, 5, 6)
    choice = chosen(options, costs(forbidden_cuts=forbidden))
    assert choice.partition.layer_counts in ((4, 8), (8, 4))
    with pytest.raises(ConfigurationError, match="avoids the split points"):
        chosen(options, costs(forbidden_cuts=tuple(range(11))))


def test_a_plan_that_does_not_fit_is_not_taken() -> None:
    """A layer has 4 MB of parameters, gradients and states, and 2 MB for each sample of a microbatch in flight."""
    small = LAYER.parameter_bytes * 6 / 0.92  # room for the parameters of six layers only
    for rule in ("self_adapting", "uniform"):
        options = Asked(partition=rule)
        with pytest.raises(NothingFitsError) as caught:
            chosen(options, costs(memory=small))
        for words in (
            "GiB a device are missing at the least",
            "What can make it fit: ",
            "devices with",
            "an optimizer that keeps nothing",
        ):
            assert words in str(caught.value)
        sent = pickle.loads(pickle.dumps(caught.value))  # as when it is sent to the other ranks
        assert (str(sent), sent.excess_bytes) == (str(caught.value), caught.value.excess_bytes)
        assert caught.value.excess_bytes > 0
    by_hand = chosen(Asked(partition=[6, 6], num_chunks=1), costs(memory=small))
    assert any(note.startswith("memory: by its estimate ") and "GiB" in note for note in by_hand.notes)
    settled = Asked(partition="uniform", num_chunks=2, schedule="interleaved_1f1b", num_microbatches=4)
    taken = chosen(settled, costs(memory=small))  # as if nothing were predicted
    assert any(note.startswith("memory: by its estimate ") for note in taken.notes)


def test_a_plan_that_fits_with_an_optimizer_of_fewer_states_is_taken_and_noted() -> None:
    """AdamW's states are 12 MB of the memory of six layers; however the layers lie, two ranks need more than both have."""
    options = Asked(num_chunks=1, schedule="1f1b", num_microbatches=4)
    roomy = chosen(options, costs()).prediction
    assert roomy is not None
    memory = (sum(roomy.memory_bytes) / 2 - 6 * LAYER.parameter_bytes) / 0.92
    choice = chosen(options, costs(memory=memory))
    assert choice.prediction is not None and fits(choice.prediction)
    (note,) = (note for note in choice.notes if note.startswith("memory: "))
    assert "as AdamW does" in note and "GiB a device are missing at the least" in note


def test_without_costs_layers_go_by_count_but_around_forbidden_cuts() -> None:
    plain = uncosted(Asked(), 12, costs="nothing is trained")
    assert plain.partition.layer_counts == (6, 6) and plain.num_microbatches == 6
    assert "partition: 6, 6 layers, by count, since nothing is trained" in plain.notes
    around = uncosted(Asked(), 12, forbidden_cuts=(4, 5, 6))
    assert around.partition.layer_counts in ((4, 8), (8, 4))
    none = uncosted(Asked(), 3, forbidden_cuts=(0, 1))
    assert none.partition == make_uniform_partition(3, 2), "the check of the partition names the value"
    kept = uncosted(Asked(partition="uniform"), 12, forbidden_cuts=(5,))
    assert kept.partition.layer_counts == (6, 6)


def test_where_no_split_point_is_free_costs_do_not_decide() -> None:
    every = tuple(range(11))
    plan = chosen(Asked(num_microbatches=8, num_chunks=1), costs(forbidden_cuts=every), forbidden_cuts=every)
    assert plan.prediction is None and any("since no split point is free" in note for note in plan.notes)


@pytest.mark.parametrize(("ranks", "batch", "expected"), [(1, 32, 1), (2, 32, 8), (2, 5, 5), (4, None, 16)])
def test_automatic_microbatches_are_four_a_rank_as_far_as_the_batch_reaches(
    ranks: int, batch: int | None, expected: int
) -> None:
    placement = Placement(tuple((rank,) for rank in range(ranks)))
    plan = uncosted(Asked(), 12, topology=Topology.single_cluster(1, ranks), placement=placement, batch_size=batch)
    assert plan.num_microbatches == expected and plan.eval_num_microbatches == 1
    assert any("num_microbatches" in note for note in plan.notes) == (ranks > 1)


def test_a_module_without_layers_runs_whole_but_takes_no_options_for_layers() -> None:
    alone: dict[str, Any] = {"layers": None, "placement": Placement(((0, 1),))}
    assert uncosted(Asked(), 0, **alone).layers == WHOLE_MODULE
    with pytest.raises(ConfigurationError, match="whole"):
        uncosted(Asked(partition=[8]), 0, **alone)


def test_a_former_choice_is_kept_but_for_what_is_said() -> None:
    former = chosen(Asked(), costs())
    again = chosen(Asked(num_microbatches=3, layers="layers"), costs(), former=former)
    assert again.partition == former.partition and again.num_microbatches == 3
    assert again.notes == (
        "partition, schedule and microbatches: as in the run before, so that every rank keeps its part",
    )


def test_what_is_sharded_and_summed_is_added_with_the_reasons() -> None:
    topology, notes = Topology.single_cluster(1, 4), ["sharding: because"]
    plan = chosen(Asked(layers="layers"), costs())
    plan = dataclasses.replace(plan, placement=Placement(((0, 1), (2, 3))), data_parallel_size=2)
    done = complete(plan, topology=topology, sharding="optimizer", sockets=True, asked=Asked(), notes=notes)
    assert (done.sharding, done.collectives) == ("optimizer", ("p2p", "p2p"))
    assert done.notes[len(plan.notes) :] == (
        "sharding: because",
        "gradient_sync: p2p, over the replicas of pipeline rank 0, 1",
        "eval_num_microbatches: 1, exact for any evaluation step",
    )


PLAN = plan_of((0,), (1,), stages=(5, 4))


def test_a_plan_file_decides_all_and_takes_nothing_beside_it() -> None:
    options = asked_by(PLAN, Asked(), source="plan.yaml")
    assert (options.partition, options.num_microbatches, options.layers) == ([5, 4], 4, "layers")
    assert (options.sharding, options.gradient_sync, options.compression) == ("none", "auto", None)
    assert not options.leaves_open
    with pytest.raises(
        ConfigurationError, match=r"plan='plan.yaml' decides the layout, so leave out num_microbatches=2"
    ):
        asked_by(PLAN, Asked(num_microbatches=2), source="plan.yaml")


RUN = RunShape(layout=LAYOUT, schedule="1f1b", num_microbatches=8, microbatch_samples=2)


def first_dealt(model: CostModel) -> Prediction:
    """Return the prediction for the partition with the fastest slowest stage."""
    return predict(model, RUN, make_partition("self_adapting", 10, 2, balance=model.balance(RUN)))


@pytest.mark.parametrize("speed", [0.4, 0.45, 0.5, 1.0])
@pytest.mark.parametrize("bandwidth", [1e5, 2e5, 4e5, 1e7])
def test_two_stages_come_to_the_best_of_all_partitions(speed: float, bandwidth: float) -> None:
    model = costs(speeds=(1.0, speed), bandwidth=bandwidth, layers=10)
    every = [predict(model, RUN, Partition((first, 10 - first))).step_s for first in range(1, 10)]
    assert refine(model, first_dealt(model)).step_s <= min(every) / (1 - GAIN)


def test_a_slow_link_takes_layers_from_the_slow_rank() -> None:
    model = costs(speeds=(1.0, 0.45), bandwidth=2e5, layers=10)
    before = first_dealt(model)
    assert before.partition.layer_counts == (7, 3)
    assert refine(model, before).partition.layer_counts == (8, 2)


def test_forbidden_cuts_and_too_little_memory_are_left_alone() -> None:
    forbidden = costs(speeds=(1.0, 0.45), bandwidth=2e5, layers=10, forbidden_cuts=(7,))
    assert refine(forbidden, first_dealt(forbidden)).partition.layer_counts == (7, 3)
    free = costs(speeds=(1.0, 0.45), bandwidth=2e5, layers=10)
    needed = max(first_dealt(free).memory_bytes)
    tight = costs(speeds=(1.0, 0.45), bandwidth=2e5, layers=10, memory=needed / free.training.memory_share)
    assert refine(tight, first_dealt(tight)).partition.layer_counts == (7, 3)
