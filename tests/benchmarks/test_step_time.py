"""Step times against their yardsticks, in one run each; the figures are printed.

    python -m pytest tests/benchmarks -m benchmark -n 0 -s

Ratios compare medians of interleaved rounds in the same processes: absolute times on a shared machine say
little.
"""

import statistics
from typing import Any

import pytest
from launch import launch

pytestmark = pytest.mark.benchmark


def ratio(rounds: dict[str, list[float]], name: str, yardstick: str) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(rounds[name], rounds[yardstick], strict=True))


def show(title: str, rounds: dict[str, list[float]], value: float, limit: float) -> None:
    print(f"\n{title}: ratio {value:.3f} (at most {limit})")
    for name, times in rounds.items():
        print(f"  {name:8s} {'  '.join(f'{1e3 * t:.1f}' for t in times)} ms a step")


@pytest.mark.timeout(600)
def test_one_process_costs_at_most_three_percent_over_plain_lightning() -> None:
    options = {"rounds": 7, "hidden_size": 256, "num_layers": 4, "batch_size": 8, "steps": 14}
    (rounds,) = launch(1, "step_time_workers:one_process", options, timeout_s=500)
    value = ratio(rounds, "holmes", "plain")
    show("one process, HolmesStrategy against plain Lightning", rounds, value, 1.03)
    assert value <= 1.03


@pytest.mark.timeout(600)
def test_two_stages_cost_at_most_five_percent_over_a_bare_1f1b_loop() -> None:
    options: dict[str, Any] = {
        "rounds": 7,
        "hidden_size": 256,
        "num_layers": 4,
        "batch_size": 16,
        "steps": 12,
        "num_microbatches": 4,
    }
    first, last = launch(2, "step_time_workers:two_stages", options, timeout_s=500)
    value = max(ratio(first, "holmes", "bare"), ratio(last, "holmes", "bare"))
    show("two stages, HolmesStrategy against a bare torch 1F1B loop (last stage)", last, value, 1.05)
    assert value <= 1.05
