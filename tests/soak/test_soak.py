"""The short form of the soak: a few fixed cases. `make soak` is the long form."""

from pathlib import Path

import pytest
from faults import ELASTIC, LAYOUTS, Case, Fault, draw
from soak import soak

pytestmark = [pytest.mark.xdist_group("soak"), pytest.mark.usefixtures("testbed_works")]


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
