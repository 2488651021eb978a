"""Saved plans against another topology or model: refused with the difference."""

import dataclasses

import pytest

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.partition import make_uniform_partition
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.plan import MadeFor, Plan, cluster_facts
from lightning_holmes.plan.saved_plan import check_plan

PLAN = Plan(
    pipeline_parallel_size=2,
    data_parallel_size=2,
    num_microbatches=4,
    eval_num_microbatches=1,
    schedule="1f1b",
    num_chunks=1,
    layers="layers",
    partition=make_uniform_partition(9, 2),
    placement=Placement(((0, 1), (2, 3))),
    clusters=("east", "west"),
)


def topology(**sizes: int) -> Topology:
    return Topology(
        clusters=tuple(
            Cluster(name=name, hosts=(Host(name=f"host-{name}", devices=size),)) for name, size in sizes.items()
        ),
        source="here.yaml",
    )


def test_the_same_topology_and_model_pass() -> None:
    check_plan(PLAN, topology=topology(east=2, west=2), layers="layers", num_layers=9)
    check_plan(PLAN, topology=topology(east=2, west=2))


@pytest.mark.parametrize(
    ("here", "model", "words"),
    [
        (topology(east=4, west=4), {}, ["has 4 ranks", "here.yaml has 8 devices"]),
        (topology(east=2, north=2), {}, ["pipeline rank 1 is on cluster west", "here that is north"]),
        (topology(east=1, west=3), {}, ["pipeline rank 0 is on cluster east", "east+west"]),
        (topology(east=2, west=2), {"layers": "model.h"}, ["'layers'", "'model.h'"]),
        (topology(east=3, west=2), {"num_layers": 12}, ["5 devices", "assigns 9 layers", "has 12"]),
    ],
)
def test_differences_are_named(here: Topology, model: dict, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_plan(PLAN, topology=here, source="old.yaml", **model)
    for word in ["old.yaml is not for this run", *words]:
        assert word in str(caught.value)


def with_hosts(cards: tuple[str, ...] = (), *, hosts: int = 1, down: str = "") -> Topology:
    """Return two clusters of two devices each; the cluster east has these hosts with these kinds of cards."""
    nics = tuple(Nic(name=kind, kind=kind, up=kind != down) for kind in cards)
    east = tuple(Host(name=f"e{index}", devices=2 // hosts, nics=nics) for index in range(hosts))
    return Topology(
        clusters=(Cluster(name="east", hosts=east), Cluster(name="west", hosts=(Host(name="w", devices=2),)))
    )


@pytest.mark.parametrize(
    ("here", "model", "words"),
    [
        (with_hosts(), {"module": "Llama", "num_parameters": 7}, "made for the module GPT, this one is Llama"),
        (with_hosts(), {"module": "GPT", "num_parameters": 1234567}, "has 7 parameters, this one has 1,234,567"),
        (with_hosts(hosts=2), {}, "its cluster east has 1 hosts, here that has 2"),
        (with_hosts(("ethernet", "roce")), {}, "hosts of its cluster east have infiniband, here they have roce"),
        (with_hosts(("ethernet",)), {}, "have infiniband, here they have ethernet alone"),
    ],
)
def test_what_the_file_says_of_module_hosts_and_cards_is_compared(here: Topology, model: dict, words: str) -> None:
    made_for = MadeFor(module="GPT", num_parameters=7, clusters=cluster_facts(with_hosts(("ethernet", "infiniband"))))
    plan = dataclasses.replace(PLAN, made_for=made_for)
    with pytest.raises(ConfigurationError) as caught:
        check_plan(plan, topology=here, source="old.yaml", **model)
    for word in ("old.yaml is not for this run", words, "lightning-holmes plan --output"):
        assert word in str(caught.value)
    check_plan(PLAN, topology=here, **model)  # an older file has no such facts


def test_what_is_not_known_is_not_compared() -> None:
    made_for = MadeFor(module="GPT", num_parameters=7, clusters=cluster_facts(with_hosts(("infiniband",))))
    plan = dataclasses.replace(PLAN, made_for=made_for)
    check_plan(plan, topology=with_hosts())  # no cards in the file, and no module yet
    check_plan(plan, topology=with_hosts(("ethernet", "infiniband")), module="GPT", num_parameters=7)
    check_plan(
        plan, topology=with_hosts(("ethernet", "infiniband"), down="infiniband")
    )  # as at a restart: with a warning


def test_the_same_hosts_numbered_in_another_order_pass() -> None:
    here = topology(east=2, west=2)
    turned = Topology(
        clusters=tuple(
            Cluster(
                name=cluster.name,
                hosts=tuple(
                    Host(name=host.name, devices=2, ranks=(2, 3) if cluster.name == "east" else (0, 1))
                    for host in cluster.hosts
                ),
            )
            for cluster in here.clusters
        )
    )
    with pytest.raises(ConfigurationError, match="on cluster east, here that is west"):
        check_plan(PLAN, topology=turned)
    check_plan(PLAN, topology=turned, placement=Placement(((2, 3), (0, 1))))
