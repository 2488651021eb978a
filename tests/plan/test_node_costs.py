"""Optimizer nodes in predictions: memory and traffic of workers and nodes, worked out by hand."""

import pytest
from test_cost_model import DEVICE

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.partition import make_uniform_partition
from lightning_holmes.plan.prediction import Prediction, predict
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.training import Training, make_training

WORKERS = """
clusters:
  - name: workers
    hosts: [{name: w, count: 2, devices: 1, nics: [{name: eth0, kind: ethernet, bandwidth: 1e9}]}]
"""
ENDS, LAYER = 3e9, 1e9


def model(num_layers: int) -> ModelCost:
    layer = LayerCost(forward=1e12, backward=2e12, parameter_bytes=LAYER, activation_bytes=1e7, held_bytes=1e8)
    return ModelCost(
        microbatch_samples=1,
        before=LayerCost(forward=0, backward=0, parameter_bytes=ENDS, activation_bytes=1e7),
        layers=(layer,) * num_layers,
        after=LayerCost(forward=1e12, backward=2e12, parameter_bytes=ENDS),
    )


def predicted(num_layers: int, **options: object) -> Prediction:
    made = model(num_layers)
    training: Training = make_training(
        Asked(**options),  # type: ignore[arg-type]
        made,
        batch_samples=4,
        device="cpu",
        update_s_per_byte=1.0,
    )
    network = Network(Topology.from_yaml_text(WORKERS), local_bytes_per_s=1e11)
    run = RunShape(
        layout=Layout(pipeline=1, tensor=1, data=2),
        schedule="breadth_first",
        num_chunks=num_layers,
        num_microbatches=2,
        microbatch_samples=1,
    )
    costs = CostModel(made, network, devices=(DEVICE,), training=training)
    return predict(costs, run, make_uniform_partition(num_layers, num_layers))


def test_a_worker_holds_two_stages_however_deep_the_model_is() -> None:
    for num_layers in (4, 8):
        costs = predicted(num_layers, optimizer_nodes=1).costs
        assert costs.static_bytes == (0.0,) and costs.update_s == (0.0,)
        # the first stage is the first layer and the part before it; the last stage is the last layer and the part
        # after it; values and gradients
        assert costs.transient_bytes == (2 * 2 * (ENDS + LAYER),)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_node_has_sixteen_bytes_a_parameter_and_every_workers_gradients(nodes: int) -> None:
    found, parameters = predicted(4, optimizer_nodes=nodes), 2 * ENDS + 4 * LAYER
    load = found.nodes
    assert load is not None and load.count == nodes and not found.sharded_parameters
    assert load.memory_bytes == pytest.approx(4 * parameters / nodes), "values, gradients, two states"
    assert load.received_bytes == pytest.approx(2 * parameters / nodes)
    assert load.sent_bytes == pytest.approx(2 * 2 * parameters / nodes)
    # two workers share the node's card; with two nodes there is one card for each
    rate = 1e9 * min(1.0, nodes / 2)
    assert found.costs.reduce_s[1] == pytest.approx(LAYER / rate)
    assert found.costs.fetch_s[1] == pytest.approx(LAYER / rate)
    assert f"{nodes} optimizer node" in load.describe()
