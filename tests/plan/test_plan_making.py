"""Choosing a plan: the choices for "auto" are noted, and plans that do not fit are refused."""

import dataclasses
from typing import Any

import pytest

from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.placement import make_placement
from lightning_holmes.plan.plan import WHOLE_MODULE, Plan
from lightning_holmes.plan.plan_making import make_plan
from lightning_holmes.plan.plan_options import PlanOptions

AUTO = PlanOptions(
    pipeline_parallel_size="auto",
    num_microbatches="auto",
    eval_num_microbatches="auto",
    schedule="1f1b",
    num_chunks=1,
    partition="uniform",
    layers="auto",
)


def plan_of(
    pipeline: int,
    world: int,
    *,
    layers: str | None = "net",
    batch_size: int | None = 32,
    topology: Topology | None = None,
    **options: Any,
) -> Plan:
    topology = topology or Topology.single_cluster(1, world)
    return make_plan(
        dataclasses.replace(AUTO, **options),
        topology=topology,
        placement=make_placement(topology, world_size=world, pipeline_parallel_size=pipeline),
        layers=layers,
        num_layers=8,
        batch_size=batch_size,
        transports=lambda ranks, use: (f"gloo for {use}", "tested"),
    )


@pytest.mark.parametrize(("pipeline", "batch", "expected"), [(1, 32, 1), (2, 32, 8), (2, 5, 5), (4, None, 16)])
def test_automatic_microbatches_are_four_a_rank_as_far_as_the_batch_reaches(
    pipeline: int, batch: int | None, expected: int
) -> None:
    plan = plan_of(pipeline, 4, batch_size=batch)
    assert plan.num_microbatches == expected and plan.eval_num_microbatches == 1
    assert any("num_microbatches" in note for note in plan.notes) == (pipeline > 1)


def test_stages_in_different_clusters_are_scheduled_eagerly_and_the_note_says_what_it_costs() -> None:
    apart = Topology.from_yaml_text(
        "clusters:\n"
        "  - {name: a, hosts: [{name: a, devices: 2, nics: [{name: e, kind: ethernet, bandwidth: 1 Gbit/s}]}]}\n"
        "  - {name: b, hosts: [{name: b, devices: 2, nics: [{name: e, kind: ethernet, bandwidth: 1 Gbit/s}]}]}\n",
        source="test",
    )
    plan = plan_of(2, 4, topology=apart, schedule="auto")
    assert plan.schedule == "eager_1f1b"
    assert any("up to 3 microbatches where 1f1b holds 2" in note for note in plan.notes)
    assert plan_of(2, 4, schedule="auto").schedule == "1f1b"
    assert plan_of(2, 4, topology=apart, schedule="auto", num_chunks=2).schedule == "eager_interleaved_1f1b"
    assert plan_of(2, 4, topology=apart, schedule="1f1b").schedule == "1f1b"


def test_every_group_of_several_ranks_is_in_the_plan_once() -> None:
    plan = plan_of(2, 4)
    assert sorted((g.axis, g.ranks) for g in plan.groups) == [
        ("data_parallel", (0, 1)),
        ("data_parallel", (2, 3)),
        ("messages", (0, 2)),
        ("messages", (1, 3)),
        ("pipeline", (0, 2)),
        ("pipeline", (1, 3)),
        ("world", (0, 1, 2, 3)),
    ]
    used = {group.axis: group.transport for group in plan.groups}
    assert used["messages"] == "gloo for messages" and used["world"] == "gloo for world"
    assert used["data_parallel"] == used["pipeline"] == "gloo for tensors"
    assert plan_of(1, 1).groups == ()
    apart = Topology(clusters=tuple(Cluster(name=n, hosts=(Host(name=n, devices=2),)) for n in "ab"))
    assert [(group.name, group.ranks) for group in plan_of(1, 4, topology=apart).groups] == [
        ("data_parallel_0", (0, 1, 2, 3)),
        ("data_parallel_0_inside_0", (0, 1)),
        ("data_parallel_0_inside_1", (2, 3)),
        ("data_parallel_0_across_0", (0, 2)),
        ("data_parallel_0_across_1", (1, 3)),
        ("world", (0, 1, 2, 3)),
    ]
    assert Plan.from_yaml_text(plan.to_yaml()) == plan


def test_a_module_without_layers_runs_whole_but_takes_no_options_for_layers() -> None:
    assert plan_of(1, 2, layers=None).layers == WHOLE_MODULE
    with pytest.raises(ConfigurationError, match="whole"):
        plan_of(1, 2, layers=None, partition=[8])
