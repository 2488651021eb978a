"""Every hook is called exactly as often as in plain Lightning: in the same order, with the same arguments, at the same epoch
and step, and with all random generators in the same state. The baseline is plain Lightning in one process; records are
compared as text."""

from typing import Any

import pytest
from hook_cases import RUNS, notes_of_all
from launch import chosen, launch

STAGED = {"pipeline_parallel_size": 2, "num_microbatches": 2}


@pytest.fixture(scope="module")
def notes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the records of each run: plain, with the strategy on one process, and on two stages of two replicas."""
    payload = {"folder": str(tmp_path_factory.mktemp("hooks")), "holmes": None, "runs": chosen(request, "run")}
    plain, alone = notes_of_all(payload), notes_of_all(payload | {"holmes": {}})
    staged = launch(4, "hook_cases:notes_of_all", payload | {"holmes": STAGED}, timeout_s=200)
    return {"plain": plain, "alone": alone, "staged": staged}


@pytest.mark.xdist_group("hooks")
@pytest.mark.parametrize("run", [run.__name__ for run in RUNS])
def test_hooks_are_called_as_in_plain_lightning(run: str, notes: Any) -> None:
    plain = notes["plain"][run]
    assert len(plain) > 40 and plain[-1].startswith(("module.", "callback.", "data.")), plain[-1]
    assert notes["alone"][run] == plain
    for rank, found in enumerate(notes["staged"]):
        here = plain if rank == 0 else [line for line in plain if ".prepare_data(" not in line]  # once a host
        assert found[run] == here, f"rank {rank}"
