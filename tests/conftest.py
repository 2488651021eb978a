"""For all tests: generated cases are not judged by how long they take, since the cores are shared with other tests,
and each test ends with the environment that it began with."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """A Trainer leaves LOCAL_RANK and its like behind; a process that a later test starts would take them for a launcher's
    word, start no other processes, and wait for them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
