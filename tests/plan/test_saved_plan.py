"""Saved plans against another topology or model: refused with the difference."""

from dataclasses import replace

import pytest
from plans import plan_of, topology_of
from refusals import refusal

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.saved_plan import check_plan

PLAN = plan_of((0, 1), (2, 3), stages=(5, 4))


def test_the_same_topology_and_model_pass() -> None:
    check_plan(PLAN, topology=topology_of(east=2, west=2), layers="layers", num_layers=9)
    check_plan(PLAN, topology=topology_of(east=2, west=2))


@pytest.mark.parametrize(
    ("here", "model", "words"),
    [
        (topology_of(east=4, west=4), {}, ["has 4 ranks", "here.yaml has 8 devices"]),
        (topology_of(east=2, north=2), {}, ["pipeline rank 1 is on cluster west", "here on north"]),
        (topology_of(east=1, west=3), {}, ["pipeline rank 0 is on cluster east", "east+west"]),
        (topology_of(east=2, west=2), {"layers": "model.h"}, ["'layers'", "'model.h'"]),
        (topology_of(east=3, west=2), {"num_layers": 12}, ["5 devices", "assigns 9 layers", "has 12"]),
    ],
)
def test_differences_are_named(here: Topology, model: dict, words: list[str]) -> None:
    with refusal("old.yaml is not for this run", *words):
        check_plan(PLAN, topology=here, source="old.yaml", **model)


def test_the_same_hosts_numbered_in_another_order_pass() -> None:
    here = topology_of(east=2, west=2)
    east, west = (
        replace(cluster, hosts=(replace(cluster.hosts[0], ranks=ranks),))
        for cluster, ranks in zip(here.clusters, ((2, 3), (0, 1)), strict=True)
    )
    turned = replace(here, clusters=(east, west))
    with pytest.raises(ConfigurationError, match="on cluster east, here on west"):
        check_plan(PLAN, topology=turned)
    check_plan(PLAN, topology=turned, placement=Placement(((2, 3), (0, 1))))
