"""Cases of the fuzzer by their seeds, and the smallest cases of the faults that it has found.

Baseline: plain Lightning, DDP where replicas divide the batch. Tolerances: fuzz.TOLERANCES, 2e-6 for most cases, which compute
in double precision (logged values are single). `python tests/fuzz/fuzz.py SEED` repeats a case.
"""

from collections.abc import Iterator

import pytest
import torch
from covering import EXHAUSTIVE
from fuzz import cures_in, differences, examine, line_of, parse
from fuzz_runs import Pool
from traits import AXES, draw, settle

FOUND = (
    "later=first layer, stages=2, schedule=zero_bubble_v",  # a weight of the rank's first stage that its last one reads
    "later=stops, stages=2",  # a step that stops the trainer after the layers
    "later=rate, stages=2, microbatches=1",
    "later=rate, stages=2, microbatches=2",
    "later=rate at start, stages=2, chunks=2, schedule=breadth_first, microbatches=1",
    "habit=gradient after step, accumulate=2, replicas=2",  # between accumulated batches
    "shared=layers, habit=gradient after step, accumulate=2, stages=2",
    "habit=averaging, checkpoint=end, evaluation=test, stages=2, format=folder",
    "state=attribute, habit=one parameter, stages=2",  # a list to which a hook appends on rank 0 only, and another on all
    "state=last, read=batch end, habit=one parameter, stages=2, microbatches=1",
    "habit=states, nodes=1",
    "override=skips, accumulate=2",  # a window without its last batch
    "override=skips, accumulate=2, replicas=2, sharding=parameters",
    "override=skips, accumulate=2, nodes=1",
    "random=torch, microbatches=2",  # a generator of its own, one stage, several microbatches
    "habit=averaging, checkpoint=end, stages=2",  # a checkpoint of the averages after the fit
    "later=logger, microbatches=2",  # a logger in a step, one process
    "later=logger, microbatches=2, tensor=2",
    "later=rate, nodes=1",  # lowered in a step, when nodes may have updated layers
    "random=numpy, microbatches=2, tensor=2",  # whose teardown hid the refusal
    "log=extreme, checkpoint=middle, stages=2, schedule=1f1b, resume=one",  # one stage that goes on with the microbatches of two
    "state=last, stages=2, read=batch end",  # a tensor that the step sets, and that a hook reads: of the last microbatch
    "input=tokens, shuffle=yes, head=tied, second log=extreme, stages=2",  # a maximum that both halves of the trial have
    # norms by which gradients in double precision are clipped
    "batch=dict, layers=residual, container=list, random=counter, optimizer=rmsprop, clip=norm, tensor=2, format=folder",
    "batch=unlike, loss=penalty, optimizer=rmsprop, clip=norm, scheduler=cycle, trainer=max_steps, stages=2, microbatches=1",
    "habit=raw sum, stages=2",
    "habit=raw sum, stages=2, replicas=2",
    "habit=own metric, stages=2, replicas=2",
    "input=tokens, batch=unlike, layers=counting, stages=2",  # a step that changes buffers, and fails over a half of its samples
    "stages=2, option=monitor",  # receives that began in one recording and ended in the next wrote to freed memory
)
"""Smallest cases of faults that it has found, and that are mended."""
GIVEN = (
    "state=object, stages=2",
    "state=counter, stages=2",
    "state=nested, stages=2",
    "state=attribute, read=save, checkpoint=middle, stages=2",
    "random=numpy, stages=2",
    "later=logger, stages=2",
    "habit=equal, nodes=1",
    "habit=minus, nodes=1",
    "layers=batchnorm, replicas=2, evaluation=validation, log=synced, checkpoint=end",
    "layers=batchnorm, stages=2, replicas=2, evaluation=validation, log=synced, checkpoint=end, microbatches=1",
    "log=world, optimizer=scaled by world, stages=2, replicas=2",
    "optimizer=schedule-free, replicas=2, sharding=optimizer",
    "optimizer=schedule-free, nodes=1",
    "optimizer=schedule-free, stages=2",
)
"""Cases that ran to the end with other numbers before there was a fuzzer."""


EXACT = (
    "random=numpy, stages=2",
    "random=python, stages=2, chunks=2, schedule=breadth_first, evaluation=validation",
    "random=torch, stages=2, replicas=2, evaluation=predict",
    "random=torch, chunks=2, schedule=breadth_first",
    "random=global, stages=2, later=draws, override=scaled batch",
    "random=numpy, later=draws, replicas=2, sharding=parameters",
    "random=numpy, later=draws, nodes=1",
    "random=torch, tensor=2",
    "habit=writer, evaluation=predict, stages=2, last=smaller",
    "habit=writer, evaluation=predict, stages=2, replicas=2",
    "habit=writer, evaluation=predict, tensor=2",
)
"""Cases that are not refused any more."""


def seeds() -> list[int]:
    """Return 30 seeds, or under `make exhaustive` this part of 500."""
    if not EXHAUSTIVE:
        return list(range(30))
    part, parts = map(int, EXHAUSTIVE.split("/"))
    return list(range(500))[part - 1 :: parts]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Pool]:
    with Pool() as made:
        yield made


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.xdist_group(f"fuzz {seed % 2}")) for seed in seeds()]
)
def test_equal_or_refused(seed: int, jobs: Pool) -> None:
    case = draw(seed)
    outcome = examine(jobs, case)
    assert not outcome.fails, (
        f"python tests/fuzz/fuzz.py --shrink {seed}\n{line_of(case)}\n{outcome.verdict}: {outcome.why}"
    )


@pytest.mark.xdist_group("fuzz 0")
@pytest.mark.parametrize("line", [*FOUND, *GIVEN])
def test_mended(line: str, jobs: Pool) -> None:
    outcome = examine(jobs, settle(parse(line)))
    assert not outcome.fails, f"{outcome.verdict}: {outcome.why}"


@pytest.mark.xdist_group("fuzz 1")
@pytest.mark.parametrize("line", EXACT)
def test_exact(line: str, jobs: Pool) -> None:
    outcome = examine(jobs, settle(parse(line)))
    assert outcome.verdict == "equal", f"{outcome.verdict}: {outcome.why}"


def test_a_difference_is_seen() -> None:
    one, other = {"/loss": torch.tensor(1.0).double()}, {"/loss": torch.tensor(1.001).double()}
    assert differences(one, other, "double") and not differences(one, dict(one), "double")
    assert differences(one, {}, "double") == ["/loss: only in plain Lightning"]


def test_cures_are_read_from_a_refusal() -> None:
    case = {"stages": "2", "sharding": "parameters"}
    why = 'sharding="parameters": the step reads it; use sharding="none", num_chunks=1, pipeline_parallel_size=1'
    assert cures_in(why, case) == [{"stages": "1"}, {"chunks": "1", "schedule": "auto"}, {"sharding": "none"}]


def test_a_case_settles_and_can_be_written_down() -> None:
    for seed in range(300):
        case = draw(seed)
        assert settle(case) == case and parse(line_of(case)) == case
        assert all(value in AXES[axis][1:] for axis, value in case.items())
