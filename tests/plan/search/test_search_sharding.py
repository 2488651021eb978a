"""sharding="auto": parameters are sharded if nothing fits otherwise, with a line that gives the reason."""

import dataclasses
from typing import Any

import pytest
from test_choose import chosen

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import DeviceType
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.run_shape import Layout
from lightning_holmes.plan.search import SearchSpace, search, search_with_sharding
from lightning_holmes.plan.self_adapting import NothingFitsError
from lightning_holmes.plan.training import Training

FOUR = Layout(pipeline=1, data=4, grid=((0, 1, 2, 3),))
TWO_BY_TWO = Layout(pipeline=2, data=2, grid=((0, 1), (2, 3)))
HUGE = 1e12


def costs(*, memory: float = HUGE, bandwidth: float = 1e12, held: float = 1e3, **training: Any) -> CostModel:
    """Four hosts of one cluster, twelve layers of 1 MB that take 3 s per sample."""
    card = Nic(name="eth0", kind="ethernet", bandwidth_bytes_per_s=bandwidth)
    hosts = tuple(Host(name=f"h{index}", devices=1, nics=(card,)) for index in range(4))
    layer = LayerCost(forward=1.0, backward=2.0, parameter_bytes=1e6, activation_bytes=1e3, held_bytes=held)
    training.setdefault("sharded_optimizer", "auto")
    return CostModel(
        ModelCost(microbatch_samples=1, layers=(layer,) * 12),
        Network(Topology(clusters=(Cluster(name="one", hosts=hosts),)), local_bytes_per_s=1e12),
        devices=(
            DeviceType(name="d", peak_flops_per_s=1.0, memory_bytes=memory, local_bytes_per_s=1e12, efficiency=1.0),
        ),
        training=Training(batch_samples=16, **training),
    )


def choose(model: CostModel, layout: Layout = FOUR, why_not_sharded: str | None = None, **asked: Any) -> Plan:
    return chosen(Asked(**asked), model, layout, why_not_sharded=why_not_sharded)


def note_of(plan: Plan) -> str:
    (note,) = (note for note in plan.notes if note.startswith("sharding"))
    return note


@pytest.mark.parametrize(("layout", "share"), [(FOUR, 0.6), (TWO_BY_TWO, 0.75)], ids=("1x4", "2x2"))
def test_in_shards_where_nothing_fits_otherwise(layout: Layout, share: float) -> None:
    whole = 12e6 * 4 / layout.pipeline  # parameters, gradients and two optimizer states of a rank
    space = SearchSpace(layout=layout)
    tight, none = costs(memory=whole * share), costs(memory=whole * 0.5)
    assert search(tight, space).memory_note is not None, "only an optimizer that keeps nothing would fit"
    with pytest.raises(NothingFitsError):
        search(none, space)
    for model in (tight, none):
        plan = choose(model, layout)
        assert plan.sharding == "parameters" and plan.schedule == "breadth_first" and plan.prediction is not None
        assert plan.prediction.sharded_parameters
        assert all(
            mine <= most for mine, most in zip(plan.prediction.memory_bytes, model.facts(layout).memory, strict=True)
        )
        assert "parameters, since otherwise" in note_of(plan)


def test_what_fits_stays_whole_and_nothing_is_said() -> None:
    plan = choose(costs())
    assert plan.sharding == "none" and not any(note.startswith("sharding") for note in plan.notes)
    assert plan.schedule == "1f1b"


@pytest.mark.parametrize(
    ("asked", "layout"),
    [
        ({"schedule": "1f1b"}, FOUR),
        ({}, Layout(pipeline=4, grid=((0,), (1,), (2,), (3,)))),
        ({"why_not_sharded": "a hook reads"}, FOUR),
    ],
)
def test_where_it_cannot_be_what_does_not_fit_is_refused(asked: dict[str, Any], layout: Layout) -> None:
    with pytest.raises(NothingFitsError, match="GiB a device are missing"):
        choose(costs(memory=12e6 * 1.5 / layout.pipeline), layout, **asked)


def test_asked_for_beside_another_order_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="would gather each stage"):
        search_with_sharding(costs(), SearchSpace(schedules=("1f1b",)), "parameters")


def test_the_error_names_shards_where_they_can_make_it_fit() -> None:
    model = costs(memory=12e6 * 1.05, sharded_optimizer="auto")
    with pytest.raises(NothingFitsError, match='parameters in shards, sharding="parameters"'):
        search(model, SearchSpace(layout=FOUR))
    with pytest.raises(NothingFitsError) as refusal:
        search(costs(memory=3e6).with_sharded_parameters(), SearchSpace(layout=FOUR, schedules=("breadth_first",)))
    assert "parameters in shards" not in str(refusal.value), "they are"


def test_layered_order_alone_hides_reductions_behind_all_microbatches() -> None:
    """Whole parameters, four microbatches, one rank per pipeline: a stage's gradients are complete long before the
    last backward."""
    model = costs(bandwidth=4e5, sharded_optimizer=False)
    space = SearchSpace(layout=FOUR, num_microbatches=(4,))
    best = search(model, space).best
    plain = search(model, dataclasses.replace(space, schedules=("1f1b",))).best
    assert best.run.schedule == "breadth_first" and best.run.num_chunks == 12
    assert best.step_s < 0.95 * plain.step_s
