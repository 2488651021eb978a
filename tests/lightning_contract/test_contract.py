"""What Lightning promises holds with the strategy: the same assertions in plain Lightning, on one process, and on two stages.

Each case is a test item; all selected cases of a layout run in one launch, when the first of their items asks. What a case
returns is compared with what it returns under plain Lightning in one process. Tolerance: 1e-5 relative (fp32).
"""

import re
from typing import Any

import pytest
from comparing import differences
from contract import LAYOUTS, PLAIN, Record, collect, run_cases, select

CASES = collect()
pytestmark = [pytest.mark.xdist_group("lightning_contract"), pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def records(request: pytest.FixtureRequest) -> Any:
    """Return a function of layout and name that gives the records of a case; the first call launches all selected cases of the layout."""
    known: dict[str, dict[str, list[Record]]] = {}

    def of(layout: str, name: str) -> list[Record]:
        if layout not in known:
            chosen = [item.callspec.params for item in request.session.items if item.originalname == "test_holds"]
            names = dict.fromkeys(c["name"] for c in chosen if layout in (PLAIN, c["layout"]))
            known[layout] = run_cases(layout, list(names))
        return known[layout][name]

    return of


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout in LAYOUTS for name in select(CASES, layout)])
def test_holds(layout: str, name: str, records: Any, record_property: Any) -> None:
    case, found = CASES[name], records(layout, name)
    record_property("fit_seconds", max(record.seconds for record in found))
    errors = [f"process {rank}: {record.error}" for rank, record in enumerate(found) if record.error]
    if layout in case.refused:
        refusal = rf"lightning_holmes\.errors\.\w+: .*{case.refused[layout]}"
        assert len(errors) == len(found), "it is not refused any more"
        assert all(re.search(refusal, error) for error in errors), "\n".join(errors)
        return
    if not errors:
        expected = records(PLAIN, name)[0].result
        errors = [f"differs: {line}" for record in found for line in differences(expected, record.result)]
    assert not errors, "\n".join(errors[:20])
