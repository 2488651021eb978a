"""Mistakes and failures end in one clear error on every rank, before training where that can be known, and never in a hang."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bad_input_cases import CASES
from launch import Worker, busyness, chosen, launch, launch_raw

pytestmark = pytest.mark.xdist_group("strategy_bad_input")

# what every rank's output must contain
FAILURES = {
    "before the layers": "ZeroDivisionError: planned failure: before the layers",
    "after the layers": "ZeroDivisionError: planned failure: after the layers",
    "everywhere": "ZeroDivisionError: planned failure: everywhere",
    "after the layers of one replica": "ZeroDivisionError: planned failure: after the layers",
    "validation": "ZeroDivisionError: planned failure: validation",
    "callback": "ZeroDivisionError: planned failure: callback",
    "data loader": "ZeroDivisionError: planned failure: data loader",
    "different data": "Where all ranks read the same samples and only random numbers differ, broadcast_batch=True lets the first stage "
    "load and send; of data that shard themselves that would lose",
    "divided data": "of data that shard themselves that would lose what the other stages have read",
    "data set that reads": "is read in a thread of its own, or outside of steps and hooks",
    "thread that reads": "is read in a thread of its own, or outside of steps and hooks",
    "no loss": "returned NoneType without a loss tensor",
    "killed": "its process has ended",
}
BROKEN = ("Connection closed by peer", "Connection reset by peer", "ConnectionLostError", "Broken pipe")
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    payload = {"cases": chosen(request, "name"), "folder": str(tmp_path_factory.mktemp("mistakes"))}
    return launch(2, "bad_input_cases:run_cases", payload, timeout_s=150)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_clear_error_on_every_rank(name: str, mistakes: list[dict[str, Any]]) -> None:
    words = CASES[name][1]
    messages = set()
    for rank, result in enumerate(mistakes):
        kind, message, seconds = result[name]
        print(f"rank {rank}: {kind} after {seconds:.1f} s: {message[:300]}")
        if not words:
            assert kind is None, message
            continue
        assert kind is not None, f"rank {rank} raised nothing"
        missing = [word for word in words if word not in message]
        assert not missing, f"rank {rank}: {message!r} lacks {missing}"
        assert seconds < LIMIT_S * busyness()
        messages.add(message.replace("topology1.yaml", "topology0.yaml"))
    assert len(messages) <= 1, messages


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Return for each failure the workers, and the seconds from the start of training to the last worker's end."""

    def run(where: str) -> tuple[list[Worker], float]:
        folder = tmp_path_factory.mktemp("failure")
        payload = {"where": where, "folder": str(folder)}
        size = 4 if where.endswith("of one replica") else 2
        workers = launch_raw(size, "bad_input_cases:fail", payload, timeout_s=100, folder=folder / "job")
        ended = time.time()
        begun = [float(m) for w in workers for m in re.findall(r"^BEGINS ([0-9.]+)", w.output, re.MULTILINE)]
        return workers, ended - max(begun, default=0.0)

    places = chosen(request, "where")
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(places, pool.map(run, places), strict=True))


@pytest.mark.parametrize("where", FAILURES)
def test_a_failure_of_one_rank_ends_all(where: str, failures: Any) -> None:
    workers, seconds = failures[where]
    print(f"{where}: all ranks ended {seconds:.1f} s after training began")
    assert seconds < LIMIT_S * busyness()
    for rank, worker in enumerate(workers):
        assert worker.exit_code not in (0, None), f"rank {rank}: exit code {worker.exit_code}"
        if where == "killed" and rank == 1:
            continue
        cause, *consequences = (worker.output.find(words) for words in (FAILURES[where], *BROKEN))
        assert cause >= 0, f"rank {rank}: {worker.output[-3000:]}"
        if where != "killed":  # a killed rank leaves nothing but broken connections
            assert all(at < 0 or cause < at for at in consequences), f"rank {rank}: {worker.output[-6000:]}"
            if "Traceback" not in worker.output:  # it was told, and must not ask a store that may be gone
                assert "[c10d]" not in worker.output, f"rank {rank}: {worker.output[-6000:]}"


def test_no_hook_reads_what_a_rank_lacks_after_a_failure(failures: Any) -> None:
    outputs = [worker.output for workers, _ in failures.values() for worker in workers]
    assert not [output for output in outputs if "READ nan" in output]
    refused = [output for output in outputs if "REFUSED ReadsAtTheEnd.on_exception reads" in output]
    assert len(refused) >= len(failures) and all("go on from a checkpoint" in output for output in refused)


@pytest.mark.parametrize("where", FAILURES)
def test_one_rank_shows_the_traceback_and_each_other_a_line(where: str, failures: Any) -> None:
    workers, _ = failures[where]
    shown = [worker.output.count("Traceback (most recent call last)") for worker in workers]
    lines = [re.findall(rf"^\[rank {rank}\] .+", worker.output, re.MULTILINE) for rank, worker in enumerate(workers)]
    print(shown, lines)
    if where == "killed":  # the survivor says which process has ended; the library's error may come with it
        assert shown[0] <= 2 and len(lines[0]) == 1, workers[0].output[-3000:]
        assert "because rank 1 failed" in lines[0][0] and "its process has ended" in lines[0][0]
    else:
        assert sorted(shown) == [0] * (len(workers) - 1) + [1]
        assert [len(found) for found in lines] == [1 - count for count in shown]
