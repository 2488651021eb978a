"""Preference: chooses between several plans of one layout, since predictions leave out some costs.

best = Preference(microbatch_gain=0.08, chunks_gain=0.05).pick(predictions)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.schedule import spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """The share of the step that an option must save, by prediction, to be chosen.

    Attributes:
        microbatch_gain: for more microbatches: counted FLOPs do not know what small microbatches lose.
        chunks_gain: for several stages a rank, which have more messages and more work per stage than their costs include. Relative to plans
            without them, such steps took 0 to 2 % longer than predicted (docs/log.md, 2026-11-23).
        split_gain: for split backwards, whose cost depends on the layers.
        nearly: plans are compared in steps of this share; of plans in the same step the simplest is chosen.
    """

    microbatch_gain: float
    chunks_gain: float
    split_gain: float = 0.05
    nearly: float = 0.03

    def pick(self, found: Sequence[Prediction]) -> Prediction:
        """Choose one of several plans of one layout."""

        def needed(entry: Prediction) -> float:
            split = self.split_gain if spec_of(entry.run.schedule).is_split else 0.0
            return max(split, self.chunks_gain if entry.run.num_chunks > 1 else 0.0)

        plain = min((p.step_s for p in found if needed(p) == 0), default=math.inf)
        kept = [p for p in found if needed(p) == 0 or p.step_s < plain * (1 - needed(p))] or list(found)
        limit = min(p.step_s for p in kept) * (1 + self.microbatch_gain)
        count = min(p.run.num_microbatches for p in kept if p.step_s <= limit)
        kept = [p for p in kept if p.run.num_microbatches == count]
        fastest = min(p.step_s for p in kept)

        def rank(entry: Prediction) -> tuple[int, int, bool, bool, bool]:
            slower, spec = math.floor((entry.step_s / fastest - 1) / self.nearly), spec_of(entry.run.schedule)
            # of equal plans a layered schedule comes last, since it holds the activations of all microbatches
            return slower, entry.run.num_chunks, spec.is_split, spec.is_layered, spec.is_eager

        return min(kept, key=rank)
