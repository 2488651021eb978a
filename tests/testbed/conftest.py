"""What the tests on real namespaces need: root and a kernel that has what a testbed is made of."""

import os

import pytest

from lightning_holmes.cluster.testbed import find_problem


@pytest.fixture(scope="session")
def testbed_works() -> None:
    """Skips where this machine cannot carry a testbed; with HOLMES_REQUIRE_TESTBED=1 that is a failure."""
    problem = find_problem()
    if problem is not None:
        if os.environ.get("HOLMES_REQUIRE_TESTBED") == "1":
            pytest.fail(f"HOLMES_REQUIRE_TESTBED=1, but: {problem}")
        pytest.skip(problem)
