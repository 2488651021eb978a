"""A simulator of trainers whose sends block, as in Megatron-LM's 1F1B: a rank waits until the tensor that it sends has arrived, and nothing
is sent to a rank that computes; and which reduce gradients after the last backward, stage by stage. This package's runner does none of these.

step_s = simulate_blocking(schedule, costs).step_s
"""

from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.run_shape import RunShape
from lightning_holmes.plan.schedule import Schedule
from lightning_holmes.plan.simulator import (
    _BACKWARD,
    _BACKWARD_WEIGHT,
    _FORWARD,
    _SEND_ACTIVATION,
    StepCosts,
    _Simulation,
)
from lightning_holmes.plan.timeline import Timeline

Key = tuple[int, int, int]


def simulate_blocking(schedule: Schedule, costs: StepCosts) -> Timeline:
    return _Blocking(schedule, costs).run()


def blocking_step_s(costs: CostModel, run: RunShape, partition: Partition) -> float:
    return simulate_blocking(run.make_schedule(), costs.step_costs(run, partition)).step_s


class _Blocking(_Simulation):
    def __init__(self, schedule: Schedule, costs: StepCosts) -> None:
        super().__init__(schedule, costs)
        self.ready: dict[Key, float] = {}  # since when a rank is ready to receive a tensor
        self.parked: dict[Key, tuple[float, int, int, int, int]] = {}  # sends whose receiver is not ready yet

    def run(self) -> Timeline:
        for rank in range(self.num_ranks):
            self._go_on(rank)
        while True:
            self._transfer_all()
            if not self.parked:
                return super().run()
            # all ranks block: they send to each other in a ring, and receive later
            self._start(*self.parked.pop(min(self.parked, key=lambda key: self.parked[key])))

    def _wait(self, key: Key, rank: int, cursor: int, clock: float) -> None:
        super()._wait(key, rank, cursor, clock)
        self._expect(rank, cursor, clock)

    def _send(self, clock: float, cursor: int, code: int, stage: int, microbatch: int, rank: int) -> bool:
        self._expect(rank, cursor + 1, clock)
        key = (_FORWARD, stage + 1, microbatch) if code == _SEND_ACTIVATION else (_BACKWARD, stage - 1, microbatch)
        if key in self.ready:
            self._start(max(clock, self.ready.pop(key)), code, stage, microbatch, rank)
        else:
            self.parked[key] = (clock, code, stage, microbatch, rank)
        return False

    def _arrive(self, key: Key, rank: int, source: int) -> None:
        arrival, sent = self.arrived[key]
        self.waited[source] += arrival - sent
        self.clock[source] = arrival
        self._go_on(source)
        super()._arrive(key, rank, source)

    def _finish(self, rank: int) -> None:
        self.clock[rank] += sum(self.costs.reduce_s[stage] for stage in self.pending[rank])
        self.pending[rank].clear()
        super()._finish(rank)

    def _expect(self, rank: int, cursor: int, clock: float) -> None:
        """A rank that sends or waits can receive the tensor that its next computation needs, and no other."""
        for code, stage, microbatch in self.actions[rank][cursor:]:
            if code <= _BACKWARD_WEIGHT:
                key = (min(code, _BACKWARD), stage, microbatch)
                if not self._waits(code, stage) or key in self.ready or key in self.arrived:
                    return
                if key in self.parked:
                    time, *sent = self.parked.pop(key)
                    self._start(max(time, clock), *sent)
                else:
                    self.ready[key] = clock
                return
