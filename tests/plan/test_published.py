"""The published tables: no row that is predicted is used for the fit, and the errors are those in the docs."""

import re
import statistics
from pathlib import Path

import pytest
from blocking_sends import blocking_step_s
from published import ZERO3_ROWS, fit_efficiency, hybrid_costs, predict_published, predict_row, through_one_card
from published_h100 import LLAMA_ROWS, predict_llama

from lightning_holmes.plan.device_type import DEVICE_TYPES
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.search.comparison import assign_layers

FIT = fit_efficiency()
DOCS = Path(__file__).parents[2] / "docs" / "predictions.md"


def test_the_a100_has_the_fitted_constant_and_other_types_say_that_theirs_is_assumed() -> None:
    for name in ("A100-40GB", "A100-80GB"):
        assert DEVICE_TYPES[name].efficiency == round(FIT, 3)
        assert "fitted" in DEVICE_TYPES[name].efficiency_source and "2312.03549" in DEVICE_TYPES[name].efficiency_source
    others = [entry for name, entry in DEVICE_TYPES.items() if name not in ("A100-40GB", "A100-80GB")]
    assert {(entry.efficiency, entry.efficiency_source) for entry in others} == {(0.6, "assumed"), (0.7, "assumed")}


def test_the_documented_errors_are_the_models() -> None:
    text = DOCS.read_text(encoding="utf-8")
    fit = FIT
    assert f"({fit:.3f})" in text
    rows = predict_published(fit)
    print()
    for entry in rows:
        print(
            f"{entry.row.name:40} measured {entry.row.tflops:5.0f} predicted {entry.predicted_tflops:6.1f} {entry.error:+.1%}"
        )
        line = next(line for line in text.splitlines() if line.startswith(f"| {entry.row.name} |"))
        documented = float(re.findall(r"([+-][\d.]+) %", line)[-1])
        assert documented == pytest.approx(100 * entry.error, abs=0.15), entry.row.name
        assert ("fitted" in line) == entry.row.fitted


def test_the_documented_errors_of_zero3_are_the_models() -> None:
    text = DOCS.read_text(encoding="utf-8")
    print()
    for row in ZERO3_ROWS:
        each = [predict_row(one, FIT) for one in (row, through_one_card(row))]
        shown = " | ".join(f"{entry.predicted_tflops:.1f} | {100 * entry.error:+.1f} %" for entry in each)
        print(f"| {row.name} | {row.tflops:.0f} | {shown} |")
        line = next(line for line in text.splitlines() if line.startswith(f"| {row.name} | {row.tflops:.0f} |"))
        documented = [float(number) for number in re.findall(r"([+-][\d.]+) %", line)]
        assert documented == pytest.approx([100 * entry.error for entry in each], abs=0.15), row.name
        assert not row.fitted and row.batch == row.hosts * 8 * row.microbatch, "one microbatch a GPU"


def test_the_documented_errors_of_the_h100_are_the_models() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for row in LLAMA_ROWS:
        predicted = predict_llama(row)
        error = 100 * (predicted / row.tflops - 1)
        assert f"| Llama 3.1 405 B, {row.gpus} GPUs | {row.tflops:.0f} | {predicted:.1f} | {error:+.1f} % |" in text
        assert abs(error) < 20


def test_every_prediction_is_within_a_sixth_of_its_measurement() -> None:
    assert max(abs(entry.error) for entry in predict_published(FIT)) < 1 / 6


def test_the_median_error_is_within_the_aim() -> None:
    rows = predict_published(FIT)
    assert statistics.median(abs(entry.error) for entry in rows) < 0.05
    assert statistics.median(abs(entry.error) for entry in rows if not entry.row.fitted) < 0.05


@pytest.mark.parametrize("hosts", [2, 4])
def test_clusters_as_fast_as_the_paper_measured_get_its_split(hosts: int) -> None:
    """17 and 13 layers for 197 and 160 TFLOPS (arXiv 2312.03549), and 16 and 14 for clusters of the same speed, since
    the head counts."""
    data = hosts * 8
    run = RunShape(
        layout=Layout(pipeline=2, tensor=1, data=data),
        schedule="1f1b",
        num_microbatches=512 // data // 4,
        microbatch_samples=4,
    )
    seconds = {}
    for speeds, counts in (((197e12, 160e12), (17, 13)), (None, (16, 14))):
        costs = hybrid_costs(hosts, FIT, speeds=speeds)
        found = assign_layers(costs, run, "self_adapting", limit_memory=False)
        assert found.layer_counts == counts
        seconds[counts] = blocking_step_s(costs, run, found) / blocking_step_s(costs, run, Partition((15, 15)))
    assert 0.92 < seconds[17, 13] < 0.96 and 0.98 < seconds[16, 14] < 1.0, seconds
    # without the measured speeds the paper's own split gives no gain: the difference is in its rates
    alike = blocking_step_s(costs, run, Partition((17, 13))) / blocking_step_s(costs, run, Partition((15, 15)))
    assert 1.0 < alike < 1.03, alike
