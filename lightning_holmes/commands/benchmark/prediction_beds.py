"""Training runs for comparing predictions with measurements: the strategy predicts a step at the start, which is then measured.

    beds = PREDICTION_BEDS
    beds[0].cases[0].strategy_arguments()

It defines the beds (hosts, CPU shares, rates) and the cases (model, batch, schedule, partition). Every case profiles the
layers on the hosts themselves, before its first step; nothing is fitted to the measured steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_holmes.commands.benchmark.workload import Workload

PROGRESS = "bench:"
"""The prefix of a worker's output lines that `bench` prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionCase:
    """One run: its name, the workload, and HolmesStrategy's arguments.

    arguments: all except the topology; missing arguments have the strategy's defaults.
    """

    name: str
    workload: Workload
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBed:
    """A testbed and the runs on it, one after another in the same processes.

    hosts: number of hosts of each cluster. cpu_shares: cores of a host, for each cluster. fast, ethernet: rates in tc's notation.
    """

    name: str
    hosts: tuple[int, ...]
    cpu_shares: tuple[float, ...]
    fast: str
    ethernet: str
    cases: tuple[PredictionCase, ...]


def _workload(hidden: int, layers: int, *, batch: int, sequence: int = 128, heads: int = 4, steps: int = 8) -> Workload:
    return Workload(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        sequence_length=sequence,
        batch_size=batch,
        warmup_steps=2,
        steps=steps,
    )


_MIDDLE = _workload(192, 8, batch=16)
_LONG = _workload(256, 4, batch=8, sequence=256)
_WIDE = _workload(256, 8, batch=16)


def _case(name: str, workload: Workload, *, num_chunks: int = 1, **arguments: Any) -> PredictionCase:
    """Make a case with 1f1b (interleaved_1f1b with several chunks) unless the arguments name a schedule."""
    schedule = "1f1b" if num_chunks == 1 else "interleaved_1f1b"
    arguments = {"schedule": schedule, "num_chunks": num_chunks, **arguments}
    return PredictionCase(name=name, workload=workload, arguments=arguments)


PREDICTION_BEDS: tuple[PredictionBed, ...] = (
    PredictionBed(
        name="two-and-two",
        hosts=(2, 2),
        cpu_shares=(0.45, 0.45),
        fast="1gbit",
        ethernet="100mbit",
        cases=(
            _case("by count, 1f1b, 8", _MIDDLE, partition="uniform", num_microbatches=8),
            _case("by cost, 1f1b, 8", _MIDDLE, num_microbatches=8),
            _case("uneven, 1f1b, 8", _MIDDLE, partition=[6, 2], num_microbatches=8),
            _case("by count, 1f1b, 2", _MIDDLE, partition="uniform", num_microbatches=2),
            _case("by count, 1f1b, 1", _MIDDLE, partition="uniform", num_microbatches=1),
            _case("by count, gpipe, 4", _MIDDLE, partition="uniform", num_microbatches=4, schedule="gpipe"),
        ),
    ),
    PredictionBed(
        name="four-stages",
        hosts=(2, 2),
        cpu_shares=(0.45, 0.45),
        fast="1gbit",
        ethernet="100mbit",
        cases=(
            _case("four stages, 1f1b, 8", _WIDE, pipeline_parallel_size=4, num_microbatches=8),
            _case("four stages, 1f1b, 4", _WIDE, pipeline_parallel_size=4, num_microbatches=4),
            _case("four stages, 2 chunks, 4", _WIDE, pipeline_parallel_size=4, num_microbatches=4, num_chunks=2),
        ),
    ),
    PredictionBed(
        name="slow-ethernet",
        hosts=(1, 1),
        cpu_shares=(0.9, 0.9),
        fast="1gbit",
        ethernet="50mbit",  # transfers are large compared to the 80 kB burst of the testbed's rate limit
        cases=(
            _case("slow link, 1f1b, 2", _LONG, partition="uniform", num_microbatches=2),
            _case("slow link, 1f1b, 4", _LONG, partition="uniform", num_microbatches=4),
            _case("slow link, eager, 4", _LONG, partition="uniform", num_microbatches=4, schedule="eager_1f1b"),
            _case("slow link, 2 chunks, 4", _LONG, partition="uniform", num_microbatches=4, num_chunks=2),
        ),
    ),
    PredictionBed(
        name="unequal",
        hosts=(1, 1),
        cpu_shares=(0.9, 0.45),
        fast="1gbit",
        ethernet="100mbit",
        cases=(
            _case("unequal, by count, 8", _WIDE, partition="uniform", num_microbatches=8),
            _case("unequal, by cost, 8", _WIDE, num_microbatches=8),
            _case("unequal, by cost, 4", _WIDE, num_microbatches=4),
        ),
    ),
)

_SWEPT = _workload(192, 10, batch=16)  # neighbouring partitions differ by less than a few steps can show
_ALL = tuple(
    _case(f"{first}, {10 - first}", _SWEPT, partition=[first, 10 - first], num_microbatches=8) for first in range(1, 10)
)
_CHOSEN = (
    _case("uniform", _SWEPT, partition="uniform", num_microbatches=8),
    _case("self_adapting", _SWEPT, num_microbatches=8, profile="measure"),
)
PARTITION_BED = PredictionBed(
    name="partitions",
    hosts=(1, 1),
    cpu_shares=(0.9, 0.45),
    fast="1gbit",
    ethernet="100mbit",
    # the compared cases run several times, so that a machine that is slow or fast for a minute does not decide the result
    cases=(*_CHOSEN, *_ALL[4:], *_CHOSEN, *_ALL[5:], *_ALL[:4], *_CHOSEN, *_ALL[5:]),
)
