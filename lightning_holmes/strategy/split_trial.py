"""schedule="auto" under a pipeline: the first batches measure what splitting the backward costs, then all ranks choose.

trial = SplitTrial(plan, driver, device)
driver.run(replace(request, observer=trial.meter))
plan = trial.after_batch(plan)           # every rank, after every training batch; changes the driver, too
"""

from dataclasses import replace

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_holmes.comm.objects import all_gather_values
from lightning_holmes.pipeline.split_meter import SplitMeter
from lightning_holmes.pipeline.steps import StepDriver
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.schedule import spec_of
from lightning_holmes.plan.split_choice import StageSeconds, choose_split, slowest

_BATCHES = 2


class SplitTrial:
    """Measures the split backward in the first batches of a fit; ``meter`` is None once the schedule has been chosen, or if there is no choice."""

    def __init__(self, plan: Plan, driver: StepDriver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._left = _BATCHES
        # one microbatch cannot be compared with another, and a tensor group's collectives would be called in another order
        possible = (
            spec_of(plan.schedule).split_variant and plan.pipeline_parallel_size > 1 and plan.num_microbatches > 1
        )
        self.meter = SplitMeter(device) if possible and plan.tensor_parallel_size == 1 else None

    def after_batch(self, plan: Plan) -> Plan:
        """Return the plan to continue with. After the last measured batch, compare the measurements of all ranks, and choose; all ranks must call."""
        if self.meter is None:
            return plan
        self._left -= 1
        if self._left > 0:
            return plan
        mine = self.meter.costs()
        self.meter = None
        everyone: list[dict[int, StageSeconds | None]] = all_gather_values(mine)
        stages = [slowest([costs[stage] for costs in everyone if stage in costs]) for stage in range(plan.num_stages)]
        choice = choose_split(stages, num_microbatches=plan.num_microbatches, schedule=plan.schedule)
        self._driver.schedule = choice.schedule
        rank_zero_info(f"schedule: {choice.reason}")
        return replace(plan, schedule=choice.schedule, notes=(*plan.notes, f"schedule: {choice.reason}"))
