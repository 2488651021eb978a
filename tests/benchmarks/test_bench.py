"""The benchmark: a small real run, and the figures computed from it."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from benchmarks import bench
from benchmarks.bench_report import Report, Result
from benchmarks.contenders import CONTENDERS, make_contender
from launch import forked_executable

from lightning_holmes.errors import ConfigurationError

SMALL = "--hidden-size 64 --num-layers 2 --num-heads 2 --sequence-length 32 --batch-size 8 --steps 3 --warmup-steps 1 --cpu-share 2"


@pytest.mark.usefixtures("testbed_works")
@pytest.mark.xdist_group("testbed")
@pytest.mark.timeout(400)
def test_a_small_benchmark_measures_steps_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", forked_executable())  # imports would take most of so small a run
    watched = 'holmes:{"monitor": true}'
    arguments = f"--hosts 1 1 {SMALL} --contenders floor ddp sockets deepspeed --timeout 120 --output {tmp_path}"
    try:
        bench.main([*arguments.split(" --timeout")[0].split(), watched, "--timeout", "120", "--output", str(tmp_path)])
    except SystemExit:
        pytest.fail(capsys.readouterr().out)
    shown = capsys.readouterr().out
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data["command"].startswith("bench.py --hosts 1 1") and data["hardware"] and data["commit"]
    floor, ddp, sockets, deepspeed, holmes = data["results"]
    assert [len(steps) for steps in floor["rank_steps_s"]] == [6, 6], "first and last, three steps each"
    assert [len(steps) for steps in ddp["rank_steps_s"]] == [3, 3]
    assert floor["share"] == 1 and ddp["share"] == pytest.approx(floor["step_s"] / ddp["step_s"])
    assert floor["ethernet_bytes"] < 2000
    # A ring of two sends each gradient once in a step, plus some bytes for headers and acknowledgements.
    workload = dataclasses.replace(bench.Workload(), hidden_size=64, num_layers=2, num_heads=2)
    gradients = 4 * workload.num_parameters
    assert gradients < ddp["ethernet_bytes"] < 1.2 * gradients and ddp["fast_bytes"] < 2000
    assert gradients < 2 * sockets["ethernet_bytes"] < 1.2 * gradients, sockets
    # two hosts in two clusters form a pipeline: activations cross the link, not gradients
    assert holmes["share"] == pytest.approx(floor["step_s"] / holmes["step_s"])
    assert 2000 < holmes["ethernet_bytes"] < ddp["ethernet_bytes"] and holmes["fast_bytes"] < 2000
    assert floor["plans"] == ddp["plans"] == [] and len(holmes["plans"]) == 1
    assert "microbatches, layers 1, 1; " in holmes["plans"][0] and holmes["plans"][0] in shown
    assert (tmp_path / "timeline.json").is_file()
    if importlib.util.find_spec("deepspeed") is None:
        assert deepspeed["step_s"] is None and "deepspeed is not installed" in deepspeed["problem"]


def test_shares_are_of_the_slowest_ranks_median_step() -> None:
    floor = Result(name="floor", title="floor", rank_steps_s=[[1.0, 9.0, 1.0], [2.0, 2.0, 9.0]])
    slow = Result(name="ddp", title="DDP", rank_steps_s=[[4.0], [3.0]])
    failed = Result(name="fsdp2", title="FSDP2", problem="it fell over")
    report = Report(results=[floor, slow, failed], floor="floor", network="n", command="c", facts={})
    assert report.floor_s == 2.0
    assert [result.failed for result in report.results] == [False, False, True]
    assert [report.share(result) for result in report.results] == [1.0, 0.5, None]
    unlike = dataclasses.replace(report, unlike_hosts=True)
    assert unlike.floor_s == pytest.approx(2 / (1 / 1.0 + 1 / 2.0)), "each rank has as much of the work as it is fast"


def test_runs_of_one_contender_are_joined_and_a_failed_one_is_told() -> None:
    first = Result(name="x", title="X", rank_steps_s=[[1.0], [2.0]], ethernet_bytes=5.0, peak_bytes=8.0, plans=["a"])
    second = Result(name="x", title="X", rank_steps_s=[[3.0], [4.0]], ethernet_bytes=7.0, peak_bytes=9.0, plans=["b"])
    failed = Result(name="x", title="X", problem="it fell over")
    both = bench.join([first, second])
    assert both.rank_steps_s == [[1.0, 3.0], [2.0, 4.0]] and both.peak_bytes == 9.0
    assert both.plans == ["a", "b"]
    joined = bench.join([first, failed])
    assert joined.rank_steps_s == [[1.0], [2.0]] and joined.problem == "1 of 2 runs failed: it fell over"
    assert bench.join([failed]).problem == "it fell over"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hosts 2 1", "--batch-size 32 does not divide among 3 processes"),
        ("--cpu-share 0.4 0.3 0.2", "--cpu-share: give one for all hosts, or one for each of the 2 clusters"),
        ("--contenders quick", "'quick' is no contender; there are floor, sockets, ddp"),
        ("--contenders ddp:{}", "'ddp:{}' is no contender"),
        ("--contenders holmes:{", "are no JSON"),
    ],
)
def test_impossible_options_are_refused(arguments: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        bench.main(arguments.split())


def test_every_contenders_strategy_can_be_made() -> None:
    for contender in (*CONTENDERS.values(), make_contender('holmes:{"num_microbatches": 4}')):
        if contender.why_not() is None:
            contender.make_strategy(4)
