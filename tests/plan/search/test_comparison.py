"""The search: compared with an exhaustive search, fast on thousands of devices, with a clear error if nothing fits."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import published
import pytest
from refusals import refusal

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import find_device_type
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.partition import Partition, make_partition
from lightning_holmes.plan.placement import make_placement
from lightning_holmes.plan.prediction import fits, predict
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.search import SearchSpace, comparison, refine, search, search_with_sharding
from lightning_holmes.plan.search.candidates import make_set_ups
from lightning_holmes.plan.search.not_fitting import WAY_OUT, WITH_STATES
from lightning_holmes.plan.self_adapting import NothingFitsError
from lightning_holmes.plan.training import Training

T = TypeVar("T")
COUNTS = ("forward", "backward", "parameter_bytes", "activation_bytes", "held_bytes")
A100 = find_device_type("A100-80GB")


def gpt_cost(hidden: int, layers: int, **sizes: int) -> ModelCost:
    """Return the cost of a GPT in bf16, with one sample per microbatch: its FLOPs and bytes alone."""
    cost = published.gpt_cost(hidden, layers, **sizes)
    layer, after = (
        LayerCost(**{name: getattr(each, name) for name in COUNTS}) for each in (cost.layers[0], cost.after)
    )
    return dataclasses.replace(cost, layers=(layer,) * layers, after=after, shared_bytes=0.0)


def clusters(*hosts: int, devices: int = 8) -> Topology:
    """Return clusters of this many hosts, alternately InfiniBand and RoCE, with Ethernet between all of them."""
    lines = ["clusters:"]
    for index, count in enumerate(hosts):
        kind = ("infiniband", "roce")[index % 2]
        lines += [f"  - name: c{index}", "    hosts:"]
        lines += [f"      - {{name: h{index}, count: {count}, devices: {devices}, nics: ["]
        lines += [f"          {{name: fast, kind: {kind}, bandwidth: 200 Gbit/s}},"]
        lines += ["          {name: eth, kind: ethernet, bandwidth: 25 Gbit/s}]}"]
    pairs = [(first, second) for second in range(len(hosts)) for first in range(second)]
    if pairs:
        lines += ["links:"]
        for first, second in pairs:
            lines += [f"  - {{ends: [c{first}, c{second}], transport: ethernet, bandwidth: 25 Gbit/s, latency: 1 ms}}"]
    return Topology.from_yaml_text("\n".join(lines))


def cost_model(model: ModelCost, topology: Topology, batch: int, *, device=A100, **training) -> CostModel:
    network = Network(topology, local_bytes_per_s=device.local_bytes_per_s)
    training = {"gradient_ratio": 2.0, "state_ratio": 6.0, **training}
    return CostModel(
        model, network, devices=(device,) * len(topology.clusters), training=Training(batch_samples=batch, **training)
    )


def test_it_finds_what_trying_everything_finds() -> None:
    costs = cost_model(gpt_cost(1024, 12), clusters(1, 1, devices=4), 32)
    best = None
    for pipeline in (1, 2, 4, 8):
        layout = Layout(pipeline=pipeline, data=8 // pipeline)
        for count in (1, 2, 4, 8, 16, 32):
            samples = 32 // layout.data
            if count > samples:
                continue
            for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)):
                if chunks > 1 and (pipeline == 1 or pipeline * chunks > 12 or count < pipeline):
                    continue
                run = RunShape(
                    layout=layout,
                    schedule=schedule,
                    num_chunks=chunks,
                    num_microbatches=count,
                    microbatch_samples=samples // count,
                )
                partition = make_partition("self_adapting", 12, pipeline * chunks, balance=costs.balance(run))
                step_s = predict(costs, run, partition).step_s
                best = step_s if best is None else min(best, step_s)
    assert search(costs).best.step_s <= best * 1.003


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_reductions_beside_the_backward_are_not_taken_for_free(tied: bool) -> None:
    """Layouts whose reductions cross a slow link look fast if the reductions are left out; the best layout must be
    simulated, too."""
    model = gpt_cost(1024, 12)
    model = dataclasses.replace(model, shared_bytes=model.after.parameter_bytes if tied else 0.0)
    costs = cost_model(model, slower_links(clusters(2, 2, devices=4), 1.25e8), 32)
    chosen = search(costs).best
    forced = [
        search(costs, SearchSpace(layout=Layout(pipeline=size, data=16 // size))).best.step_s for size in (1, 2, 4, 8)
    ]
    assert chosen.step_s <= 1.01 * min(forced), (str(chosen.run), forced)


def slower_links(topology: Topology, bytes_per_s: float) -> Topology:
    links = tuple(dataclasses.replace(link, bandwidth_bytes_per_s=bytes_per_s) for link in topology.links)
    return dataclasses.replace(topology, links=links)


def test_the_pipeline_crosses_the_slow_link_and_gradients_do_not() -> None:
    # the communication of the paper's 7.5 B model: gradients are gigabytes, activations are not
    result = search(cost_model(gpt_cost(4096, 36), clusters(4, 4), 1536), SearchSpace(tensor=(1, 2)))
    assert result.best.run.layout.pipeline % 2 == 0
    assert result.best.tokens_per_s == pytest.approx(1536 * 2048 / result.best.step_s)
    assert 0.4 * A100.efficiency < result.best.mfu < A100.efficiency
    assert "computing" in result.best.reason and "bubble" in result.best.reason
    ratios = [entry.step_s / result.best.step_s for entry in result.runners_up]
    assert ratios == sorted(ratios) and min(ratios) > 0.99
    assert all(entry.reason for entry in result.runners_up)


def test_devices_are_dealt_as_a_run_would() -> None:
    """Hosts alternate between two fabrics, and stages do not divide the clusters: a stage is on one fabric, and in
    one cluster."""
    nics = [
        f"nics: [{{name: i, kind: infiniband, fabric: {f}, bandwidth: 8e9}}, {{name: e, kind: ethernet, bandwidth: 1e9}}]"
        for f in "xy"
    ]
    hosts = ", ".join(f"{{name: h{i}, devices: 1, {nics[i % 2]}}}" for i in range(4))
    others = ", ".join(f"{{name: g{i}, devices: 1, {nics[0]}}}" for i in range(4))
    topology = Topology.from_yaml_text(f"clusters: [{{name: a, hosts: [{hosts}]}}, {{name: b, hosts: [{others}]}}]")
    costs = cost_model(gpt_cost(1024, 12), topology, 32)
    set_ups = make_set_ups(costs, SearchSpace(pipeline=(4, 8)), Counter())
    layouts = {set_up.runs[0].layout.pipeline: set_up.runs[0].layout for set_up in set_ups}
    for size, layout in layouts.items():
        placed = make_placement(topology, world_size=8, pipeline_parallel_size=size).grid
        assert tuple(tuple(layout.devices_of(rank).ravel().tolist()) for rank in range(size)) == placed
    assert layouts[4].devices_of(0).ravel().tolist() == [0, 2], "of one fabric"
    assert layouts[4].grid is not None and costs.facts(layouts[4]).groups[0].channel.transport == "infiniband"


def test_what_is_asked_for_is_kept() -> None:
    costs = cost_model(gpt_cost(1024, 12), clusters(1, 1, devices=4), 32)
    space = SearchSpace(pipeline=(4,), schedules=("gpipe",), num_microbatches=(8,), partition="uniform")
    best = search(costs, space).best
    assert (best.run.layout.pipeline, best.run.schedule, best.run.num_microbatches) == (4, "gpipe", 8)
    assert best.partition.layer_counts == (3, 3, 3, 3)
    assert search(costs, dataclasses.replace(space, partition=(1, 2, 3, 6))).best.partition.layer_counts == (1, 2, 3, 6)


def test_4096_devices_in_five_clusters_take_few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of candidates, memory leaves some hundreds to estimate, and estimates leave some to simulate: this
    takes seconds on one core."""
    plain = gpt_cost(12288, 96)
    held, work = plain.layers[0].activation_bytes, plain.layers[0].forward
    again = dataclasses.replace(
        plain.layers[0], backward=3 * work, recomputed=work, held_bytes=held, undivided_bytes=held
    )
    model = dataclasses.replace(plain, layers=(again,) * 96)
    costs = cost_model(model, clusters(128, 128, 128, 64, 64), 4096)
    estimated: list[RunShape] = []
    simulated: list[RunShape] = []

    def noted(function: Callable[..., T], runs: list[RunShape]) -> Callable[..., T]:
        def call(cost_model: CostModel, run: RunShape, partition: Partition) -> T:
            runs.append(run)
            return function(cost_model, run, partition)

        return call

    monkeypatch.setattr(comparison, "_estimate", noted(comparison._estimate, estimated))
    for module in (comparison, refine):
        monkeypatch.setattr(module, "predict", noted(predict, simulated))
    result = search(costs, SearchSpace(tensor=(1, 2, 4, 8)))
    assert result.best.run in simulated and len(estimated) < 650 and len(simulated) < 20
    assert sum(run.layout.pipeline * run.num_chunks * run.num_microbatches for run in simulated) < 120_000
    assert len(result.runners_up) == 5
    assert all(mine <= most for mine, most in zip(result.best.memory_bytes, result.best.memory_limits, strict=True))
    assert result.best.run.layout.num_devices == 4096
    data = result.best.to_data()
    assert data["step_s"] == result.best.step_s and sum(data["partition"]) == 96


def test_a_model_that_fits_nowhere_says_by_how_much_and_what_would_help() -> None:
    # one device; 37 GB parameters need 37 * (1 + 2) GB without an optimizer's states
    costs = cost_model(gpt_cost(4096, 90), clusters(1, devices=1), 4)
    helps = ("devices with", "more devices", "tensor parallelism", WAY_OUT)
    with refusal("fits none of", "GiB a device are missing", *helps) as caught:
        search(costs)
    message = str(caught.value)
    missing = float(message.split(" GiB a device are missing")[0].split()[-1])
    needed = float(message.split("devices with ")[1].split(" GiB each")[0])
    bigger = dataclasses.replace(A100, memory_bytes=(needed + 0.1) * 2**30)
    assert missing > 20
    found = search(cost_model(gpt_cost(4096, 90), clusters(1, devices=1), 4, device=bigger))
    assert fits(found.best)
    assert found.memory_note is not None and found.memory_note.startswith(WITH_STATES)


@pytest.mark.parametrize("order", [("large", "small"), ("small", "large")])
def test_what_unlike_devices_lack_is_added_to_those_that_lack_it(order: tuple[str, str]) -> None:
    """Fifteen layers per rank: 59 GB of parameters, gradients and states, for which the small devices have no room."""
    topology, model = clusters(1, 1, devices=1), gpt_cost(4096, 30, vocabulary=512)
    types = {
        "large": dataclasses.replace(A100, memory_bytes=200 * 2**30),
        "small": dataclasses.replace(A100, memory_bytes=40 * 2**30),
    }
    training = Training(batch_samples=4, gradient_ratio=2.0, state_ratio=6.0, least_state_ratio=6.0)
    space = SearchSpace(pipeline=(2,), schedules=("1f1b",), partition="uniform")

    def costs(more: float = 0.0) -> CostModel:
        devices = tuple(
            dataclasses.replace(types[name], memory_bytes=types[name].memory_bytes + more * 2**30) for name in order
        )
        return CostModel(model, Network(topology, local_bytes_per_s=1e11), devices=devices, training=training)

    with pytest.raises(NothingFitsError) as caught:
        search(costs(), space)
    assert caught.value.rank == order.index("small")
    found = re.search(
        r"devices with ([\d.]+) GiB more each, which is ([\d.]+) GiB on pipeline rank (\d)", str(caught.value)
    )
    assert found is not None, caught.value
    more, needed = float(found[1]), float(found[2])
    assert int(found[3]) == order.index("small") and needed == pytest.approx(40 + more, abs=0.11) and needed < 100
    with pytest.raises(NothingFitsError):
        search(costs(more - 0.1), space)
    assert search(costs(more + 0.1), space).best.partition.layer_counts == (15, 15)


def test_the_only_plan_that_fits_is_found_after_others_have_used_up_what_may_be_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with 64 stages and 1,024 microbatches, of which one simulation is all that is allowed: the eager schedule is tried first, and
    holds more activations than the devices of the first cluster have memory for."""
    topology, space = clusters(2, 2, devices=1), SearchSpace(pipeline=(4,), num_microbatches=(16,))
    monkeypatch.setattr(comparison, "_LARGEST", 4 * 16)

    def costs(memory: float) -> CostModel:
        types = tuple(dataclasses.replace(A100, memory_bytes=size) for size in (memory, 40 * 2**30))
        training = Training(batch_samples=16, gradient_ratio=2.0, state_ratio=6.0, memory_share=1.0)
        return CostModel(
            gpt_cost(2048, 4, vocabulary=512),
            Network(topology, local_bytes_per_s=1e11),
            devices=types,
            training=training,
        )

    run = RunShape(layout=Layout(pipeline=4), schedule="1f1b", num_microbatches=16, microbatch_samples=1)
    layers = Partition((1, 1, 1, 1))
    needed, more = (
        max(predict(costs(1e12), dataclasses.replace(run, schedule=name), layers).memory_bytes)
        for name in ("1f1b", "eager_1f1b")
    )
    assert needed * 1.02 < more
    found = search(costs(needed * 1.01), dataclasses.replace(space, schedules=("eager_1f1b", "1f1b")))
    assert found.best.run == run and found.memory_note is None and fits(found.best)
    assert found.left_out == {"does not fit the memory": 1}
    both = search(costs(1e12), dataclasses.replace(space, schedules=("1f1b", "eager_1f1b")))
    assert {entry.run.schedule for entry in both.tried} == {"1f1b", "eager_1f1b"}


def test_a_cure_that_is_named_cures() -> None:
    model, topology = gpt_cost(4096, 30), clusters(1)
    space, cure = SearchSpace(pipeline=(1,)), "What can make it fit: parameters in shards"
    with pytest.raises(ConfigurationError, match=cure):
        search(cost_model(model, topology, 8, memory_share=0.5, least_state_ratio=6.0), space)
    note = search(cost_model(model, topology, 8, memory_share=0.7), space).memory_note
    assert note is not None and cure in note
    cured = search_with_sharding(cost_model(model, topology, 8, memory_share=0.7), space, "parameters")
    assert cured.memory_note is None and fits(cured.best)
