"""Trainer(strategy=HolmesStrategy(...)) gives the numbers of plain Lightning in one process.

All fits run once, when the first test asks; the tests compare. Each case's baseline and tolerance stand in
parity_cases.py. Compared on every rank: the loss and the logged values of each step, the norm of the whole
gradient at each step, the epoch's logged values, and the whole module's parameters and buffers after the fit.
"""

import itertools

import pytest
import torch
from parity_cases import (
    BF16_MIXED,
    BF16_TRUE,
    CASES,
    FP32,
    LAYOUTS,
    MICROBATCHES,
    OPTIMIZERS,
    REFUSED_FITS,
    REORDERED,
    SCHEDULES,
    SPLIT_SCHEDULES,
    SYNCS,
    Case,
    Fit,
    can_split,
)
from parity_models import FAMILIES
from parity_runs import Record, run_fits

pytest.importorskip("transformers", reason="needs the extra: pip install lightning-holmes[hf]")
SMALLEST = {FP32: 1e-3, BF16_MIXED: 0.1, BF16_TRUE: 0.1}
"""Tensors whose entries are all smaller are compared as if they had one of this size, by tolerance: the bias of
attention's keys has no gradient but rounding, and biases that start at zero hold the noise of three steps alone."""
in_one_worker = pytest.mark.xdist_group("parity")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def records() -> dict[Fit, list[Record]]:
    """What every rank saw of every fit."""
    fits = [fit for case in CASES.values() for fit in (case.fit, case.baseline)]
    return run_fits([*fits, *REFUSED_FITS.values()])


@in_one_worker
@pytest.mark.parametrize("name", CASES)
def test_equals_the_baseline(name: str, records: dict[Fit, list[Record]]) -> None:
    case = CASES[name]
    ranks, baseline = records[case.fit], records[case.baseline]
    for record in [*baseline, *ranks]:
        assert not record.error, record.error
    expected = over_replicas(baseline)
    if FAMILIES[case.fit.family].microbatch_is_batch:
        expected = over_microbatches(expected, case.baseline.accumulate_grad_batches)
    assert_trained(expected)
    found = over_replicas(ranks)
    if case.fit.layout is not None and case.fit.layout.gradient_sync != "auto":
        assert {name for record in ranks for name in record.syncs} == {case.fit.layout.gradient_sync}
    check = Comparison(case)
    check.numbers("loss", found.losses, expected.losses)
    for step, (mine, theirs) in enumerate(zip(found.logs, expected.logs, strict=True)):
        check.values(f"logs of step {step}", mine, theirs)
    for rank, record in enumerate(ranks):
        check.numbers(f"gradient norm on rank {rank}", record.norms, expected.norms)
        check.values(f"epoch's logs on rank {rank}", record.metrics, expected.metrics)
        check.states(f"final state on rank {rank}", record.state, expected.state)


@in_one_worker
@pytest.mark.parametrize("family", REFUSED_FITS)
def test_a_value_beside_the_hidden_state_is_refused_on_every_rank(family: str, records) -> None:
    reason = {
        "skip": "output 0 of layer 0, read in layer 4",
        "router_loss": "a value computed inside layer 0, read after the last layer",
    }[family]
    for record in records[REFUSED_FITS[family]]:
        assert record.error.startswith("UnsupportedModuleError: cutting layers after layer 2 would lose"), record.error
        assert reason in record.error


@in_one_worker
def test_batch_normalisation_is_warned_of(records: dict[Fit, list[Record]]) -> None:
    split = {
        name: case
        for name, case in CASES.items()
        if case.fit.family == "batch_norm" and case.fit.layout is not None and case.fit.layout.num_microbatches > 1
    }
    assert split
    for name, case in split.items():
        warned = records[case.fit][0].warnings
        assert any("layers.0.norm" in text and "microbatch" in text for text in warned), name


def test_the_table_covers_every_pair() -> None:
    covered = {pair for case in CASES.values() for pair in itertools.permutations(case.levels, 2)}
    layouts = [f"pp{p}xdp{d}" for p, d in LAYOUTS]
    schedules = (*SCHEDULES, *SPLIT_SCHEDULES)
    missing = []
    for family in FAMILIES:
        for level in (*layouts, *schedules, *MICROBATCHES, *OPTIMIZERS):
            if (family, level) not in covered and not is_senseless(family, level):
                missing.append((family, level))
    pairs = [
        *itertools.product(layouts, schedules),
        *itertools.product(layouts, MICROBATCHES),
        *itertools.product(schedules, MICROBATCHES),
        *itertools.product(layouts[2:], REORDERED),
        *itertools.product(REORDERED, MICROBATCHES),
        *itertools.product(OPTIMIZERS, (layout for layout in layouts if layout.endswith("xdp2"))),
        *itertools.product(OPTIMIZERS, (*SCHEDULES, *MICROBATCHES)),
    ]
    replicated = [layout for layout in layouts if layout.endswith("xdp2")]
    pairs += [*itertools.product(replicated, SYNCS), *itertools.product(SCHEDULES, SYNCS)]
    others = (*SPLIT_SCHEDULES, *REORDERED)
    pairs += [*itertools.product(OPTIMIZERS, others), *itertools.product(others, SYNCS)]
    pairs += itertools.product(OPTIMIZERS, SYNCS)
    pairs += itertools.product(MICROBATCHES, SYNCS)
    without_pipeline = [(layout, s) for layout in layouts[:2] for s in schedules[1:]]
    missing += [pair for pair in pairs if pair not in covered and pair not in without_pipeline]
    assert not missing


def is_senseless(family: str, level: str) -> bool:
    """Pairs that are refused, or without a baseline: what draws random numbers is compared with HolmesStrategy without a pipeline, and
    batch normalisation with plain Lightning on equal microbatches in one process."""
    if level in SPLIT_SCHEDULES and not can_split(family):
        return True
    if FAMILIES[family].draws:
        return level.startswith("pp1") or level == "sharded"
    if FAMILIES[family].microbatch_is_batch:
        return level.endswith("xdp2") or level in ("1", "7in4", "sharded", *SCHEDULES, *SPLIT_SCHEDULES)
    return False


# what several processes saw, as one


def over_replicas(ranks: list[Record]) -> Record:
    """One record of a whole run: the values of each step are means over replicas, weighted; the ranks of a replica
    must have seen the same."""
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
    """A run whose batches were the microbatches of larger ones, told in those."""
    starts = range(0, len(record.losses), count)
    logs = [record.logs[start : start + count] for start in starts]
    return Record(
        losses=[sum(record.losses[start : start + count]) for start in starts],  # Lightning has divided them
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
    """Otherwise equal parameters would prove nothing."""
    moved = [(record.state[k].float() - v.float()).norm() / v.float().norm() for k, v in record.initial.items()]
    assert max(moved) > 1e-3


class Comparison:
    """Relative comparison by a case's tolerance; tensors relative to their largest entry."""

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
