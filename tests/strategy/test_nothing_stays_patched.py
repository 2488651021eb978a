"""After a run, including one that failed, Lightning, torch and the user's objects are as they were.

Each case runs in processes of its own, since what another test leaves behind would be taken for the initial state.
"""

from pathlib import Path

import pytest
from launch import launch
from patch_cases import CASES

pytestmark = pytest.mark.versions


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.error is None])
def test_after_a_run_of_a_pipeline_nothing_is_left(tmp_path: Path, case: str) -> None:
    payload = {"case": case, "folder": str(tmp_path), "holmes": {"pipeline_parallel_size": 2, "num_microbatches": 2}}
    assert launch(2, "patch_cases:leftovers", payload) == [[], []]


@pytest.mark.parametrize("case", CASES)
def test_after_a_run_of_one_process_nothing_is_left(tmp_path: Path, case: str) -> None:
    payload = {"case": case, "folder": str(tmp_path), "holmes": {"num_microbatches": 2}}
    assert launch(1, "patch_cases:leftovers", payload) == [[]]
