"""The effects of the strategy's arguments on a step: each changes bytes, memory and seconds as it does in a run."""

import dataclasses
from typing import Any

import pytest

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import find_device_type
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.partition import make_uniform_partition
from lightning_holmes.plan.prediction import Prediction, predict
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.training import Training, make_training

TWO = """
clusters:
  - name: east
    hosts: [{name: e, count: 2, devices: 1, nics: [{name: ib, kind: infiniband, bandwidth: 8e9}]}]
  - name: west
    hosts: [{name: w, count: 2, devices: 1, nics: [{name: ro, kind: roce, bandwidth: 8e9}]}]
links:
  - {ends: [east, west], transport: ethernet, bandwidth: 1e9, latency: 1 ms}
"""
LAYER = LayerCost(forward=1e11, backward=2e11, parameter_bytes=1e9, activation_bytes=1e8, held_bytes=1e8)
MODEL = ModelCost(microbatch_samples=1, layers=(LAYER,) * 4)
HALF = dataclasses.replace(MODEL, parameter_itemsize=2.0, activation_itemsize=2.0)
PIPELINE, CROSSING = Layout(pipeline=2, data=2), Layout(pipeline=2, data=2, grid=((0, 2), (1, 3)))


def training(model: ModelCost = MODEL, **options: Any) -> Training:
    given = Asked(**{"sharding": "none", **options})
    return make_training(given, model, batch_samples=8, device="cuda")


def costs(model: ModelCost = MODEL, *, memory: float = 1e12, **options: Any) -> CostModel:
    device = find_device_type(f"speed=1e12,memory={memory}")
    network = Network(Topology.from_yaml_text(TWO), local_bytes_per_s=1e11)
    return CostModel(model, network, devices=(device,) * 2, training=training(model, **options))


def made(layout: Layout, model: ModelCost = MODEL, **options: Any) -> Prediction:
    run = RunShape(layout=layout, schedule="1f1b", num_microbatches=4, microbatch_samples=1)
    return predict(costs(model, **options), run, make_uniform_partition(4, 2))


def test_a_sharded_optimizer_divides_the_states_and_sends_parameters() -> None:
    whole, shared = made(PIPELINE), made(PIPELINE, sharding="optimizer")
    # 2 GB of parameters per rank, as much for gradients, twice as much for states
    assert max(whole.memory_bytes) - max(shared.memory_bytes) == pytest.approx(2e9)
    assert shared.costs.reduce_s[0] == pytest.approx(whole.costs.reduce_s[0] / 2) and sum(shared.costs.gather_s) > 0
    assert not whole.sharded_optimizer and shared.sharded_optimizer


def test_auto_is_what_a_run_would_choose() -> None:
    assert not costs(sharding="auto").shards_states(PIPELINE), "it fits, and updates take no time"
    slow = costs(sharding="auto")
    slow = slow.with_training(dataclasses.replace(slow.training, update_s_per_byte=1e-9))
    assert slow.shards_states(PIPELINE), "each updates half"
    assert not costs(sharding="auto").shards_states(Layout(pipeline=4)), "there is one replica"
    assert costs(sharding="auto", memory=6.5e9).shards_states(PIPELINE), "4 GB of states beside 4 GB do not fit"


def test_master_weights_are_fp32_and_always_in_shares() -> None:
    plain, master = made(PIPELINE, HALF), made(PIPELINE, HALF, master_weights=True, sharding="auto")
    # bf16 weights: gradients of 4 bytes, states of 2 x 2; or fp32 weights and states, 12 bytes over two replicas
    assert max(plain.costs.static_bytes) == pytest.approx(2e9 * (1 + 2 + 2))
    assert max(master.costs.static_bytes) == pytest.approx(2e9 * (1 + 2 + 6 / 2))
    assert training(MODEL, master_weights=True, sharding="auto") == training(sharding="auto")


def test_compression_halves_the_gradients_that_cross_clusters() -> None:
    plain, fewer = made(CROSSING), made(CROSSING, compression="bf16")
    assert (
        fewer.costs.reduce_s[0] == pytest.approx(plain.costs.reduce_s[0] / 2, rel=1e-2) and fewer.step_s < plain.step_s
    )
    assert fewer.memory_bytes == plain.memory_bytes
    summed_whole = made(CROSSING, compression="bf16", sharding="optimizer")
    assert summed_whole.costs.reduce_s == fewer.costs.reduce_s


def test_compression_halves_the_activations_that_cross_clusters() -> None:
    plain, fewer = made(PIPELINE), made(PIPELINE, compression="bf16")
    assert [route.carried for route in fewer.costs.routes.values()] == [0.5, 0.5]
    assert fewer.costs.reduce_s == plain.costs.reduce_s and fewer.step_s < plain.step_s
    assert made(PIPELINE, HALF, compression="bf16").costs == made(PIPELINE, HALF).costs, "they are bf16"
