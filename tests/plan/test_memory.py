"""The memory of a rank, by hand; test_cost_model.py compares it with the simulation for whole runs."""

import pytest

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import DeviceType
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.memory import lack_of_memory, stage_in_flight
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.schedule import make_schedule, max_in_flight
from lightning_holmes.plan.training import Training

LAYER = LayerCost(forward=1.0, backward=2.0, parameter_bytes=100.0, gradient_bytes=40.0, held_bytes=30.0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "eager_interleaved_1f1b"])
def test_in_flight_is_the_schedules_own(name: str) -> None:
    for ranks, microbatches, chunks in [(2, 4, 2), (4, 8, 2), (4, 4, 3), (3, 9, 2)]:
        if "interleaved" not in name:
            chunks = 1
        made = make_schedule(name, pipeline_parallel_size=ranks, num_microbatches=microbatches, num_chunks=chunks)
        stages = stage_in_flight(name, ranks, microbatches, chunks)
        held = [sum(stages[rank::ranks]) for rank in range(ranks)]
        assert tuple(held) == max_in_flight(made)


def test_what_both_ends_share_is_held_once_and_two_stages_are_whole() -> None:
    """One rank, two stages sharded over four replicas; a tied table of 40 bytes, layers of 4: parameters, gradients,
    two states."""
    layer, end = (LayerCost(forward=1.0, backward=2.0, parameter_bytes=size) for size in (4.0, 40.0))
    hosts = tuple(
        Host(name=f"h{i}", devices=1, nics=(Nic(name="e", kind="ethernet", bandwidth_bytes_per_s=1e9),))
        for i in range(4)
    )
    network = Network(Topology(clusters=(Cluster(name="c", hosts=hosts),)), local_bytes_per_s=1e9)
    device = DeviceType(name="d", peak_flops_per_s=1.0, memory_bytes=1e3, local_bytes_per_s=1e9, efficiency=1.0)
    training = Training(batch_samples=4, sharded_optimizer=True, sharded_parameters=True)
    run = RunShape(
        layout=Layout(pipeline=1, data=4),
        schedule="breadth_first",
        num_microbatches=1,
        microbatch_samples=1,
        num_chunks=2,
    )
    for shared, held, whole in ((40.0, 48.0, 2 * 8.0 + 80.0), (0.0, 88.0, 2 * 88.0)):
        model = ModelCost(microbatch_samples=1, before=end, layers=(layer,) * 2, after=end, shared_bytes=shared)
        costs = CostModel(model, network, devices=(device,), training=training).step_costs(run, Partition((1, 1)))
        assert costs.static_bytes == (held * 4 / 4,)
        assert costs.transient_bytes == (whole,)


def test_the_rank_that_cannot_hold_the_state_is_named() -> None:
    gib, fits = 2**30, (2**30, 10 * 2**30)
    lack = lack_of_memory([fits, (int(9.5 * gib), 10 * gib), fits])
    assert lack == "9.5 GiB of state do not fit the 10 GiB that are free on rank 1"
    assert lack_of_memory([fits, (int(8.9 * gib), 10 * gib)]) is None
    assert lack_of_memory([(gib // 2, -gib)]) is not None
