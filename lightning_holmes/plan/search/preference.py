"""Preference: which of several plans of one layout is taken, since predictions do not know everything.

best = Preference().pick(predictions, unit="flops")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_holmes.plan.layer_cost import WorkUnit
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.schedule import spec_of

_WHY_MORE = {
    "flops": "counted FLOPs do not know what small microbatches lose",
    "seconds": "each has its messages, and work around the layers that is not timed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """What must be saved, as a share of the step.

    Attributes:
        counted_gain, timed_gain: by more microbatches, where FLOPs were counted and where layers were timed.
        interleaving_gain: by interleaving: more messages and more work a stage than its costs know. Plans of one step took 0 to 2 %
            longer with it than predicted beside those without (docs/log.md, 2026-11-23).
        sharding_gain: by parameters in shards.
        nearly: plans within it of the fastest are told apart by simplicity.
    """

    counted_gain: float = 0.08
    timed_gain: float = 0.03
    interleaving_gain: float = 0.03
    sharding_gain: float = 0.05
    nearly: float = 0.01

    def microbatch_gain(self, unit: WorkUnit) -> tuple[float, str]:
        """What more microbatches must save, and why."""
        return self.counted_gain if unit == "flops" else self.timed_gain, _WHY_MORE[unit]

    def pick(self, found: Sequence[Prediction], *, unit: WorkUnit, prefers_eager: bool = False) -> Prediction:
        """The plan to take, of some of one layout.

        Args:
            prefers_eager: take a schedule that gives transfers time where its prediction is as good as another's.
        """
        plain = min((p.step_s for p in found if p.run.num_chunks == 1), default=math.inf)
        kept = [p for p in found if p.run.num_chunks == 1 or p.step_s < plain * (1 - self.interleaving_gain)]
        limit = min(p.step_s for p in kept or found) * (1 + self.microbatch_gain(unit)[0])
        count = min(p.run.num_microbatches for p in kept or found if p.step_s <= limit)
        kept = [p for p in kept or found if p.run.num_microbatches == count]
        fastest = min(p.step_s for p in kept)

        def rank(entry: Prediction) -> tuple[int, int, bool, bool]:
            slower, spec = math.floor((entry.step_s / fastest - 1) / self.nearly), spec_of(entry.run.schedule)
            # of like ones a layered schedule comes last: it holds the activations of all microbatches
            return slower, entry.run.num_chunks, spec.is_layered, spec.is_eager != prefers_eager

        return min(kept, key=rank)
