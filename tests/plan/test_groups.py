"""The groups of a plan."""

from lightning_holmes.plan.groups import GroupPlan, plan_groups
from lightning_holmes.plan.placement import Placement


def groups_of(placement: Placement, clusters: str) -> list[GroupPlan]:
    return plan_groups(placement, (), lambda ranks, use: (f"gloo for {use}", "tested"), list(clusters))


def test_every_group_of_several_ranks_is_in_the_plan_once() -> None:
    groups = groups_of(Placement(((0, 1), (2, 3))), "aaaa")
    assert sorted((g.axis, g.ranks) for g in groups) == [
        *(("data_parallel", (0, 1)), ("data_parallel", (2, 3)), ("messages", (0, 2)), ("messages", (1, 3))),
        *(("pipeline", (0, 2)), ("pipeline", (1, 3)), ("world", (0, 1, 2, 3))),
    ]
    used = {group.axis: group.transport for group in groups}
    assert used["messages"] == "gloo for messages" and used["world"] == "gloo for world"
    assert used["data_parallel"] == used["pipeline"] == "gloo for tensors"
    assert groups_of(Placement(((0,),)), "a") == []
    assert [(group.name, group.ranks) for group in groups_of(Placement(((0, 1, 2, 3),)), "aabb")] == [
        *(
            ("data_parallel_0", (0, 1, 2, 3)),
            ("data_parallel_0_inside_0", (0, 1)),
            ("data_parallel_0_inside_1", (2, 3)),
        ),
        *(("data_parallel_0_across_0", (0, 2)), ("data_parallel_0_across_1", (1, 3)), ("world", (0, 1, 2, 3))),
    ]
