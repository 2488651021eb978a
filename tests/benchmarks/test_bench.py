"""The benchmark: a small real run, and the figures computed from it."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from benchmarks import bench
from benchmarks.contenders import CONTENDERS, make_contender
from launch import forked_executable

SMALL = "--hidden-size 64 --num-layers 2 --num-heads 2 --sequence-length 32 --batch-size 8 --steps 3 --warmup-steps 1 --cpu-share 2"


@pytest.mark.usefixtures("testbed_works")
@pytest.mark.xdist_group("testbed")
@pytest.mark.timeout(900)
def test_a_small_benchmark_measures_steps_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", forked_executable())  # imports would take most of so small a run
    watched = 'holmes:{"monitor": true}'
    arguments = f"--hosts 1 1 {SMALL} --contenders floor ddp deepspeed --timeout 120 --output {tmp_path}"
    try:
        bench.main([*arguments.split(" --timeout")[0].split(), watched, "--timeout", "120", "--output", str(tmp_path)])
    except SystemExit:
        pytest.fail(capsys.readouterr().out)
    shown = capsys.readouterr().out
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data["command"].startswith("bench.py --hosts 1 1") and data["hardware"] and data["commit"]
    floor, ddp, deepspeed, holmes = data["results"]
    assert [len(steps) for steps in floor["rank_steps_s"]] == [6, 6], "first and last, three steps each"
    assert [len(steps) for steps in ddp["rank_steps_s"]] == [3, 3]
    assert floor["share"] == 1 and ddp["share"] == pytest.approx(floor["step_s"] / ddp["step_s"])
    assert floor["ethernet_bytes"] < 2000
    # A ring of two sends each gradient once in a step, plus some bytes for headers and acknowledgements.
    workload = dataclasses.replace(bench.Workload(), hidden_size=64, num_layers=2, num_heads=2)
    gradients = 4 * workload.num_parameters
    assert gradients < ddp["ethernet_bytes"] < 1.2 * gradients and ddp["fast_bytes"] < 2000
    # two hosts in two clusters form a pipeline: activations cross the link, not gradients
    assert holmes["share"] == pytest.approx(floor["step_s"] / holmes["step_s"])
    assert 2000 < holmes["ethernet_bytes"] < ddp["ethernet_bytes"] and holmes["fast_bytes"] < 2000
    assert floor["plans"] == ddp["plans"] == [] and len(holmes["plans"]) == 1
    assert "microbatches, layers 1, 1; " in holmes["plans"][0] and holmes["plans"][0] in shown
    assert (tmp_path / "timeline.png").is_file()
    if importlib.util.find_spec("deepspeed") is None:
        assert deepspeed["step_s"] is None and "deepspeed is not installed" in deepspeed["problem"]


def test_every_contenders_strategy_can_be_made() -> None:
    for contender in (*CONTENDERS.values(), make_contender('holmes:{"num_microbatches": 4}')):
        if contender.why_not() is None:
            contender.make_strategy(4)
