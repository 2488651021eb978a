"""The rules by which tests are left to `make test-all`."""

from full import FIRST, FULL, KEPT, SAMPLED, is_full, is_full_file


def test_what_is_left_out() -> None:
    assert is_full("soak/test_soak.py::test_a", is_first=True, case="") and is_full_file("soak/test_soak.py")
    assert not is_full("plan/test_plan.py::test_a", is_first=False, case="x") and not is_full_file("plan/test_plan.py")
    first = "testbed/test_training.py"
    assert first in FIRST and not is_full_file(first)
    assert [is_full(f"{first}::test_a", is_first=is_first, case="") for is_first in (True, False)] == [False, True]
    kept = next(name for name in KEPT if name.endswith(".py"))
    assert not is_full(f"{kept}::test_a", is_first=False, case="") and not is_full_file(kept)
    every = max(SAMPLED.values())
    sampled = next(name for name in SAMPLED if SAMPLED[name] == every).replace("*", "")
    chosen = [case for case in map(str, range(1000)) if not is_full(sampled, is_first=False, case=case)]
    assert 0.5 * 1000 / every < len(chosen) < 2 * 1000 / every
    assert all("/" in name or name.startswith("test_") for name in (*FULL, *KEPT, *FIRST, *SAMPLED))
