"""Fit: a run that trains: the user's optimizer over this rank's parameters, its gradients, and training steps.

    fit = Fit(trainer, context)                     # every rank must make it
    output = fit.training_step(batch, batch_idx)    # forward and backward
    fit.hand_over()                                 # inside Strategy.backward: sets p.grad for the optimizer

The optimizer's names and shards stay readable after a fit has ended, for Trainer.save_checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from lightning_holmes import checkpoint
from lightning_holmes.comm import dtensor
from lightning_holmes.comm.label import labelled
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import optimizers_to_device, training_arguments
from lightning_holmes.optim.elementwise import coarsest, find_separability
from lightning_holmes.optim.loss_scale import start_loss_scales
from lightning_holmes.optim.remote import RemoteHost
from lightning_holmes.optim.remote_parameters import RemoteParameters
from lightning_holmes.optim.replica_buffers import ReplicaBuffers
from lightning_holmes.optim.shard_states import OwnedStates
from lightning_holmes.optim.sharded_host import ShardedStep
from lightning_holmes.pipeline.batch_dependence import find_batch_dependence
from lightning_holmes.pipeline.preserved_trainer import preserved_trainer
from lightning_holmes.pipeline.request import StepRequest
from lightning_holmes.pipeline.runner import loss_of
from lightning_holmes.pipeline.staged_trial import LaterTrials, StagedTrial
from lightning_holmes.pipeline.whole_steps import refusing_gradients
from lightning_holmes.plan.measured import SUMS
from lightning_holmes.strategy import admission, sharding
from lightning_holmes.strategy.compat.averaging import WeightAverages
from lightning_holmes.strategy.compat.before_backward import UnchangedParameters, held_values
from lightning_holmes.strategy.compat.clipping import clipping
from lightning_holmes.strategy.compat.finetuning import ParameterGroups
from lightning_holmes.strategy.compat.loss_scaling import unscaling_on_nodes, unscaling_parts
from lightning_holmes.strategy.compat.optimizer_states import StateOnNodes
from lightning_holmes.strategy.compat.zero_grad import refusing_kept_gradients
from lightning_holmes.strategy.gradients import (
    Gradients,
    TrainedPart,
    make_gradients,
    make_layered_gradients,
    make_remote_gradients,
)
from lightning_holmes.strategy.run import Run
from lightning_holmes.strategy.run_context import RunContext
from lightning_holmes.strategy.samples import StepSample
from lightning_holmes.strategy.tripwires import Absent, refusing_reads
from lightning_holmes.strategy.user_hooks import takes_part_in_update

_T = TypeVar("_T")


class Fit(Run):
    """A run that trains. All ranks make one, and call its methods together.

    Attributes:
        parameter_groups: the optimizer's parameter groups, by the names of all stages' parameters.
        gradients: handles gradients from the backward to the optimizer's step; exists from the first training batch to the end of the fit.
        has_gradients: whether ``gradients`` exists.
        unchanged: refuses hooks that change parameters between forward and backward; exists from the first training batch on.
        shards: the sharded optimizer, or the one on optimizer nodes; None if every replica has the whole optimizer.
        accumulates: whether more batches come before the optimizer's step.
    """

    has_gradients = False

    def __init__(self, trainer: "pl.Trainer", context: RunContext) -> None:
        self._num_tested = 0  # the optimizer's groups that were tested
        super().__init__(trainer, context)
        context.loaded_state.optimizers = []  # drop those of an earlier run that ended before its first batch
        self.accumulates = False
        self._has_stepped = False  # whether the training step has run for this batch
        groups, source = self.job.groups, self.job.place_of_rank_0[1]
        self._buffers = ReplicaBuffers(groups.data_parallel, groups.replicas_on_host, source=source)
        self._aligns_buffers = self._buffers.has_others
        self._trials = LaterTrials()
        context.undo.enter_context(refusing_gradients(lambda: (self.driver.pipeline, self._whole_driver.pipeline)))
        self.gradients: Gradients
        self.has_gradients = False
        self.shards: OwnedStates | None = None
        if self.options.optimizer_nodes:
            self.job.optimizer_nodes(self.options.optimizer_nodes)  # they start meanwhile
        self._make_optimizers()
        self._averages: WeightAverages | None = None
        self._is_partial = False
        self._runs_ahead = False  # whether the backward has run that Lightning has yet to ask for
        if groups.p2p is not None:
            self._averages = context.undo.enter_context(WeightAverages(trainer, self.pipeline, groups.p2p))
        self._begin(self.parameter_groups)

    def _make_optimizers(self) -> None:
        """Make the user's optimizers, over the whole module or over the parameters that this rank holds."""
        trainer, connection, strategy = self.trainer, self.job.connection, self.trainer.strategy
        place, waiting = f"{type(self.module).__name__}.configure_optimizers", self.context.builder.waiting
        with refusing_reads(self.pipeline, waiting, place) if waiting else nullcontext():
            strategy.setup_optimizers(trainer)
        optimizers = strategy.optimizers
        admission.check_optimizers(optimizers)
        names = [checkpoint.parameter_group_names(self.pipeline, o) for o in optimizers]
        self._test_optimizer(optimizers)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self.parameter_groups = self.context.undo.enter_context(
            ParameterGroups(self.pipeline, optimizers, names, callbacks, connection.all_gather)
        )
        strategy.setup_precision_plugin()
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        if scaler is not None and dtensor.has_dtensor_parameters(self.module):
            self.context.undo.enter_context(unscaling_parts(scaler))
        optimizers_to_device(optimizers, connection.device)

    def _test_optimizer(self, optimizers: Sequence[Optimizer]) -> None:
        """Test how the optimizer can be sharded, if that is needed; test again if groups were added before the first batch."""
        placement, connection = self.job.placement, self.job.connection
        wanted = sharding.wants_shards(self.options, placement.data_parallel_size)
        if not optimizers or not (wanted or sharding.may_couple(optimizers[0], placement.pipeline_parallel_size)):
            return
        num_groups = len(optimizers[0].param_groups)
        if num_groups > self._num_tested:
            self._num_tested = num_groups
            self._found = coarsest(connection.all_gather(find_separability(optimizers[0], connection.device)))
            sharding.refuse_coupling(self._found, placement.pipeline_parallel_size)

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Called after the hooks before a training batch: at the first batch, trace the step and make the plan."""
        self._has_stepped = False
        if self.has_gradients:
            return
        arguments = training_arguments(self.trainer, batch, batch_idx)
        with self.job.explaining():
            self._test_optimizer(self.trainer.strategy.optimizers)
            self._make_plan([StepSample(step_name="training_step", batch=batch, arguments=arguments)])
            with self._learning():
                self._take_part()

    def _take_part(self) -> None:
        """Reduce module and optimizer to this rank's part, and set up gradients."""
        options, undo, strategy = self.options, self.context.undo, self.trainer.strategy
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        self._install()
        self.parameter_groups.keep_local()
        undo.callback(self._give_back_groups)
        part = self.part()
        if options.optimizer_nodes:
            with_states = self.context.loaded_state.names_of_states(self.parameter_groups.names_of)
            self.gradients = make_remote_gradients(part, fill=self._fill_nodes, with_states=with_states)
        elif self.plan.sharding == "parameters":
            self.gradients, self.stage_shards = make_layered_gradients(part, self.stage_shards)
        else:
            self.gradients = make_gradients(part)
        self.has_gradients = True
        self.exchange, self.shards = self.gradients.reducer, self.gradients.host.shards
        if isinstance(self.shards, RemoteHost):
            self.shards.optimizer.state = StateOnNodes(self.shards.optimizer)  # type: ignore[assignment]
        undo.callback(self._close_gradients)
        if scaler is not None and isinstance(self.gradients.host, RemoteHost):
            undo.enter_context(unscaling_on_nodes(scaler, self.gradients.host.unscale, self.job.connection.device))
        undo.enter_context(clipping(strategy.precision_plugin, self.gradients.host, self.lifted))
        here = self.stage_shards is None and not options.optimizer_nodes
        undo.enter_context(refusing_kept_gradients(self.module, here, self.lifted))
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        self.unchanged = UnchangedParameters(
            self.module, callbacks, lambda: held_values(self.pipeline, self.stage_shards)
        )
        self.context.loaded_state.put_optimizers(self.load_optimizer, self.parameter_groups.names_of)

    def part(self) -> TrainedPart:
        if self._found is None:
            return super().part()
        (optimizer,) = self.trainer.strategy.optimizers
        local, names = self.pipeline.local_parameters, self.parameter_groups.names_of(optimizer)
        step = ShardedStep(
            optimizer=optimizer,
            names=[[name for name in of_group if name in local] for of_group in names],
            found=self._found,
            master_weights=sharding.keeps_masters(self.options, self.module),
        )
        return replace(super().part(), step=step)

    def _waits_for_nodes(self, training: StepSample | None) -> bool:
        is_new = self.context.builder.waits and self.context.module_shards.of(self.module) is None
        return self.options.optimizer_nodes > 0 and training is not None and is_new

    def absent(self) -> Absent:
        hidden = sharding.hidden_in_hooks(
            self.shards,
            shards_parameters=self.stage_shards is not None,
            optimizer_nodes=self.options.optimizer_nodes if self.has_gradients else 0,
            is_partial=self._is_partial,
            runs_ahead=self._runs_ahead,
        )
        is_part = self.shards is not None or self.job.placement.pipeline_parallel_size > 1
        return replace(super().absent(), hidden=hidden, splits_states=self.has_gradients and is_part)

    def _close_gradients(self) -> None:
        if self.job.connection.failed:
            self.abandon()
            self._tell_lost_values()
        elif self._averages is not None:
            self._averages.close()
        self.gradients.close()
        self.exchange, self.has_gradients = None, False
        shards = self.stage_shards
        if shards is not None and not shards.stays:
            if self.context.module_shards.of(self.module) is shards:  # on optimizer nodes, and the run has failed
                self.context.module_shards.take(self.module)
            self.stage_shards = None
        del self.gradients  # and the buffers

    def _give_back_groups(self) -> None:
        self.parameter_groups.give_back(in_shards=self.shards is not None and not isinstance(self.shards, RemoteHost))

    def _tell_lost_values(self) -> None:
        """After a failure, note that the module has lost values if its parameters were sharded over replicas, or on optimizer nodes for
        several workers."""
        shards = self.stage_shards
        if isinstance(shards, RemoteParameters):
            if shards.num_replicas > 1:
                admission.note_lost(self.module, "optimizer nodes held the parameters, for several workers")
        elif shards is not None and shards.size > 1 and not shards.stays:
            admission.note_lost(self.module, f"each of {shards.size} replicas held a share of the parameters")

    def _fill_nodes(self, remote: RemoteParameters) -> None:
        """Send the module's values to the optimizer nodes; if it was built without memory, only the nodes have all of it from then on."""
        context = self.context
        former = context.module_shards.take(self.module)
        if context.builder.waits:
            context.fill_shards(remote, self.pipeline)
        else:
            remote.lay_out(by_elements=True, former=former)
            if former is not None:
                context.module_shards.keep(remote, self.module)
        self.stage_shards = remote

    def abandon(self) -> None:
        """Stop waiting for other ranks, after the run has failed."""
        if self.has_gradients:
            self.gradients.host.abandon()

    def load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Load this rank's part of a saved state into one of the optimizers; all ranks must call."""
        names = self.parameter_groups.names_of(optimizer)
        with self.job.explaining():
            checkpoint.load_optimizer_state(optimizer, saved, names, self.pipeline.local_parameters, self.shards)
        if isinstance(self.shards, RemoteHost):
            optimizer.state = StateOnNodes(optimizer)  # type: ignore[assignment]
        optimizers_to_device([optimizer], self.job.connection.device)

    # steps

    def training_step(self, batch: Any, *arguments: Any) -> Any:
        """Run the whole batch, forward and backward, through the pipeline, and return its output, on every rank. Gradients are kept until
        :meth:`hand_over`.

        Raises:
            UnsupportedModuleError: the optimizer evaluates its closure more than once for a batch.
        """
        sample = StepSample(step_name="training_step", batch=batch, arguments=arguments)
        with self.job.explaining(self.job.groups.data_parallel):
            self._begin_step(sample)
            request = replace(
                self.request(sample, self.plan.num_microbatches, self._place), loss_scales=self._start_loss_scales
            )
            output = self.step(request)
            # DDP broadcasts buffers before the steps that follow one that has reduced gradients
            self._aligns_buffers = self._buffers.has_others and not self.accumulates
            self.gradients.reducer.end()
            if output is None:  # Lightning calls no backward; the optimizer still gets the gradients of earlier batches
                self.hand_over(skipped=True)
                self.absorb()
            if self.job.connection.world_size > 1:
                loss_of(output, "training_step")
            self.unchanged.note()
            return output

    @property
    def _place(self) -> tuple[int, int]:
        """The place of the present training batch among all batches."""
        return 0, self.trainer.fit_loop.epoch_loop.total_batch_idx

    def _begin_step(self, sample: StepSample) -> None:
        """Prepare optimizers and gradients for the next batch."""
        trainer = self.trainer
        if self._has_stepped:
            raise UnsupportedModuleError(
                f"{type(trainer.optimizers[0]).__name__} evaluates its closure more than once for a batch, or optimizer_step "
                f"does: the stages of a pipeline, which know their own gradients only, would part ways; use an optimizer "
                f"that steps once a batch"
            )
        self._has_stepped = True
        if self._lockstep is not None:
            self._lockstep.begin_step()
        may_split, flags = self.plan.num_microbatches > 1 and not self.known.dependence, self.driver.pipeline.flags
        if may_split and self._trials.are_due(trainer, flags):
            self._ask_again(sample)
        in_window = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches > 0
        for optimizer in trainer.strategy.optimizers:
            self.parameter_groups.take_added(optimizer, in_window=in_window)
        if not in_window:
            self.gradients.reducer.forget()
        self.gradients.reducer.begin(last=not self.accumulates)
        self._runs_ahead = True

    def _ask_again(self, sample: StepSample) -> None:
        """Ask on the module's present state whether this batch may be split; if not, it and all later ones run whole, or, with a number that
        the user has set, a warning says why. All ranks must call."""
        self.gradients.host.settle()
        merges = dict(self.known.merges.get("training_step", {}))
        request = self.request(sample, self.plan.num_microbatches, self._place)
        batch = self.driver.agree(request) if request.broadcasts else sample.batch
        with self._learning(), self._counting_replicas(), preserved_trainer(self.trainer):
            tried = find_batch_dependence(
                self.module,
                "training_step",
                batch,
                sample.arguments,
                self.context.splitter,
                trial=StagedTrial(self.driver, request, self.job.groups.replicas_on_host),
                known=merges,
                samples=self.known.samples,
            )
        found = tried.dependence
        mine = ("", "") if found is None else (found.reason, found.cause)
        answers = self.job.connection.all_gather((mine, tried.merges))
        reason, cause = next((each for each, _ in answers if any(each)), ("", ""))
        for _, others in answers:
            merges |= others
        self.known = replace(self.known, merges={**self.known.merges, "training_step": merges}, dependence=cause)
        if not reason:
            return
        if self.options.asked.num_microbatches != "auto":
            pl.utilities.rank_zero_warn(reason)
            return
        note = f"num_microbatches: 1 from step {self.trainer.global_step} on, as in plain Lightning: {cause}"
        self.planned = replace(self.plan, num_microbatches=1, notes=(*self.plan.notes, note))
        pl.utilities.rank_zero_warn(f"{note}; give a number to split batches all the same")

    def request(self, sample: StepSample, num_microbatches: int, place: tuple[int, ...]) -> StepRequest:
        if self._aligns_buffers:
            self._aligns_buffers = False
            self.receive_module_state()
            self._buffers.align(self._state.buffers().values())
        return super().request(sample, num_microbatches, place)

    def _receives_later(self, step_name: str) -> bool:
        if step_name != "training_step" or self.accumulates:  # else the optimizer's step comes first
            return False
        return not takes_part_in_update(self.module, self.trainer.strategy.optimizers)

    def _start_loss_scales(self, weights: Sequence[float]) -> Callable[[], Sequence[float | Tensor]]:
        return start_loss_scales(
            weights,
            self.job.groups.replicas_on_host,
            accumulated=self.trainer.accumulate_grad_batches,
            factor=self.gradients.host.loss_factor,
        )

    def evaluation_step(self, step_name: str, batch: Any, *arguments: Any) -> Any:
        if self.has_gradients:  # some torch modules evaluate on another code path while parameters are watched
            self.gradients.host.settle()
        return super().evaluation_step(step_name, batch, *arguments)

    def hand_over(self, *, skipped: bool = False) -> None:
        """Set ``p.grad`` to the gradients that the pipeline has accumulated, reduced unless more batches are to come; ``skipped``: this batch
        had no backward."""
        self._is_partial, self._runs_ahead = self.accumulates and self.gradients.are_sums, False
        with self.job.explaining(self.job.groups.data_parallel):
            with labelled(lambda: f"holmes: wait for {SUMS}"):
                self.gradients.reducer.finish(last=not self.accumulates)
            with labelled(lambda: "holmes: give gradients to the optimizer"):
                self.gradients.host.take_gradients(last=not self.accumulates, skipped=skipped)

    def absorb(self) -> None:
        """Take over changes that hooks after the backward have made to ``p.grad``."""
        if not self.accumulates:
            self.gradients.host.absorb()
