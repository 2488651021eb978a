"""Step times against their baselines; the figures are printed.

    python -m pytest tests/benchmarks -m benchmark -n 0 -s

The two sides run in turn in the same processes. Other work on the machine can only slow a step down, so each side
is judged by the tenth percentile of its steps, and a ratio by the best of five attempts, which are all printed.
"""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
from launch import launch

pytestmark = pytest.mark.benchmark
ATTEMPTS = 5


def undisturbed(times: list[float]) -> float:
    """Return the tenth percentile."""
    return statistics.quantiles(times, n=10)[0]


def in_turn(
    num_processes: int, worker: str, rank: int, options: dict[str, Any]
) -> Callable[[], dict[str, list[float]]]:
    """Return a function that runs a worker of step_time_workers and returns the seconds that ``rank`` measured."""

    def run() -> dict[str, list[float]]:
        times: dict[str, list[float]] = launch(num_processes, f"step_time_workers:{worker}", options, timeout_s=280)[
            rank
        ]
        return times

    return run


def measure(
    title: str,
    yardstick: str,
    limit: float,
    run: Callable[[], dict[str, list[float]]],
    judged: Callable[[list[float]], float] = undisturbed,
) -> float:
    """Return the smallest ratio of all attempts; print each."""
    ratios = []
    for _ in range(ATTEMPTS):
        times = run()
        ratios.append(judged(times["holmes"]) / judged(times[yardstick]))
        print(f"\n{title}: ratio {ratios[-1]:.3f}")
        for name, steps in times.items():
            low, middle = 1e3 * undisturbed(steps), 1e3 * statistics.median(steps)
            print(f"  {name:8s} {low:.1f} ms a step (tenth percentile), {middle:.1f} ms (median of {len(steps)})")
    shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"{title}: best of {ATTEMPTS} {min(ratios):.3f} (at most {limit:.3f}), of {shown}")
    return min(ratios)


@pytest.mark.timeout(1500)
def test_one_process_costs_at_most_three_percent_over_plain_lightning() -> None:
    options = {"rounds": 8, "hidden_size": 256, "num_layers": 4, "batch_size": 4, "steps": 12}
    run = in_turn(1, "one_process", 0, options)
    assert measure("one process, HolmesStrategy against plain Lightning", "plain", 1.03, run) <= 1.03


@pytest.mark.timeout(1500)
def test_two_stages_cost_at_most_five_percent_over_a_bare_1f1b_loop() -> None:
    options: dict[str, Any] = {
        "rounds": 6,
        "hidden_size": 256,
        "num_layers": 4,
        "batch_size": 8,
        "steps": 12,
        "num_microbatches": 4,
    }
    run = in_turn(2, "two_stages", 1, options)
    assert measure("two stages, HolmesStrategy against a bare loop over torch's 1F1B", "bare", 1.05, run) <= 1.05


@pytest.mark.timeout(1500)
def test_replicas_are_as_fast_as_ddp() -> None:
    options = {"rounds": 6, "hidden_size": 256, "num_layers": 4, "batch_size": 4, "steps": 12}
    run = in_turn(2, "two_replicas", 0, options)
    limit = 1 / 0.98
    assert measure("two replicas, HolmesStrategy against DDP", "ddp", limit, run, statistics.median) <= limit
