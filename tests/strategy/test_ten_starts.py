"""Ten starts of a network choose one plan, though each of them measures speeds and links a little differently."""

import functools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_holmes.cluster.topology import Cluster, Host, Link, LinkSpeed, Nic, Topology
from lightning_holmes.pipeline.device_speed import DeviceSpeed
from lightning_holmes.pipeline.profile import build_fake, profile_step
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.placement import make_placement
from lightning_holmes.plan.planner import Known, choose
from lightning_holmes.plan.rounding import rounded
from lightning_holmes.strategy.profiling import Costs, make_cost_model, rounded_speeds
from recipes.gpt import GPT

_NOISE = 0.18
_FAST, _SLOW = 115e6, 11.8e6  # bytes a second inside the clusters and between them
_OPERATOR_S = 9e-6
_FLOPS, _MOVED = 30e9, 2.5e9  # of 0.45 of a core of an EPYC


@pytest.mark.parametrize(
    ("hidden", "schedule", "layers"),
    [(192, "eager_interleaved_1f1b", (2, 3, 3, 3, 3, 2)), (384, "breadth_first", (1, 2, 2, 1))],
)
def test_ten_starts_choose_one_plan(hidden: int, schedule: str, layers: tuple[int, ...]) -> None:
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    module = build_fake(lambda: GPT(hidden_size=hidden, num_layers=sum(layers), num_heads=3, sequence_length=128))
    profile = functools.cache(lambda operator_s: profile_step(module, (batch, 0), operator_s=operator_s))
    chosen = set()
    for seed in range(10):
        measured = random.Random(seed)
        topology = measured_topology(measured)
        operator_s = rounded(noisy(measured, _OPERATOR_S), 4)
        rates, moves = rounded_speeds([[noisy(measured, s) for _ in range(4)] for s in (_FLOPS, _MOVED)], "cpu")
        costs = Costs(
            model=profile(operator_s),
            speeds=tuple(
                DeviceSpeed(
                    flops_per_s=rate,
                    moved_bytes_per_s=moved,
                    operator_s=operator_s,
                    memory_bytes=16e9,
                    local_bytes_per_s=1e9,
                    local_latency_s=1e-4,
                )
                for rate, moved in zip(rates, moves, strict=True)
            ),
        )
        placement = make_placement(topology, world_size=4, pipeline_parallel_size=2)
        job: Any = SimpleNamespace(topology=topology, num_hosts=4, is_gloo=True)
        cost_model, _ = make_cost_model(costs, job, placement, Asked(), device="cpu", batch_size=8, forbidden_cuts=())
        known = Known(topology=topology, placement=placement, layers="layers", num_layers=sum(layers), costs=cost_model)
        plan = choose(known, Asked())
        chosen.add((plan.schedule, plan.num_microbatches, plan.partition.layer_counts))
    assert chosen == {(schedule, 4, layers)}


def noisy(measured: random.Random, value: float) -> float:
    return value * measured.uniform(1 - _NOISE, 1 + _NOISE)


def measured_topology(measured: random.Random) -> Topology:
    """Two clusters of two hosts, whose links have been measured."""

    def speed(transport: str, bytes_per_s: float) -> LinkSpeed:
        return LinkSpeed(
            transport=transport,
            bandwidth_bytes_per_s=noisy(measured, bytes_per_s),
            latency_s=noisy(measured, 2e-4),
            measured=True,
        )

    clusters = []
    for cluster, kind in enumerate(("infiniband", "roce")):
        hosts = []
        for host in range(2):
            address = f"10.0.0.{cluster * 2 + host + 1}"
            fast = Nic(name="m", kind=kind, addresses=(address,), bandwidth_bytes_per_s=125e6)
            slow = Nic(name="e", kind="ethernet", bandwidth_bytes_per_s=12.5e6)
            hosts.append(Host(name=f"{kind}{host}", devices=1, nics=(fast, slow)))
        speeds = (speed(kind, _FAST), speed("ethernet", _SLOW))
        clusters.append(Cluster(name=kind, hosts=tuple(hosts), speeds=speeds))
    link = Link(
        ends=("infiniband", "roce"),
        transport="ethernet",
        bandwidth_bytes_per_s=noisy(measured, 2 * _SLOW),
        latency_s=noisy(measured, 2e-4),
        measured=True,
    )
    return Topology(clusters=tuple(clusters), links=(link,))
