"""Step times against their baselines; the figures are printed.

    python -m pytest tests/benchmarks -m benchmark -n 0 -s

The two sides run in turn in the same processes. Other work on the machine can only slow a step down, so each side
is judged by the tenth percentile of its steps, and a ratio by the best of five attempts, which are all printed.
"""

import statistics
from collections.abc import Callable

import pytest
from launch import launch

pytestmark = pytest.mark.benchmark
ATTEMPTS = 5
SMALL = {"hidden_size": 256, "num_layers": 4, "steps": 12}


def undisturbed(times: list[float]) -> float:
    """Return the tenth percentile."""
    return statistics.quantiles(times, n=10)[0]


def measure(
    title: str,
    yardstick: str,
    limit: float,
    worker: str,
    options: dict[str, int],
    *,
    num_processes: int = 2,
    rank: int = 0,
    judged: Callable[[list[float]], float] = undisturbed,
) -> float:
    """Run a worker of step_time_workers, of whose seconds ``rank`` measures; return the smallest ratio of all attempts; print each."""
    ratios = []
    for _ in range(ATTEMPTS):
        times = launch(num_processes, f"step_time_workers:{worker}", SMALL | options, timeout_s=280)[rank]
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
    title, options = "one process, HolmesStrategy against plain Lightning", {"rounds": 8, "batch_size": 4}
    assert measure(title, "plain", 1.03, "one_process", options, num_processes=1) <= 1.03


@pytest.mark.timeout(1500)
def test_two_stages_cost_at_most_five_percent_over_a_bare_1f1b_loop() -> None:
    title, options = "two stages, HolmesStrategy against a bare loop over torch's 1F1B", {"rounds": 6, "batch_size": 8}
    assert measure(title, "bare", 1.05, "two_stages", options | {"num_microbatches": 4}, rank=1) <= 1.05


@pytest.mark.timeout(1500)
def test_replicas_are_as_fast_as_ddp() -> None:
    title, options = "two replicas, HolmesStrategy against DDP", {"rounds": 6, "batch_size": 4}
    limit = 1 / 0.98
    assert measure(title, "ddp", limit, "two_replicas", options, judged=statistics.median) <= limit
