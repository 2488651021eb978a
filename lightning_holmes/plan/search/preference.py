"""Preference: chooses between several plans of one layout, since predictions leave out some costs.

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
    """The share of the step that an option must save, by prediction, to be chosen.

    Attributes:
        counted_gain, timed_gain: for more microbatches, if FLOPs were counted or layers were timed.
        interleaving_gain: for interleaving, which has more messages and more work per stage than its costs include. Relative to plans
            without it, interleaved steps took 0 to 2 % longer than predicted (docs/log.md, 2026-11-23).
        sharding_gain: for sharded parameters.
        nearly: plans are compared in steps of this share; of plans in the same step the simplest is chosen.
    """

    counted_gain: float = 0.08
    timed_gain: float = 0.03
    interleaving_gain: float = 0.03
    sharding_gain: float = 0.05
    nearly: float = 0.01

    def microbatch_gain(self, unit: WorkUnit) -> tuple[float, str]:
        """The share of the step that more microbatches must save, and the reason."""
        return self.counted_gain if unit == "flops" else self.timed_gain, _WHY_MORE[unit]

    def pick(self, found: Sequence[Prediction], *, unit: WorkUnit, prefers_eager: bool = False) -> Prediction:
        """Choose one of several plans of one layout.

        Args:
            prefers_eager: prefer a schedule that leaves time for transfers if its prediction is as good as another's.
        """
        plain = min((p.step_s for p in found if p.run.num_chunks == 1), default=math.inf)
        kept = [p for p in found if p.run.num_chunks == 1 or p.step_s < plain * (1 - self.interleaving_gain)]
        limit = min(p.step_s for p in kept or found) * (1 + self.microbatch_gain(unit)[0])
        count = min(p.run.num_microbatches for p in kept or found if p.step_s <= limit)
        kept = [p for p in kept or found if p.run.num_microbatches == count]
        fastest = min(p.step_s for p in kept)

        def rank(entry: Prediction) -> tuple[int, int, bool, bool]:
            slower, spec = math.floor((entry.step_s / fastest - 1) / self.nearly), spec_of(entry.run.schedule)
            # of equal plans a layered schedule comes last, since it holds the activations of all microbatches
            return slower, entry.run.num_chunks, spec.is_layered, spec.is_eager != prefers_eager

        return min(kept, key=rank)
