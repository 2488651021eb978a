"""When a step runs, everything exists that Lightning would have made, and a trial of the step leaves no trace.

The baseline is plain Lightning in one process on the same batches; tolerance 1e-5 (fp32).
"""

from typing import Any

import pytest
from comparing import differences
from launch import chosen, launch
from step_state_cases import CASES, run_all

STAGED = {"pipeline_parallel_size": 2, "num_microbatches": 2}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of plain Lightning, of the strategy on one process, and of two stages of two replicas."""

    cases = chosen(request, "name")

    def payload(holmes: Any) -> dict[str, Any]:
        return {"folder": str(tmp_path_factory.mktemp("steps")), "holmes": holmes, "cases": cases}

    staged = launch(4, "step_state_cases:run_all", payload(STAGED), timeout_s=200)
    return {"plain": run_all(payload(None)), "alone": run_all(payload({})), "staged": staged}


@pytest.mark.xdist_group("hooks")
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_what_it_has_in_plain_lightning(name: str, results: Any) -> None:
    plain = results["plain"][name]
    assert "error" not in plain, plain
    for place, found in {"one process": results["alone"], **dict(enumerate(results["staged"]))}.items():
        assert name in found, f"{place}: an earlier case ended the run: {list(found)[-1]}: {list(found.values())[-1]}"
        assert not differences(plain, found[name]), f"{place}: {found[name]}"
