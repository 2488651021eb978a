"""The short form of the soak: a few fixed cases, and a test that a seed gives the same faults again. `make soak` is
the long form."""

from pathlib import Path

import pytest
from faults import (
    ELASTIC,
    KINDS,
    KINDS_OF_LINKS,
    LAYOUTS,
    NETWORKS,
    PLACES,
    PLACES_ON_NETWORK,
    Case,
    Fault,
    draw,
    draw_elastic,
    draw_on_network,
)
from soak import soak

pytestmark = [pytest.mark.xdist_group("soak"), pytest.mark.usefixtures("testbed_works")]


def test_a_seed_gives_its_faults_again_and_many_seeds_give_all() -> None:
    cases = [draw(seed) for seed in range(600)]
    assert cases == [draw(seed) for seed in range(600)]
    faults = [fault for case in cases for attempt in case.attempts for fault in attempt]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.place for fault in faults} == set(PLACES)
    assert {case.layout.name for case in cases} == {layout.name for layout in LAYOUTS}
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}
    cases = [draw_on_network(seed) for seed in range(900)]
    assert cases == [draw_on_network(seed) for seed in range(900)]
    faults = [fault for case in cases for attempt in case.attempts for fault in attempt]
    assert {fault.kind for fault in faults} == {*KINDS, *KINDS_OF_LINKS}
    assert {fault.place for fault in faults} == set(PLACES_ON_NETWORK)
    assert {case.layout.name for case in cases} == {layout.name for layout in NETWORKS}
    elastic = [draw_elastic(seed) for seed in range(100)]
    assert elastic == [draw_elastic(seed) for seed in range(100)]
    assert {hosts for case in elastic for hosts in case.present} == {(0, 1), (0,), (1,)}
    assert {len(case.present[2:]) > 0 and case.present[2] == (0, 1) for case in elastic} == {True, False}


_TWO_HOSTS = LAYOUTS[1]
_CASES = (
    draw(7),  # a kill while a checkpoint is written, with data workers
    Case(
        seed=0,
        layout=_TWO_HOSTS,
        every=2,
        attempts=(
            (Fault(kind="SIGTERM", rank=0, place="forward", count=8),),
            (Fault(kind="kill and tear", rank=0, place="rename", count=1),),
            (Fault(kind="lose host", rank=0, place="batch", count=3),),
        ),
    ),
    Case(  # a host is missing for two starts, and comes back
        seed=0,
        layout=ELASTIC[0],
        every=2,
        attempts=(
            (Fault(kind="lose host", rank=1, place="batch", count=6),),
            (Fault(kind="kill", rank=0, place="batch", count=4),),
            (Fault(kind="hosts return", rank=0, place="batch", count=3),),
        ),
        present=((0, 1), (0,), (0,), (0, 1)),
    ),
)


@pytest.mark.parametrize("case", _CASES, ids=["two replicas", "two hosts", "fewer hosts and more again"])
def test_runs_with_faults_end_as_one_without(case: Case, tmp_path: Path) -> None:
    """Baseline: the same layout without faults or snapshots; losses and weights of every rank are equal bit for bit.
    If hosts are missing at a start, tolerance 1e-5, and the mean loss of the replicas is compared."""
    report = soak(case, tmp_path / "job")
    assert report.outcome == "well", f"{report}\n{report.output}"
    assert len(report.struck) == len(case.attempts)
