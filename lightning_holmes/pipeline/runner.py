"""The runner: executes a schedule's actions on one rank, for training and evaluation alike.

Every schedule is the same to it. Receives are posted where the schedule says, sends are not waited for.
Shapes are learnt when a batch of a new signature first passes, and sent ahead of its tensors once.

    for _ in runner.run(job): pass        # a generator, so that one process can run all stages in turn
"""

import collections
import contextlib
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_holmes.comm.p2p import P2P, PendingReceive, TensorSpec
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.anomaly import naming_parameters
from lightning_holmes.pipeline.split_backward import (
    Accumulate,
    SplitBackward,
    check_splittable,
    checkpointing_refused,
)
from lightning_holmes.pipeline.split_meter import SplitMeter
from lightning_holmes.pipeline.stage import PipelineModule, StageRun
from lightning_holmes.pipeline.step_clock import StepClock
from lightning_holmes.plan.schedule import Action, Op, Schedule
from lightning_holmes.torch_private import noticing_checkpoints

TOPIC_SHAPES = 1


class BackwardListener(Protocol):
    """Who wants to know how far the backwards of a batch have come: what gathers the gradients."""

    def last_backward(self, stage: int) -> None:
        """The last backward of the batch through ``stage`` begins; until it ends no other one runs."""

    def backwards_done(self, stage: int) -> None:
        """It has ended: nothing more is to come for the parameters of ``stage``."""

    def actions_done(self) -> None:
        """All that this rank had to do for the batch is done, or on its way."""


@dataclass(slots=True, kw_only=True)
class StepJob:
    """One batch's work on one rank.

    ``step(run, microbatch)`` calls the user's step; ``loss_scales`` multiplies each microbatch's loss for
    the backward (None: no backward); ``seeds`` are those of the microbatches (None: leave the generators
    alone); ``signatures`` tell microbatches of different shapes apart; ``after_forwards()`` is called when this
    rank has run its last forward, while backwards go on; ``listener`` is told of the backwards.
    ``accumulate(name, gradient)`` takes the gradients that a split backward gives (None: into ``grad``). ``meter`` times the
    parts of backwards. ``outputs`` is filled on the rank of the last stage.
    """

    schedule: Schedule
    step_name: str
    step: Callable[[StageRun, int], Any]
    signatures: Sequence[Hashable]
    seeds: Sequence[int] | None = None
    loss_scales: Callable[[], Sequence[float]] | None = None
    after_forwards: Callable[[], None] | None = None
    listener: BackwardListener | None = None
    accumulate: Accumulate | None = None
    meter: SplitMeter | None = None
    outputs: list[Any] = field(default_factory=list)


class PipelineRunner:
    """Runs jobs on the stages of ``module`` that this rank holds."""

    def __init__(self, module: PipelineModule, p2p: P2P | None) -> None:
        self.module = module
        self.p2p = p2p
        self.clock: StepClock | None = None  # of a monitored run
        self._known_specs: dict[Hashable, tuple[TensorSpec, ...]] = {}
        self.without_checkpoints: set[Hashable] = set()

    def run(self, job: StepJob) -> Generator[None, None, None]:
        """Execute this rank's actions; yields wherever it would wait on another stage of the same process.

        Collective over the ranks of one pipeline.
        """
        rank = 0 if self.p2p is None else self.p2p.rank
        batch = _Batch(self, job)
        job.outputs = [None] * job.schedule.num_microbatches
        for action in job.schedule.actions[rank]:
            yield from batch.perform(action)
        if job.listener is not None:
            job.listener.actions_done()
        if self.p2p is not None:
            start = None if self.clock is None else self.clock.mark()
            self.p2p.finish()
            if self.clock is not None:
                self.clock.add("wait", start)


class _Batch:
    """The state of one batch on its way through this rank."""

    def __init__(self, runner: PipelineRunner, job: StepJob) -> None:
        self.runner = runner
        self.module = runner.module
        self.clock = runner.clock
        self.job = job
        self.schedule = job.schedule
        self.last_stage = job.schedule.num_stages - 1
        self.runs: dict[tuple[int, int], StageRun] = {}
        self.halves: dict[tuple[int, int], SplitBackward] = {}  # whose weights are still to come
        # receives of each source in the order of its sends; those of unknown shape wait here to be posted
        self.queues: dict[int, collections.deque[Action]] = collections.defaultdict(collections.deque)
        self.posted: dict[Action, PendingReceive] = {}
        self.scales: Sequence[float] | None = None
        self.forwards_left = len(self.module.stages) * job.schedule.num_microbatches
        self.backwards_left = dict.fromkeys(self.module.stages, job.schedule.num_microbatches)

    def perform(self, action: Action) -> Generator[None, None, None]:
        if action.op in (Op.RECV_ACTIVATION, Op.RECV_GRADIENT):
            source = self._source(action)
            self.queues[source].append(action)
            self._post_known(source)
        elif action.op is Op.FORWARD:
            yield from self._forward(action)
            self.forwards_left -= 1
            if self.forwards_left == 0 and self.job.after_forwards is not None:
                self.job.after_forwards()
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            yield from self._backward(action)
        elif action.op is Op.BACKWARD_WEIGHT:
            self._backward_weight(action)
        elif action.op is Op.SEND_ACTIVATION:
            start = None if self.clock is None else self.clock.mark()
            self._send_activation(action)
            if self.clock is not None:
                self.clock.add("send_activation", start, action.stage, action.microbatch)
        elif action.op is Op.SEND_GRADIENT:
            start = None if self.clock is None else self.clock.mark()
            self._send_gradient(action)
            if self.clock is not None:
                self.clock.add("send_gradient", start, action.stage, action.microbatch)

    # computing

    def _forward(self, action: Action) -> Generator[None, None, None]:
        job, stage, microbatch, clock = self.job, action.stage, action.microbatch, self.clock
        start = None if clock is None else clock.mark()
        run = StageRun(
            stage=stage,
            step_name=job.step_name,
            seed=None if job.seeds is None else job.seeds[microbatch],
        )
        if stage > 0 and self._is_here(stage - 1):
            run.received = self._handed_over(stage - 1, microbatch)
        elif stage > 0:
            arrival = Action(Op.RECV_ACTIVATION, stage, microbatch)
            tensors = yield from self._arrived(arrival)
            for tensor, spec in zip(tensors, self._activation_specs(arrival) or (), strict=True):
                run.received.append(tensor.requires_grad_() if spec.requires_grad else tensor)
            if clock is not None:
                start = clock.add("wait_activation", start, stage, microbatch)
        with self._watching(run, microbatch):
            output = self.module.forward_step(run, lambda: job.step(run, microbatch))
        if clock is not None:
            clock.add("forward", start, stage, microbatch)
        if stage == self.last_stage:
            job.outputs[microbatch] = output
        if job.loss_scales is not None or stage < self.last_stage:
            self.runs[stage, microbatch] = run

    def _backward(self, action: Action) -> Generator[None, None, None]:
        stage, microbatch, clock = action.stage, action.microbatch, self.clock
        start = None if clock is None else clock.mark()
        run = self.runs[stage, microbatch]
        if stage == self.last_stage:
            assert self.job.loss_scales is not None
            if self.scales is None:
                self.scales = self.job.loss_scales()
                start = None if clock is None else clock.add("wait", start)  # for the replicas' weights
            output = self.job.outputs[microbatch]
            roots = [loss_of(output, self.job.step_name)]
            gradients = [torch.full_like(roots[0], self.scales[microbatch])]
            self.job.outputs[microbatch] = tree.map_tensors(Tensor.detach, output)
            if self.scales[microbatch] == 0:
                roots, gradients = [], []
        else:
            assert run.payload is not None
            roots = [t for t in run.payload if t.requires_grad]
            if self._is_here(stage + 1):
                gradients = _input_gradients(self.runs.pop((stage + 1, microbatch)))
            else:
                gradients = yield from self._arrived(Action(Op.RECV_GRADIENT, stage, microbatch))
            if clock is not None:
                start = clock.add("wait_gradient", start, stage, microbatch)
            run.payload = None
        listener = self._listener_of_last(stage) if action.op is Op.BACKWARD else None
        if listener is not None:
            listener.last_backward(stage)
        run.backward = True
        with self.module.running(run), naming_parameters(self.module.module, roots, self._place(action)):
            if action.op is Op.BACKWARD_INPUT:
                parameters = self.module.parameters_of(stage)
                half = self.halves[stage, microbatch] = SplitBackward(roots, gradients, run.received, parameters)
                half.input(self._accumulate)
            elif roots and self.job.meter is not None:
                parameters = self.module.parameters_of(stage)
                self.job.meter.backward(stage, roots, gradients, run.received, parameters, self._accumulate)
            elif roots:
                torch.autograd.backward(roots, gradients)
        if listener is not None:
            listener.backwards_done(stage)
        if clock is not None:
            split = action.op is Op.BACKWARD_INPUT
            clock.add("backward_input" if split else "backward", start, stage, microbatch)
        if stage == 0:
            del self.runs[stage, microbatch]

    def _backward_weight(self, action: Action) -> None:
        start = None if self.clock is None else self.clock.mark()
        half = self.halves.pop((action.stage, action.microbatch))
        listener = self._listener_of_last(action.stage)
        if listener is not None:
            listener.last_backward(action.stage)
        with naming_parameters(self.module.module, half.places, self._place(action)):
            half.weight(self._accumulate)
        if listener is not None:
            listener.backwards_done(action.stage)
        if self.clock is not None:
            self.clock.add("backward_weight", start, action.stage, action.microbatch)

    def _listener_of_last(self, stage: int) -> BackwardListener | None:
        """Counts a backward, a split one when its weights' part begins; the listener if it is the stage's last."""
        self.backwards_left[stage] -= 1
        return None if self.backwards_left[stage] else self.job.listener

    def _place(self, action: Action) -> str:
        return f"{self.job.step_name}, stage {action.stage}, microbatch {action.microbatch}"

    def _accumulate(self, name: str, gradient: Tensor) -> None:
        if self.job.accumulate is not None:
            self.job.accumulate(name, gradient)
            return
        parameter = self.module.module.get_parameter(name)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    @contextlib.contextmanager
    def _watching(self, run: StageRun, microbatch: int) -> Iterator[None]:
        """Around a forward: refuses what a split backward would break or make slow; for a meter, times it."""
        schedule, stage, meter = self.schedule, run.stage, self.job.meter
        training = self.job.loss_scales is not None
        splits = training and schedule.gradient_op(stage) is Op.BACKWARD_INPUT
        if splits:
            check_splittable(stage, schedule.name, run.received)

        def noticed() -> None:
            if splits:
                raise checkpointing_refused(schedule.name, self.module.place_of(run))
            if meter is not None:
                meter.cannot_split(stage)

        with contextlib.ExitStack() as around:
            key = self._spec_key(stage, microbatch)
            if meter is not None:
                around.enter_context(meter.timing_forward(stage))
            if meter is not None or (splits and key not in self.runner.without_checkpoints):
                around.enter_context(noticing_checkpoints(noticed))
                self.runner.without_checkpoints.add(key)
            yield

    # handing over within this rank

    def _is_here(self, stage: int) -> bool:
        return stage in self.module.stages

    def _handed_over(self, stage: int, microbatch: int) -> list[Tensor]:
        """What ``stage`` of this rank gives the next one, which is here, too: leaves of a graph of its own."""
        training = self.job.loss_scales is not None
        run = self.runs[stage, microbatch] if training else self.runs.pop((stage, microbatch))
        assert run.payload is not None
        return [t.detach().requires_grad_(t.requires_grad) for t in run.payload]

    # sending

    def _send_activation(self, action: Action) -> None:
        run = self.runs[action.stage, action.microbatch]
        assert run.payload is not None and self.runner.p2p is not None
        destination = self.schedule.rank_of(action.stage + 1)
        specs = tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in run.payload)
        key = self._spec_key(action.stage + 1, action.microbatch)
        known = self.runner._known_specs.get(key)
        if known is None:
            self.runner.p2p.send_message(destination, TOPIC_SHAPES, specs)
            self.runner._known_specs[key] = specs
        elif known != specs:
            raise UnsupportedModuleError(
                f"stage {action.stage} hands on {_describe(specs)} for a batch whose like gave {_describe(known)} before: "
                f"activations whose shape depends on the values of a batch, or that begin to need gradients for "
                f"reasons other than requires_grad of parameters, cannot be pipelined"
            )
        self.runner.p2p.send(destination, run.payload)
        if self.job.loss_scales is None:
            del self.runs[action.stage, action.microbatch]

    def _send_gradient(self, action: Action) -> None:
        run = self.runs.pop((action.stage, action.microbatch))
        assert self.runner.p2p is not None
        self.runner.p2p.send(self.schedule.rank_of(action.stage - 1), _input_gradients(run))

    # receiving

    def _source(self, action: Action) -> int:
        neighbour = action.stage - 1 if action.op is Op.RECV_ACTIVATION else action.stage + 1
        return self.schedule.rank_of(neighbour)

    def _spec_key(self, stage: int, microbatch: int) -> Hashable:
        return self.job.step_name, self.job.loss_scales is None, stage, self.job.signatures[microbatch]

    def _activation_specs(self, action: Action) -> tuple[TensorSpec, ...] | None:
        return self.runner._known_specs.get(self._spec_key(action.stage, action.microbatch))

    def _specs(self, action: Action) -> tuple[TensorSpec, ...] | None:
        """What will arrive, if that is known yet."""
        if action.op is Op.RECV_ACTIVATION:
            return self._activation_specs(action)
        run = self.runs.get((action.stage, action.microbatch))
        if run is not None and run.payload is not None:
            return tuple(TensorSpec(tuple(t.shape), t.dtype, False) for t in run.payload if t.requires_grad)
        known = self.runner._known_specs.get(self._spec_key(action.stage + 1, action.microbatch))
        return None if known is None else tuple(s for s in known if s.requires_grad)

    def _post_known(self, source: int) -> None:
        assert self.runner.p2p is not None
        queue = self.queues[source]
        while queue:
            specs = self._specs(queue[0])
            if specs is None:
                return
            self.posted[queue.popleft()] = self.runner.p2p.receive(source, specs)

    def _arrived(self, action: Action) -> Generator[None, None, list[Tensor]]:
        """Wait for a receive, posting it and those before it first if their shapes were unknown."""
        p2p = self.runner.p2p
        assert p2p is not None
        source = self._source(action)
        self._post_known(source)
        while action not in self.posted:
            pending = self.queues[source][0]
            assert pending.op is Op.RECV_ACTIVATION, "the gradient of an output that was never computed"
            while not p2p.has_message(source, TOPIC_SHAPES):
                yield
            specs = p2p.receive_message(source, TOPIC_SHAPES)
            self.runner._known_specs[self._spec_key(pending.stage, pending.microbatch)] = specs
            self._post_known(source)
        receive = self.posted.pop(action)
        while not receive.ready():
            yield
        return receive.wait()


def _input_gradients(run: StageRun) -> list[Tensor]:
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in run.received if t.requires_grad]


def loss_of(output: Any, step_name: str) -> Tensor:
    """The loss in the output of a training step: the tensor itself, or a mapping's "loss".

    Raises:
        UnsupportedModuleError: there is none.
    """
    loss = output.get("loss") if isinstance(output, collections.abc.Mapping) else output
    if not isinstance(loss, Tensor):
        raise UnsupportedModuleError(
            f"{step_name} returned {type(output).__name__} without a loss tensor: return the loss, or a dict with "
            f"'loss'; skipping a step by returning None cannot be done by one stage of a pipeline alone"
        )
    return loss


def _describe(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(
        f"{list(s.shape)} {str(s.dtype).removeprefix('torch.')}{' with gradient' if s.requires_grad else ''}"
        for s in specs
    )
