"""The runner: executes a schedule's actions on one rank, for training and evaluation alike.

It works with any schedule. Receives are posted where the schedule says; sends are waited for at the end of the batch
only. When a batch of a new signature first passes, the shapes are sent once, ahead of its tensors.

[Note: posting] CUDA may wait for the whole device when a kernel is loaded, or memory is allocated or freed, and so for the peer of a posted receive,
which may wait for this rank. Therefore receives are posted ahead, as the schedule says, only after a batch of the same step in which CUDA has
allocated and freed nothing. In the first batches, and on a card that is so full that each batch frees cached memory, a receive is posted when its
tensors are needed; its memory is allocated ahead all the same, so that nothing is allocated between a send and the receive after it. So no rank
waits for ever under gpipe, 1f1b, eager_1f1b and zero_bubble, even where each allocation waits (tests/plan/test_schedule.py). In the other schedules
stages send long before the receiver computes; there two cards that free memory at the same moment may wait for each other.

    batch = Batch(runner, request, parts, schedule, ...)
    runner.run(batch)
    batch.outputs           # on the last stage
"""

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.label import labelled
from lightning_holmes.comm.p2p import P2P, PendingReceive, TensorSpec
from lightning_holmes.comm.parameter_exchange import LocalExchange
from lightning_holmes.comm.queue import Work
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import microbatches_argument, signature
from lightning_holmes.pipeline.device_calls import DeviceCalls, device_calls
from lightning_holmes.pipeline.divisors import Divisors
from lightning_holmes.pipeline.preserved_trainer import change_settings, changed_settings
from lightning_holmes.pipeline.replay import LogRecorder
from lightning_holmes.pipeline.request import StepRequest
from lightning_holmes.pipeline.seeds import seed_all
from lightning_holmes.pipeline.split_backward import SplitBackward, check_splittable, checkpointing_refused
from lightning_holmes.pipeline.stage import PipelineModule, StageRun
from lightning_holmes.plan.schedule import Action, Op, Schedule, mark_action
from lightning_holmes.torch_private import noticing_checkpoints

TOPIC_SHAPES = 1


class PipelineRunner:
    """Runs batches on the stages of ``pipeline`` that this rank holds, and keeps what is known from one batch to the next.

    Args:
        p2p: transport to the ranks of the other stages; None if there are none.
    """

    def __init__(self, pipeline: PipelineModule, p2p: P2P | None) -> None:
        self.pipeline = pipeline
        self.p2p = p2p
        module = pipeline.module
        assert isinstance(module, pl.LightningModule)
        self.module = module
        self.recorder = LogRecorder(pipeline)
        self.current_action: Action | None = None
        """The action that is performed now, or that has raised; None between steps."""
        self.known_specs: dict[Hashable, tuple[TensorSpec, ...]] = {}
        # by step, as name and whether it trains: whether its last batch has neither allocated nor freed memory of the device
        self.steady: dict[tuple[str, bool], bool] = {}
        self._has_warned = False
        self.without_checkpoints: set[Hashable] = set()

    def run(self, batch: "Batch") -> None:
        """Perform every action of this rank's schedule. All ranks of the pipeline must call."""
        request, before = batch.request, device_calls()
        actions = batch.schedule.actions[0 if self.p2p is None else self.p2p.rank]
        with self.pipeline.stepping(), self.recorder.recording():
            for place, action in enumerate(actions):
                self.current_action = action
                try:
                    with labelled(functools.partial(self._label, action)):
                        _PERFORM[action.op](batch, action)
                except Exception as error:
                    error.add_note(self._describe_failure(actions, place))
                    raise
        if self.p2p is not None:
            with labelled(lambda: "holmes: wait for what was sent to arrive"):
                self.p2p.finish()
        self.current_action = None
        self._note_memory((request.step_name, request.trains), before)

    def _note_memory(self, step: tuple[str, bool], before: DeviceCalls) -> None:
        """Note what a batch of ``step`` has done since the calls ``before`` it; see [Note: posting]."""
        now = device_calls()
        if now.flushes > before.flushes and step in self.steady and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the GPU is so full that a batch of {step[0]} has freed all cached memory {now.flushes - before.flushes} times, for which it waits "
                f"for the device and for other stages: use smaller microbatches, activation checkpointing, or the environment variable "
                f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                stacklevel=2,
            )
        self.steady[step] = now == before

    def _label(self, action: Action) -> str:
        return f"holmes: {action.describe()} ({self.pipeline.describe_stage(action.stage)})"

    def _describe_failure(self, actions: Sequence[Action], place: int) -> str:
        rank = "" if self.p2p is None else f" of pipeline rank {self.p2p.rank}"
        return f"It failed in the step's schedule{rank}, in the {actions[place].describe()}:\n{mark_action(actions, place)}"


class Batch:
    """One batch, split into microbatches, on its way through this rank.

    Args:
        parts: the microbatches.
        seeds: of the random numbers of each.
        scales: on the last stage, called at the first backward; returns the factor of each microbatch's loss.
        settings: what holds on the trainer before each microbatch (preserved_trainer.py); None: it is not set again.
        fixed: the settings that a step may not change (StepRequest.fixes_options); None: it may.
        divisors: takes those of the losses; None: they are not looked at.
        after_forwards: called when this rank has run its last forward, while backwards go on.

    Attributes:
        outputs: of the step for each microbatch, on the rank of the last stage.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        request: StepRequest,
        parts: Sequence[Any],
        schedule: Schedule,
        *,
        seeds: Sequence[int],
        scales: Callable[[], Sequence[float | Tensor]] | None,
        settings: list[dict[str, Any]] | None,
        fixed: list[dict[str, Any]] | None = None,
        divisors: Divisors | None,
        after_forwards: Callable[[], None],
    ) -> None:
        self.runner, self.pipeline = runner, runner.pipeline
        self.request, self.schedule = request, schedule
        self.parts, self.seeds = parts, seeds
        self.settings, self.fixed, self.divisors, self.after_forwards = settings, fixed, divisors, after_forwards
        self.outputs: list[Any] = [None] * len(parts)
        self.step = getattr(runner.module, request.step_name)
        self.exchange = request.exchange or LocalExchange(runner.module)
        self.last_stage = schedule.num_stages - 1
        # by microbatch, what decides the shapes of activations and whether they need gradients
        state = runner.module.training, bytes([p.requires_grad for p in runner.module.parameters()])
        self.signatures = [(state, signature(part)) for part in parts]
        self.runs: dict[tuple[int, int], StageRun] = {}
        # by microbatch, outputs of layers that later stages of this rank read in addition to the hidden state, and the sums of their gradients
        self.kept: dict[int, dict[tuple[int, int], Tensor]] = collections.defaultdict(dict)
        self.kept_gradients: dict[int, dict[tuple[int, int], Tensor]] = collections.defaultdict(dict)
        self.halves: dict[tuple[int, int], SplitBackward] = {}  # split backwards whose weight part has not run yet
        # receives from each source, in the order of its sends, that cannot be posted yet since their shapes are unknown
        self.queues: dict[int, collections.deque[Action]] = collections.defaultdict(collections.deque)
        self.posted: dict[Action, PendingReceive] = {}
        self.prepared: dict[Action, PendingReceive] = {}
        self.posts_ahead = runner.steady.get((request.step_name, request.trains), False)
        self.fetches: dict[int, Work] = {}
        self.start_scales = scales
        self.scales: Sequence[float | Tensor] | None = None
        self.forwards_left = len(self.pipeline.stages) * len(parts)
        self.backwards_left = dict.fromkeys(self.pipeline.stages, len(parts))

    # parameters and gradients

    def _fetch(self, action: Action) -> None:
        work = self.exchange.unshard(action.stage)
        if work is not None:
            self.fetches[action.stage] = work

    def _await_parameters(self, stage: int) -> None:
        """Wait for the parameters of ``stage``, if a fetch of them has been started."""
        work = self.fetches.pop(stage, None)
        if work is not None:
            with labelled(lambda: "holmes: wait for parameters"):
                work.wait()

    def _reshard(self, action: Action) -> None:
        self.exchange.reshard(action.stage)

    def _reduce(self, action: Action) -> None:
        self.exchange.reduce(action.stage)

    # computing

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        self._await_parameters(stage)
        run = StageRun(stage=stage, step_name=self.request.step_name, seed=self.seeds[microbatch])
        if stage > 0 and self._is_here(stage - 1):
            run.received = self._handed_over(stage - 1, microbatch)
        elif stage > 0:
            arrival = Action(Op.RECV_ACTIVATION, stage, microbatch)
            tensors = self._arrived(arrival)
            for tensor, spec in zip(tensors, self._activation_specs(arrival) or (), strict=True):
                run.received.append(tensor.requires_grad_() if spec.requires_grad else tensor)
        kept = self.kept[microbatch]
        run.beside = {key: _leaf(kept[key]) for key in self.pipeline.reads_beside.get(stage, ()) if key in kept}
        with self._checking_split(run, microbatch), self._around_step(run, microbatch) as part:
            output = self.pipeline.forward_step(run, self.step, part, *self.request.arguments)
            if stage == self.last_stage:
                self.outputs[microbatch] = self._taken(output, microbatch)
        kept |= run.kept
        if stage == self.last_stage:
            kept.clear()
        if self.request.trains or stage < self.last_stage:
            self.runs[stage, microbatch] = run
        self.forwards_left -= 1
        if self.forwards_left == 0:
            self.after_forwards()

    @contextlib.contextmanager
    def _around_step(self, run: StageRun, microbatch: int) -> Iterator[Any]:
        """Context of the user's step: its random numbers, its logs, its precision; yields its microbatch."""
        seed_all(run.seed, self.pipeline.device)
        self.runner.recorder.enter(run, microbatch)
        part = self.parts[microbatch]
        if self.settings is not None:  # a step that lowers a learning rate does so once a batch
            change_settings(trainer_of(self.runner.module), self.pipeline.flags, [{}, *self.settings[1:]])
        if run.stage != self.pipeline.stages[-1]:  # a step may change its batch, and each stage starts the step anew
            part = tree.map_all_tensors(Tensor.clone, part)
        elif len(self.parts) > 1:  # views of one tensor share a version: autograd would refuse another part's changes
            part = tree.map_all_tensors(lambda tensor: tensor.data, part)
        with self.request.context():
            try:
                yield part
            except Exception as error:
                if len(self.parts) > 1:
                    error.add_note(
                        f"{run.step_name} ran over microbatch {microbatch} of {len(self.parts)}: with "
                        f"{microbatches_argument(run.step_name)}=1 it runs over the whole batch, as in plain Lightning"
                    )
                raise

    def _refuse_changed_options(self) -> None:
        """Refuse a step that has changed options that are ``fixed``, before its backward."""
        changed = self.fixed and changed_settings(trainer_of(self.runner.module), self.pipeline.flags, self.fixed)
        found = [key for values in (changed or [])[2:] for key in values]
        if found:
            raise UnsupportedModuleError(
                f"{self.request.step_name} of {type(self.runner.module).__name__} changes {found[0]} of the optimizer, while optimizer nodes "
                f"update a layer with the options of the batch's beginning as soon as its last gradient has come: change options in "
                f"on_train_batch_start or before, or override on_before_optimizer_step, after which nodes wait for the step"
            )

    def _taken(self, output: Any, microbatch: int) -> Any:
        """The output of a step over a microbatch, without DTensors; its divisors are noted."""
        self._refuse_changed_options()
        if self.divisors is not None and output is not None:
            self.divisors.note(microbatch, loss_of(output, self.request.step_name))
        if any(map(dtensor.is_dtensor, tree.tensors_of(output))):
            return tree.map_tensors(dtensor.whole, output)
        return output

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        self._await_parameters(stage)
        run = self.runs[stage, microbatch]
        if stage == self.last_stage:
            if self.scales is None:
                assert self.start_scales is not None, "only the last stage has losses"
                with labelled(lambda: "holmes: wait for the replicas' weights"):
                    self.scales = self.start_scales()
            outputs = self.outputs
            roots, gradients = [], []
            if not self._skips():
                roots = [loss_of(outputs[microbatch], self.request.step_name)]
                gradients = [_filled_with(self.scales[microbatch], roots[0])]
                outputs[microbatch] = tree.map_tensors(Tensor.detach, outputs[microbatch])
                if isinstance(self.scales[microbatch], float) and self.scales[microbatch] == 0:
                    roots, gradients = [], []
                elif not roots[0].requires_grad:
                    raise UnsupportedModuleError(
                        f"the loss that {self.request.step_name} returned needs no gradient: all parameters that it depends "
                        f"on are frozen (requires_grad=False), or it was detached"
                    )
        else:
            assert run.payload is not None
            roots = [t for t in run.payload if t.requires_grad]
            if self._is_here(stage + 1):
                gradients = _input_gradients(self.runs.pop((stage + 1, microbatch)))
            else:
                gradients = self._arrived(Action(Op.RECV_GRADIENT, stage, microbatch))
            run.payload = None
            if self._skips():
                roots, gradients = [], []
        splits = action.op is Op.BACKWARD_INPUT
        if not splits:
            self._count_backward(stage)
        if not self._skips():
            roots, gradients = self._with_kept(run, microbatch, roots, gradients)
        run.backward = True
        parameters = self.pipeline.parameters_of(stage)
        with self.pipeline.running(run):
            if splits:
                names = self.pipeline.names
                half = self.halves[stage, microbatch] = SplitBackward(roots, gradients, run.received, parameters, names)
                half.input(self.exchange.add)
            elif roots:
                torch.autograd.backward(roots, gradients)
        for key, value in run.beside.items():
            if value.grad is not None:
                sums = self.kept_gradients[microbatch]
                sums[key] = sums[key] + value.grad if key in sums else value.grad
        run.beside.clear()
        if not splits:
            self._end_backward(stage)
        if stage == 0:
            del self.runs[stage, microbatch]

    def _with_kept(
        self, run: StageRun, microbatch: int, roots: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Add to the roots and gradients of a backward those of the outputs that later stages have read in addition
        to the hidden state."""
        sums, kept = self.kept_gradients[microbatch], run.kept
        found = [key for key in kept if key in sums]
        run.kept = {}
        return [*roots, *(kept[key] for key in found)], [*gradients, *(sums.pop(key) for key in found)]

    def _skips(self) -> bool:
        """Whether the step has returned None for the whole batch; only valid once all forwards of the batch have run."""
        return self.request.may_skip and all(output is None for output in self.outputs)

    def _backward_weight(self, action: Action) -> None:
        half = self.halves.pop((action.stage, action.microbatch))
        self._count_backward(action.stage)
        half.weight(self.exchange.add)
        self._end_backward(action.stage)

    def _count_backward(self, stage: int) -> None:
        """Tell the exchange that a backward of ``stage`` begins (of a split one, the weight part), and whether it is
        the stage's first or last."""
        left = self.backwards_left[stage] = self.backwards_left[stage] - 1
        self.exchange.backward(stage, first=left == self.schedule.num_microbatches - 1, last=left == 0)

    def _end_backward(self, stage: int) -> None:
        if self.backwards_left[stage] == 0:
            self.exchange.backward_ended(stage)

    @contextlib.contextmanager
    def _checking_split(self, run: StageRun, microbatch: int) -> Iterator[None]:
        """Context around a forward: refuses what a split backward would break or make slow."""
        schedule, stage = self.schedule, run.stage
        if not self.request.trains or schedule.gradient_op(stage) is not Op.BACKWARD_INPUT:
            yield
            return
        check_splittable(stage, schedule.name, run.received)

        def noticed() -> None:
            raise checkpointing_refused(schedule.name, self.pipeline.place_of(run))

        key = self._spec_key(stage, microbatch)
        known = key in self.runner.without_checkpoints
        with contextlib.nullcontext() if known else noticing_checkpoints(noticed):
            yield
        self.runner.without_checkpoints.add(key)

    # handing over within this rank

    def _is_here(self, stage: int) -> bool:
        return stage in self.pipeline.stages

    def _handed_over(self, stage: int, microbatch: int) -> list[Tensor]:
        """The inputs for the stage after ``stage``, which is on this rank, too: leaves of a new autograd graph."""
        run = self.runs[stage, microbatch] if self.request.trains else self.runs.pop((stage, microbatch))
        assert run.payload is not None
        return [_leaf(t) for t in run.payload]

    # sending

    def _send_activation(self, action: Action) -> None:
        run = self.runs[action.stage, action.microbatch]
        assert run.payload is not None and self.runner.p2p is not None
        destination = self.schedule.rank_of(action.stage + 1)
        specs = tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in run.payload)
        key = self._spec_key(action.stage + 1, action.microbatch)
        known = self.runner.known_specs.get(key)
        if known is None:
            self.runner.p2p.send_message(destination, TOPIC_SHAPES, specs)
            self.runner.known_specs[key] = specs
        elif known != specs:
            raise UnsupportedModuleError(
                f"stage {action.stage} sends {_describe(specs)} to the next stage, but {_describe(known)} for an earlier batch of the same "
                f"shapes: in a pipeline these may depend on the shapes of a batch and on requires_grad of parameters only. Pad to one "
                f"length, or use pipeline_parallel_size=1"
            )
        self.runner.p2p.send(destination, run.payload)
        if not self.request.trains:
            del self.runs[action.stage, action.microbatch]

    def _send_gradient(self, action: Action) -> None:
        run = self.runs.pop((action.stage, action.microbatch))
        assert self.runner.p2p is not None
        self.runner.p2p.send(self.schedule.rank_of(action.stage - 1), _input_gradients(run))

    # receiving

    def _receive(self, action: Action) -> None:
        source = self._source(action)
        self.queues[source].append(action)
        if self.posts_ahead:
            self._post_known(source)
        else:
            self._prepare_known(source)

    def _source(self, action: Action) -> int:
        neighbour = action.stage - 1 if action.op is Op.RECV_ACTIVATION else action.stage + 1
        return self.schedule.rank_of(neighbour)

    def _spec_key(self, stage: int, microbatch: int) -> Hashable:
        return self.request.step_name, self.request.trains, stage, self.signatures[microbatch]

    def _activation_specs(self, action: Action) -> tuple[TensorSpec, ...] | None:
        return self.runner.known_specs.get(self._spec_key(action.stage, action.microbatch))

    def _specs(self, action: Action) -> tuple[TensorSpec, ...] | None:
        """The specs of the tensors that ``action`` receives; None if they are not known yet."""
        if action.op is Op.RECV_ACTIVATION:
            return self._activation_specs(action)
        run = self.runs.get((action.stage, action.microbatch))
        if run is not None and run.payload is not None:
            return tuple(TensorSpec(tuple(t.shape), t.dtype, False) for t in run.payload if t.requires_grad)
        known = self.runner.known_specs.get(self._spec_key(action.stage + 1, action.microbatch))
        return None if known is None else tuple(s for s in known if s.requires_grad)

    def _prepare_known(self, source: int) -> None:
        """Allocate memory for the receives from ``source`` whose shapes are known."""
        assert self.runner.p2p is not None
        for action in self.queues[source]:
            specs = self._specs(action)
            if specs is not None and action not in self.prepared:
                self.prepared[action] = self.runner.p2p.prepare(source, specs)

    def _post_known(self, source: int, until: Action | None = None) -> None:
        """Post the receives from ``source`` whose shapes are known, in order; ``until``: none after this one."""
        assert self.runner.p2p is not None
        queue = self.queues[source]
        while queue and until not in self.posted:
            specs = self._specs(queue[0])
            if specs is None:
                return
            receive = self.prepared.pop(queue[0], None) or self.runner.p2p.prepare(source, specs)
            receive.post()
            self.posted[queue.popleft()] = receive

    def _arrived(self, action: Action) -> list[Tensor]:
        """Wait for a receive. If the shapes were unknown, first post it and the receives before it."""
        with labelled(lambda: "holmes: wait for tensors of another stage"):
            return self._received(action)

    def _received(self, action: Action) -> list[Tensor]:
        p2p = self.runner.p2p
        assert p2p is not None
        source = self._source(action)
        until = None if self.posts_ahead else action
        self._post_known(source, until)
        while action not in self.posted:
            pending = self.queues[source][0]
            assert pending.op is Op.RECV_ACTIVATION, "the gradient of an output that was never computed"
            specs = p2p.receive_message(source, TOPIC_SHAPES)
            self.runner.known_specs[self._spec_key(pending.stage, pending.microbatch)] = specs
            self._post_known(source, until)
        return self.posted.pop(action).wait()


_PERFORM: Mapping[Op, Callable[[Batch, Action], None]] = {
    Op.FETCH: Batch._fetch,
    Op.RECV_ACTIVATION: Batch._receive,
    Op.FORWARD: Batch._forward,
    Op.SEND_ACTIVATION: Batch._send_activation,
    Op.RECV_GRADIENT: Batch._receive,
    Op.BACKWARD: Batch._backward,
    Op.BACKWARD_INPUT: Batch._backward,
    Op.BACKWARD_WEIGHT: Batch._backward_weight,
    Op.SEND_GRADIENT: Batch._send_gradient,
    Op.REDUCE_GRADIENTS: Batch._reduce,
    Op.RELEASE: Batch._reshard,
}


def _leaf(tensor: Tensor) -> Tensor:
    """A leaf of a new autograd graph with the values of ``tensor``."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _input_gradients(run: StageRun) -> list[Tensor]:
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in run.received if t.requires_grad]


def _filled_with(scale: float | Tensor, like: Tensor) -> Tensor:
    """A tensor like ``like``, filled with ``scale``; a ``scale`` that is a tensor is not synchronised with the host."""
    if isinstance(scale, Tensor):
        return scale.to(like.device, like.dtype).expand_as(like)
    return torch.full_like(like, scale)


def loss_of(output: Any, step_name: str) -> Tensor:
    """The loss in the output of a training step: the tensor itself, or a mapping's "loss".

    Raises:
        UnsupportedModuleError: the output has no loss tensor, or the loss is not a single number.
    """
    loss = output.get("loss") if isinstance(output, collections.abc.Mapping) else output
    if not isinstance(loss, Tensor):
        raise UnsupportedModuleError(
            f"{step_name} returned {type(output).__name__} without a loss tensor: return the loss, or a dict with "
            f"'loss'; None skips a batch on one process only, and from all of its microbatches"
        )
    if loss.numel() != 1:
        raise UnsupportedModuleError(
            f"{step_name} returned a loss of shape {tuple(loss.shape)}: a loss is one number, say its mean()"
        )
    return loss


def _describe(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(
        f"{list(s.shape)} {str(s.dtype).removeprefix('torch.')}{' with gradient' if s.requires_grad else ''}"
        for s in specs
    )
