"""Predictions compared with runs: errors, order, and a folder to which later runs add."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lightning_holmes.commands import bench, bench_predict
from lightning_holmes.commands.bench_predict import compare_partitions
from lightning_holmes.commands.benchmark.prediction_beds import PARTITION_BED, PREDICTION_BEDS, PredictionBed
from lightning_holmes.commands.benchmark.prediction_report import PredictedRun, PredictionReport
from lightning_holmes.errors import ConfigurationError


def run(
    name: str, predicted: float, measured: float, *, bed: str = "bed", model: str = "GPT", round: int = 1
) -> PredictedRun:
    return PredictedRun(
        bed=bed, name=name, model=model, layers=(2, 2), predicted_s=predicted, measured_s=measured, round=round
    )


def test_errors_and_the_order_of_plans() -> None:
    report = PredictionReport()
    report.add([run("a", 1.1, 1.0), run("b", 1.0, 1.2), run("c", 1.25, 1.25), run("d", 3.0, 4.0, model="other")])
    assert report.median_error == pytest.approx((0.1 + 1 / 6) / 2) and report.worst_error == pytest.approx(0.25)
    # a was 20 % faster than b and was predicted to be slower; b and c are too close to each other; d is another model
    assert [(one.name, other.name) for one, other in report.misordered()] == [("a", "b")]


def test_a_case_has_the_median_error_of_its_rounds_and_a_plan_the_order_of_its_means() -> None:
    report = PredictionReport()
    report.add([run("a", 1.1, 1.0), run("b", 1.05, 1.2), run("a", 1.1, 1.1, round=2), run("b", 1.05, 1.0, round=2)])
    # in the first round a was faster by 20 %; over both rounds they are too close to each other
    assert report.misordered() == [] and report.worst_run_error == pytest.approx(0.125)
    assert report.case_errors() == pytest.approx([(0.1 + 0) / 2, (-0.125 + 0.05) / 2])
    assert (report.median_error, report.worst_error) == pytest.approx(((0.05 + 0.0375) / 2, 0.05))


def test_runs_of_one_plan_are_not_compared_whatever_asked_for_it() -> None:
    by_count, by_cost, other = (
        dataclasses.replace(run(name, 1.0, seconds), schedule=schedule)
        for name, seconds, schedule in (("a", 1.0, "1f1b, 8"), ("b", 1.2, "1f1b, 8"), ("c", 1.3, "gpipe, 8"))
    )
    report = PredictionReport()
    report.add([by_count, by_cost])
    assert report.misordered() == [] and report.worst_error == report.worst_run_error == pytest.approx(1 / 6)
    report.add([other])  # slower than the mean of both, and predicted to be as fast
    assert [(one.name, slower.name) for one, slower in report.misordered()] == [("a", "c")]


def test_every_aim_that_is_missed_is_one_line() -> None:
    good = PredictionReport()
    good.add([run("a", 1.07, 1.0), run("b", 2.0, 2.0), run("c", 3.59, 3.0)])
    assert good.missed() == []
    bad = PredictionReport()
    bad.add([run("a", 1.3, 1.0), run("b", 1.1, 1.2)])
    median, worst, order = bad.missed()
    assert median == "median error 19.2%, wanted at most 8%" and worst == "worst error 30.0%, wanted at most 20%"
    assert order == "plans predicted in the wrong order: a was faster than b"


def result(name: str, layers: tuple[int, int], measured: float) -> dict[str, Any]:
    return {
        "name": name,
        "layers": layers,
        "measured_s": measured,
        "predicted_s": measured,
        "schedule": "1f1b, 8 microbatches",
        "timeline": {},
        "notes": (),
    }


@pytest.mark.parametrize(
    ("factor", "code", "lines"),
    [
        (1.0, None, []),
        (1.5, 1, ["wanted at most 8%", "wanted at most 20%"]),
    ],
)
def test_the_command_fails_where_predictions_miss_an_aim(
    factor: float,
    code: int | None,
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def made_up(bed: PredictionBed, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        return [{**result(c.name, (4, 4), 1.0), "predicted_s": factor} for c in bed.cases]

    monkeypatch.setattr(bench_predict, "run_bed", made_up)
    arguments = ["--predict", "--beds", "unequal", "--rounds", "2", "--output", str(tmp_path)]
    if code is None:
        bench.main(arguments)
    else:
        with pytest.raises(SystemExit, match=str(code)):
            bench.main(arguments)
    lines_out = capsys.readouterr().out.splitlines()
    assert "unequal: 6 runs" in lines_out and sum("round 2" in line for line in lines_out) == 3
    assert any(line.startswith("3 cases: ") and "of 6 single runs" in line for line in lines_out)
    told = [line for line in lines_out if line.startswith("aim missed: ")]
    assert len(told) == len(lines) and all(words in line for words, line in zip(lines, told, strict=True))


@pytest.mark.parametrize(("uniform", "best", "missed"), [(1.3, 1.0, 0), (1.2, 1.0, 1), (1.2, 0.9, 2)])
def test_the_command_fails_where_the_chosen_partition_misses_an_aim(
    uniform: float,
    best: float,
    missed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [result("uniform", (5, 5), uniform), result("self_adapting", (7, 3), 1.0), result("8, 2", (8, 2), best)]
    monkeypatch.setattr(bench_predict, "run_bed", lambda *args, **kwargs: runs)
    arguments = ["--partitions", "--output", str(tmp_path)]
    if missed == 0:
        bench.main(arguments)
    else:
        with pytest.raises(SystemExit, match="1"):
            bench.main(arguments)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("aim missed: self_adapting")]
    assert len(told) == missed


def test_a_folder_keeps_what_stands_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = PredictionReport(facts={"command": "x"})
    report.add([run("a", 1.0, 1.0), run("b", 2.0, 2.0)])
    for path in report.write(tmp_path):
        assert path.exists()
    later = PredictionReport.load(tmp_path, {"command": "y"})
    later.add([run("b", 2.2, 2.0), run("a", 1.0, 2.0, bed="another")])
    assert [(r.bed, r.name, r.predicted_s) for r in later.runs] == [
        ("bed", "a", 1.0),
        ("bed", "b", 2.2),
        ("another", "a", 1.0),
    ]
    later.print()
    assert "3 cases: median error 10.0%, worst 50.0%; 0 pairs" in capsys.readouterr().out


def test_the_beds_vary_what_the_predictions_must_bear() -> None:
    cases = [(bed, case) for bed in PREDICTION_BEDS for case in bed.cases]
    assert len(cases) >= 10 and len({(bed.name, case.name) for bed, case in cases}) == len(cases)
    models = {(w.hidden_size, w.num_layers, w.sequence_length) for w in (case.workload for _, case in cases)}
    assert len(models) >= 3 and len({hidden_size for hidden_size, *_ in models}) >= 2
    assert {case.arguments.get("schedule", "1f1b") for _, case in cases} >= {"1f1b", "gpipe"}
    assert {case.arguments.get("num_chunks") for _, case in cases} >= {1, 2}
    assert len({case.arguments["num_microbatches"] for _, case in cases}) >= 3
    assert len({bed.ethernet for bed in PREDICTION_BEDS}) >= 2 and any(
        len(set(b.cpu_shares)) > 1 for b in PREDICTION_BEDS
    )
    assert PARTITION_BED.cpu_shares[0] == 2 * PARTITION_BED.cpu_shares[1]


def test_an_unknown_bed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--beds nowhere: there is no such bed; there are two-and-two"):
        bench.main(["--predict", "--beds", "nowhere", "--output", str(tmp_path)])


def test_partitions_are_compared_by_the_median_of_all_their_runs() -> None:
    runs = [("uniform", (3, 3), 2.0), ("self_adapting", (4, 2), 1.4), ("3, 3", (3, 3), 2.4), ("4, 2", (4, 2), 1.0)]
    runs += [("5, 1", (5, 1), 0.9), ("5, 1", (5, 1), 1.3), ("self_adapting", (5, 1), 1.0)]
    found = compare_partitions([{"name": n, "layers": layers, "measured_s": s} for n, layers, s in runs])
    assert found["seconds"] == {"3, 3": 2.2, "4, 2": 1.2, "5, 1": 1.0} and found["best"] == "5, 1"
    assert found["uniform_over_self_adapting"] == pytest.approx(2.2 / 1.1)
    assert found["self_adapting_over_best"] == pytest.approx(1.1)
