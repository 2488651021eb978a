"""Notes on the choices of a run, a line each: partition, microbatches and schedule, compared with the alternatives.

notes = describe_result(result, cost_model, options, described="FLOPs counted")
"""

from __future__ import annotations

import math

from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.partition import make_uniform_partition
from lightning_holmes.plan.prediction import Prediction, predict
from lightning_holmes.plan.search.comparison import CHUNKS_GAIN, MICROBATCH_GAIN, SearchResult


def describe_result(
    result: SearchResult,
    cost_model: CostModel,
    options: Asked,
    *,
    not_interleaved: str | None = None,
    described: str = "",
) -> tuple[str, ...]:
    """Return a note for each choice that ``options`` left open, and one for the prediction.

    Args:
        not_interleaved: why interleaving must not be chosen, in words; None: it may be chosen.
        described: where the costs come from.
    """
    best, notes = result.best, []
    if isinstance(options.partition, str) and options.partition != "uniform":
        notes.append(_describe_partition(options.partition, cost_model, best))
    if options.num_microbatches == "auto":
        notes.append(_describe_microbatches(result))
    if options.schedule == "auto":
        notes.append(_describe_schedule(result, not_interleaved))
    if result.sharding_note is not None:
        notes.append(result.sharding_note)
    notes += cost_model.network.link_notes()
    notes.append(f"prediction: {best.step_s:.3g} s a step, {best.timeline.bubble_share:.0%} of it bubble ({described})")
    return tuple(notes) if result.memory_note is None else (*notes, result.memory_note)


def _describe_partition(rule: str, cost_model: CostModel, best: Prediction) -> str:
    counts = ", ".join(map(str, best.partition.layer_counts))
    if best.sharded_parameters:
        cost_model = cost_model.with_sharded_parameters()
    loads = cost_model.balance(best.run, limit_memory=False).loads(best.partition.layer_counts)
    shown = ", ".join(f"{load:.3g}" for load in loads[:8]) + (" ..." if len(loads) > 8 else "")
    note = f"partition: {counts} layers, {rule}: {shown} s a microbatch on the ranks"
    uniform = make_uniform_partition(cost_model.model.num_layers, best.partition.num_stages)
    if uniform == best.partition:
        return note + "; as by count"
    if uniform.split_points & set(cost_model.model.forbidden_cuts):
        return note + "; by count a split point would lose a value"
    ratio = predict(cost_model, best.run, uniform).step_s / best.step_s
    return note + f"; by count a step would take {ratio:.2f}x as long"


def _describe_microbatches(result: SearchResult) -> str:
    best, run = result.unrefined, result.best.run
    others = [
        f"{entry.run.num_microbatches}: {entry.step_s / best.step_s:.2f}x"
        for entry in result.tried
        if (entry.run.schedule, entry.run.num_chunks) == (run.schedule, run.num_chunks)
        and entry.run.num_microbatches != run.num_microbatches
    ]
    reason = ", the fastest by prediction"
    if any(entry.step_s < best.step_s for entry in result.tried if entry.run.num_microbatches > run.num_microbatches):
        reason = f"; more must save {MICROBATCH_GAIN:.0%} by prediction, since counted FLOPs do not know what small microbatches lose"
    note = f"num_microbatches: {run.num_microbatches} of {run.microbatch_samples} samples"
    return note + reason + (f" ({', '.join(others)})" if others else "")


def _describe_schedule(result: SearchResult, not_interleaved: str | None) -> str:
    best, run = result.unrefined, result.best.run
    fastest: dict[tuple[str, int], float] = {}
    for entry in result.tried:
        name = (entry.run.schedule, entry.run.num_chunks)
        fastest[name] = min(entry.step_s, fastest.get(name, math.inf))
    others = [
        f"{_name(*key)}: {seconds / best.step_s:.2f}x"
        for key, seconds in fastest.items()
        if key != (run.schedule, run.num_chunks)
    ]
    note = f"schedule: {_name(run.schedule, run.num_chunks)}" + (f" ({', '.join(others)})" if others else "")
    if run.num_chunks == 1 and any(chunks > 1 for _, chunks in fastest):
        note += f"; several stages a rank are taken where they save {CHUNKS_GAIN:.0%}"
    return note + (f"; {not_interleaved}" if not_interleaved is not None else "")


def _name(schedule: str, chunks: int) -> str:
    return schedule + (f" with {chunks} chunks a rank" if chunks > 1 else "")
