"""Settings for all tests: hypothesis has no deadline, since the cores are shared with other tests, each test restores
the environment that it started with, and `make exhaustive` logs each case.

The pytest-xdist controller, which starts the workers and collects their results, loads this file, too, and need not
import torch."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from covering import EXHAUSTIVE
from full import is_full, is_full_file
from hypothesis import HealthCheck, settings
from launch import keep_what_is_left, prepare_for_fits

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the Makefile; torch, which reads it, is not imported yet
gc.disable()  # until everything is imported: the collections are a sixth of the import time
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
# A shell starts background jobs with SIGINT ignored, and every process started from here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Restore the environment after each test. A Trainer leaves LOCAL_RANK and similar variables behind; a process started by a
    later test would take them as set by a launcher, start no other processes, and wait for them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> Iterator[None]:
    """Freeze objects after a module's tests: each fit and each node begins with a garbage collection, which visits
    all objects that earlier tests have imported."""
    yield
    if len(gc.get_objects(generation=2)) > 30_000:
        keep_what_is_left()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A default process group of one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def testbed_works() -> None:
    """Skip if this machine cannot run a testbed (it needs root and namespaces); with HOLMES_REQUIRE_TESTBED=1, fail
    instead."""
    from testbed import find_problem

    problem = find_problem()
    if problem is not None:
        if os.environ.get("HOLMES_REQUIRE_TESTBED") == "1":
            pytest.fail(f"HOLMES_REQUIRE_TESTBED=1, but: {problem}")
        pytest.skip(problem)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    prepare_for_fits()
    gc.enable()


class Log:
    """Writes each test's name, result and seconds to runs/exhaustive.log when it ends, and a summary line at the end."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self.file = path.open("w", buffering=1)
        self.began = time.monotonic()
        self.counts: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            seconds = dict(report.user_properties).get("fit_seconds", report.duration)
            self.file.write(f"{report.nodeid}\t{report.outcome}\t{seconds:.2f}\n")
            self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1

    def pytest_sessionfinish(self) -> None:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self.counts.items()))
        self.file.write(f"# {counts} in {time.monotonic() - self.began:.0f} s\n")
        self.file.close()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which no test would be run."""
    leaves_out = "not full" in config.getoption("markexpr")
    path = collection_path
    if leaves_out and path.is_relative_to(TESTS) and is_full_file(path.relative_to(TESTS).as_posix()):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves out (full.py)."""
    first: dict[Path, str] = {}
    for item in items:
        if item.path.is_relative_to(TESTS):
            name, _, case = item.name.partition("[")
            test = f"{item.path.relative_to(TESTS).as_posix()}::{name}"
            if is_full(test, is_first=first.setdefault(item.path, name) == name, case=case):
                item.add_marker("full")


def pytest_configure(config: pytest.Config) -> None:
    # only in the controller, which receives the reports of all xdist workers
    if EXHAUSTIVE and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Log(config.rootpath / "runs" / "exhaustive.log"))
