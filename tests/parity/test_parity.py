"""Trainer(strategy=HolmesStrategy(...)) gives the numbers of plain Lightning in one process.

Many fits run in one launch, when the first of their tests asks; the tests compare their records. The baseline and tolerance
of each case are in parity_cases.py. Compared on every rank: the loss and logged values of each step, the norm of the whole
gradient at each step, the epoch's logged values, and all parameters and buffers of the module after the fit.
"""

import itertools
from typing import Any

import pytest
import torch
from covering import EXHAUSTIVE, each_value, pairs_of
from parity_cases import (
    BF16_MIXED,
    BF16_TRUE,
    CASES,
    FP32,
    LAYERED,
    LAYOUTS,
    MICROBATCHES,
    OPTIMIZERS,
    OPTIONS,
    REORDERED,
    SCHEDULES,
    SPLIT_SCHEDULES,
    SYNCS,
    Case,
    is_needed,
    make_product,
)
from parity_fit import Fit
from parity_models import FAMILIES
from parity_runs import Record, run_fits

pytest.importorskip("transformers", reason="needs the extra: pip install lightning-holmes[hf]")
SMALLEST = {FP32: 1e-3, BF16_MIXED: 0.1, BF16_TRUE: 0.1}
"""Tensors whose entries are all smaller than this are compared by tolerance as if their largest entry had this size: the bias
of attention's keys has only rounding as its gradient, and biases that start at zero hold the noise of three steps alone."""
pytestmark = pytest.mark.timeout(900)
FITS_A_LAUNCH = 150
_rows = set(each_value([case.levels for case in CASES.values() if case.levels]))
IN_SHORT = {name for name, case in CASES.items() if case.levels in _rows}
"""What `make test` runs: each value of each axis once."""
IN_SHORT |= set([name for name, case in CASES.items() if not case.levels][::6])


def group_of(family: str) -> str:
    """Return one of two xdist groups, which may run at the same time: the processes of one wait for each other half of the
    time. A family stays in one group, since its cases share baselines."""
    return f"parity{list(FAMILIES).index(family) % 2}"


@pytest.fixture(scope="session")
def known() -> dict[Fit, list[Record]]:
    """The records of all fits that have run in this test worker."""
    return {}


def run_with_others(name: str, known: dict[Fit, list[Record]], session: pytest.Session) -> None:
    """Run a case's fits and, in the same launches, those of the cases after it."""
    if CASES[name].fit in known and CASES[name].baseline in known:
        return
    group = group_of(CASES[name].fit.family)
    chosen = [
        item.callspec.params["name"]
        for item in session.items
        if getattr(item, "originalname", "") == "test_equals_the_baseline"
    ]
    cases = [CASES[other] for other in chosen[chosen.index(name) :] if group_of(CASES[other].fit.family) == group]
    fits = dict.fromkeys(fit for case in cases for fit in (case.baseline, case.fit) if fit not in known)
    known |= run_fits(list(itertools.islice(fits, FITS_A_LAUNCH)))


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    group = pytest.mark.xdist_group(group_of(CASES[name].fit.family))
    return [group] if name in IN_SHORT else [group, pytest.mark.full]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_equals_the_baseline(
    name: str, known: dict[Fit, list[Record]], request: pytest.FixtureRequest, record_property: Any
) -> None:
    run_with_others(name, known, request.session)
    case = CASES[name]
    ranks, baseline = known[case.fit], known[case.baseline]
    record_property("fit_seconds", ranks[0].seconds)
    for record in [*baseline, *ranks]:
        assert not record.error, record.error
    expected = over_replicas(baseline)
    if FAMILIES[case.fit.family].microbatch_is_batch:
        expected = over_microbatches(expected, case.baseline.accumulate_grad_batches)
    assert_trained(expected)
    found = over_replicas(ranks)
    layout = case.fit.layout
    assert layout is not None
    if FAMILIES[case.fit.family].microbatch_is_batch and layout.num_microbatches > 1:
        assert any("layers.0.norm" in text and "microbatch" in text for text in ranks[0].warnings)
    if layout.gradient_sync != "auto":
        assert {name for record in ranks for name in record.syncs} == {layout.gradient_sync}
    check = Comparison(case)
    check.numbers("loss", found.losses, expected.losses)
    for step, (mine, theirs) in enumerate(zip(found.logs, expected.logs, strict=True)):
        check.values(f"logs of step {step}", mine, theirs)
    for rank, record in enumerate(ranks):
        check.numbers(f"gradient norm on rank {rank}", record.norms, expected.norms)
        check.values(f"epoch's logs on rank {rank}", record.metrics, expected.metrics)
        check.states(f"final state on rank {rank}", record.state, expected.state)
    del known[case.fit]  # `make exhaustive` has thousands of them


@pytest.mark.skipif(EXHAUSTIVE not in ("", "1/1"), reason="a part of the product")
def test_every_pair_meets_in_the_table() -> None:
    needed = {pair for row in make_product() for pair in pairs_of(row) if is_needed(*pair)}
    covered = {pair for case in CASES.values() for pair in pairs_of(case.levels)}
    assert not needed - covered


def test_the_product_lacks_only_what_is_refused_or_has_no_baseline() -> None:
    """Compare the product with lists by hand: each value must occur, and each family with each layout and schedule that it can run."""
    product = make_product()
    schedules = {"none", *SCHEDULES, LAYERED, *SPLIT_SCHEDULES, *REORDERED}
    axes = (set(FAMILIES), set(LAYOUTS), schedules, set(MICROBATCHES), {"auto", *SYNCS}, set(OPTIMIZERS), set(OPTIONS))
    assert tuple(map(set, zip(*product, strict=True))) == axes
    split = {"zero_bubble", "zero_bubble_v", "eager_zero_bubble"}
    unsplit = {"checkpoint_inside", "checkpoint_around", "checkpoint_dropout", "frozen_start", "batch_norm"}
    drawing = {"gpt_dropout", "checkpoint_dropout"}
    for family in FAMILIES:
        rows = [row for row in product if row[0] == family]
        alone = set() if family in drawing else {"none"}
        assert {row[2] for row in rows} == schedules - {"none"} - (split if family in unsplit else set()) | alone, (
            family
        )
        assert {row[1] for row in rows} == {layout for layout in LAYOUTS if family != "batch_norm" or layout[1] == 1}
        if family not in {"batch_norm"}:
            assert {row[3] for row in rows} == set(MICROBATCHES), family
            assert {row[4] for row in rows} == {"auto", *SYNCS}, family


# the records of several processes as one


def over_replicas(ranks: list[Record]) -> Record:
    """Merge the ranks' records into one of the whole run: each step's values are weighted means over replicas; the ranks of a
    replica must have seen the same."""
    replicas: dict[int, Record] = {}
    for record in ranks:
        first = replicas.setdefault(record.data_parallel_rank, record)
        assert (record.losses, record.logs, record.weights) == (first.losses, first.logs, first.weights)
    first = ranks[0]
    whole = Record(norms=first.norms, metrics=first.metrics, initial=first.initial, state=first.state)
    for step in range(len(first.losses)):
        weights = [r.weights[step] for r in replicas.values()]
        whole.weights.append(sum(weights))
        whole.losses.append(weighted_mean([r.losses[step] for r in replicas.values()], weights))
        keys = first.logs[step]
        whole.logs.append({k: weighted_mean([r.logs[step][k] for r in replicas.values()], weights) for k in keys})
    return whole


def over_microbatches(record: Record, count: int) -> Record:
    """Convert the record of a run whose batches were microbatches of larger batches into one of those larger batches."""
    starts = range(0, len(record.losses), count)
    logs = [record.logs[start : start + count] for start in starts]
    return Record(
        losses=[sum(record.losses[start : start + count]) for start in starts],  # Lightning has divided them already
        logs=[{key: sum(log[key] for log in part) / count for key in part[0]} for part in logs],
        weights=[sum(record.weights[start : start + count]) for start in starts],
        norms=record.norms,
        metrics=record.metrics,
        initial=record.initial,
        state=record.state,
    )


def weighted_mean(values: list[float], weights: list[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def assert_trained(record: Record) -> None:
    """Check that the weights have moved: otherwise equal parameters would prove nothing."""
    floats = {k: v.float() for k, v in record.initial.items() if v.is_floating_point() and bool(v.any())}
    assert max(float((record.state[k].float() - v).norm() / v.norm()) for k, v in floats.items()) > 1e-3


class Comparison:
    """Relative comparison with a case's tolerance; tensors relative to their largest entry."""

    def __init__(self, case: Case) -> None:
        self.tolerance = case.tolerance

    def numbers(self, what: str, found: list[float], expected: list[float]) -> None:
        assert found == pytest.approx(expected, rel=self.tolerance, abs=1e-7), what

    def values(self, what: str, found: dict[str, float], expected: dict[str, float]) -> None:
        assert found == pytest.approx(expected, rel=self.tolerance, abs=1e-7), what

    def states(self, what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        assert list(found) == list(expected), what
        for name, tensor in expected.items():
            mine, theirs = found[name].double(), tensor.double()
            assert found[name].dtype == tensor.dtype, (what, name)
            scale = max(theirs.abs().max().item(), SMALLEST[self.tolerance])
            worst = (mine - theirs).abs().max().item() / scale
            assert worst <= self.tolerance, f"{what}: {name} differs by {worst:.2g} of its largest entry"
