"""Fit: a run that trains: the user's optimizer over what this rank holds, its gradients, and training steps.

    fit = Fit(trainer, context)                     # every rank must make it
    output = fit.training_step(batch, batch_idx)    # forward and backward
    fit.hand_over()                                 # inside Strategy.backward: p.grad is what the optimizer shall see

An ended fit still knows its optimizer's names and shards, for Trainer.save_checkpoint.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelSummary
from torch.optim import Optimizer

from lightning_holmes import checkpoint
from lightning_holmes.comm import dtensor
from lightning_holmes.comm.sync_board import SyncBoard
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_private import SUMMARY, optimizers_to_device, prints_summary
from lightning_holmes.optim.elementwise import Separability
from lightning_holmes.optim.reducer import GradientReducer
from lightning_holmes.optim.sharded import ShardedOptimizer
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.pipeline.observer import UNOBSERVED, StepObserver
from lightning_holmes.pipeline.runner import loss_of
from lightning_holmes.pipeline.step_clock import StepClock
from lightning_holmes.strategy import admission, sharding
from lightning_holmes.strategy.compat.averaging import WeightAverages
from lightning_holmes.strategy.compat.clipping import clipping
from lightning_holmes.strategy.compat.finetuning import ParameterGroups
from lightning_holmes.strategy.compat.grad_norm import GradNormExchange
from lightning_holmes.strategy.compat.loss_scaling import unscaling_parts
from lightning_holmes.strategy.gradients import Gradients, make_gradients, make_layered_gradients
from lightning_holmes.strategy.parameter_sharding import check_parameter_sharding
from lightning_holmes.strategy.planning import RunContext
from lightning_holmes.strategy.run import Run
from lightning_holmes.strategy.split_trial import SplitTrial
from lightning_holmes.torch_private import default_store


class Fit(Run):
    """A run that trains. All ranks make one, and call its methods together.

    Attributes:
        parameter_groups: the optimizer's, by the names of all stages' parameters.
        gradients: from backward to the optimizer's step; gone when the fit has ended.
        shards: the sharded optimizer, or None.
        accumulates: more batches come before the optimizer's step.
    """

    def __init__(self, trainer: "pl.Trainer", context: RunContext) -> None:
        super().__init__(trainer, context)
        self.accumulates = False
        self._last_step: int | None = None
        self._clock: StepClock | None = None
        self._trial: SplitTrial | None = None
        self._make_optimizers()
        if self.job.groups.pipeline is not None:
            self._show_whole_module_to_callbacks(self.job.groups.pipeline)
            if self.options.chooses_schedule and not torch.are_deterministic_algorithms_enabled():
                self._trial = SplitTrial(self.plan, self.driver, self.job.connection.device)
        self._begin()

    def _make_optimizers(self) -> None:
        """The user's optimizers over what this rank holds, and the gradients that they are given."""
        job, trainer, options, undo = self.job, self.trainer, self.options, self.context.undo
        connection, strategy = job.connection, trainer.strategy
        strategy.setup_optimizers(trainer)
        optimizers = strategy.optimizers
        admission.check_optimizers(optimizers)
        names = [checkpoint.parameter_group_names(self.module, o) for o in optimizers]
        found = None
        wanted = sharding.wants_shards(options.sharding_options, job.placement.data_parallel_size)
        if optimizers and (wanted or sharding.may_couple(optimizers[0], self.plan)):
            found = sharding.test_optimizer(optimizers[0], connection.device, connection.all_gather)
            sharding.refuse_coupling(found, self.plan)
        if self.pipeline.structure is not None:
            self._summarise_whole_module()
        self.pipeline.install()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self.parameter_groups = undo.enter_context(
            ParameterGroups(self.pipeline, optimizers, names, callbacks, connection.all_gather)
        )
        strategy.setup_precision_plugin()
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        if scaler is not None and dtensor.has_dtensor_parameters(self.module):
            undo.enter_context(unscaling_parts(scaler))
        optimizers_to_device(optimizers, connection.device)
        if options.sharded_parameters:
            self.gradients = self._make_layered_gradients(found, scaler)
        else:
            self.gradients = make_gradients(
                self.pipeline,
                job.groups,
                self.plan,
                connection.device,
                scaler=scaler,
                shard=lambda reducer: self._shard_optimizer(found, reducer),
                options=options.gradient_options,
                board=self._make_board(),
                flat=options.sharding_options.master_weights,
            )
        self.exchange, self.shards = self.gradients.exchange, self.gradients.host.shards
        undo.callback(self._close_gradients)
        undo.enter_context(clipping(strategy.precision_plugin, self.gradients.host))

    def _close_gradients(self) -> None:
        if self.job.connection.failed:
            self.gradients.host.abandon()
        self.gradients.close()
        self.exchange = None
        del self.gradients  # and the buffers

    def _make_layered_gradients(self, found: Separability | None, scaler: Any) -> Gradients:
        """Parameters in shards from now on."""
        connection, options = self.job.connection, self.options
        if found is None:
            raise UnsupportedModuleError(
                "sharded_parameters=True needs an optimizer, to whose parameters gradients belong: configure_optimizers gives none"
            )
        (optimizer,) = self.trainer.strategy.optimizers
        check_parameter_sharding(found, optimizer, self.trainer)
        return make_layered_gradients(
            self.pipeline,
            self.job.groups,
            self.plan,
            connection.device,
            scaler=scaler,
            optimizer=optimizer,
            names=self._local_group_names(optimizer),
            found=found,
            options=options.gradient_options,
            master_weights=sharding.keeps_masters(options.sharding_options, self.module),
            all_gather=connection.all_gather,
        )

    def _local_group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """For each group of the optimizer, this rank's parameters."""
        local = self.pipeline.local_parameters
        return [[n for n in names if n in local] for names in self.parameter_groups.names_of(optimizer)]

    @property
    def stage_shards(self) -> StageShards | None:
        """This rank's shares of the parameters, while they live in shards."""
        return self.gradients.stage_shards if self.is_open else None

    def _shard_optimizer(self, found: Separability | None, reducer: GradientReducer) -> ShardedOptimizer | None:
        """Shard the optimizer over the replicas, if that is asked for or better."""
        if found is None:
            return None
        connection, (optimizer,) = self.job.connection, self.trainer.strategy.optimizers
        shards, choice = sharding.shard_optimizer(
            self.options.sharding_options,
            found,
            optimizer,
            self._local_group_names(optimizer),
            reducer,
            self.trainer,
            data_parallel_size=self.job.placement.data_parallel_size,
            device=connection.device,
            gather=connection.all_gather,
        )
        if connection.rank == 0:
            print(choice.describe(), flush=True)
        return shards

    def _make_board(self) -> SyncBoard | None:
        """Where groups of replicas tell rank 0 how they sum their gradients."""
        placement = self.job.placement
        if placement.data_parallel_size == 1:
            return None
        store = default_store()
        run = store.add(f"holmes_gradient_sync_runs/{self.job.connection.rank}", 1)  # the same number on all ranks
        return SyncBoard(store, run=run, groups=[str(s) for s in range(placement.pipeline_parallel_size)])

    def _summarise_whole_module(self) -> None:
        """Make summaries with an ``example_input_array`` now: they run the module, which lacks layers later."""
        if self.module.example_input_array is None:
            return
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelSummary) and prints_summary(callback):
                summary = getattr(callback, SUMMARY)(self.trainer, self.module)
                self.context.undo.replace(callback, **{SUMMARY: lambda *_, made=summary: made})

    def _show_whole_module_to_callbacks(self, stages: dist.ProcessGroup) -> None:
        """Let averages of weights and norms of gradients cover all stages."""
        undo = self.context.undo
        undo.enter_context(WeightAverages(self.trainer, self.pipeline, self.job.groups.p2p))
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        undo.enter_context(GradNormExchange([self.module, *callbacks], self.pipeline, stages))

    # steps

    def training_step(self, batch: Any, *arguments: Any) -> Any:
        """Run the whole batch, forward and backward, through the pipeline; gradients stay here. Its output on every rank.

        Raises:
            UnsupportedModuleError: the optimizer evaluates its closure once more.
        """
        with self.job.explaining(self.job.groups.data_parallel):
            return self._training_step(batch, arguments)

    def _training_step(self, batch: Any, arguments: tuple[Any, ...]) -> Any:
        trainer = self.trainer
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        if step == self._last_step:
            raise UnsupportedModuleError(
                f"{type(trainer.optimizers[0]).__name__} evaluates its closure more than once for a batch, or optimizer_step "
                f"does: the stages of a pipeline, which know their own gradients only, would part ways; use an optimizer "
                f"that steps once a batch"
            )
        self._last_step = step
        if self._clock is not None:
            self._clock.begin_step(step)
        if self.shards is not None:
            self.parameter_groups.names_of(self.shards.optimizer)  # of groups added since, before they are sharded
        self.gradients.reducer.begin(last=not self.accumulates)
        output = self.step(
            "training_step",
            batch,
            arguments,
            self.plan.num_microbatches,
            (0, step),
            loss_scales=self._start_loss_scales,
            observer=self._observer(),
        )
        self.gradients.reducer.end()
        if (
            output is None
        ):  # Lightning calls no backward then; what the window has gathered before stays the optimizer's
            self.hand_over()
            self.absorb()
        if self._trial is not None:
            self.plan = self._trial.after_batch(self.plan)
        if self.job.connection.world_size > 1:
            loss_of(output, "training_step")
        return output

    def _start_loss_scales(self, weights: Sequence[float]) -> Callable[[], Sequence[float]]:
        reducer, host = self.gradients.reducer, self.gradients.host
        return reducer.start_loss_scales(weights, self.trainer.accumulate_grad_batches, host.loss_factor)

    def _observer(self) -> StepObserver:
        """Who watches a training step: the clock of a monitored run, the trial's meter, or nobody."""
        observer = self._clock or UNOBSERVED
        meter = None if self._trial is None else self._trial.meter
        if meter is None:
            return observer
        meter.other = observer
        return meter

    def evaluation_step(self, step_name: str, batch: Any, *arguments: Any) -> Any:
        self.gradients.host.settle()  # some of torch's modules run evaluation otherwise while anything watches parameters
        if self._clock is not None:
            self._clock.interrupt()
        return super().evaluation_step(step_name, batch, *arguments)

    def hand_over(self) -> None:
        """Make what the pipeline has gathered ``p.grad``, reduced unless more batches are to come."""
        noting = nullcontext() if self._clock is None else self._clock.noting("reduce")
        with self.job.explaining(self.job.groups.data_parallel), noting:
            self.gradients.reducer.finish(last=not self.accumulates)
            self.gradients.host.take_gradients(last=not self.accumulates)

    def absorb(self) -> None:
        """Take over what hooks after the backward have made of ``p.grad``."""
        if not self.accumulates:
            self.gradients.host.absorb()

    # monitoring

    def start_monitoring(self) -> StepClock:
        """Note from now on when this rank computes, waits and communicates."""
        self._clock = StepClock(self.job.connection.device, self.job.groups.pipeline_rank)
        self.gradients.reducer.watch(self._clock.add_beside)
        return self._clock

    def stop_monitoring(self) -> None:
        """Note nothing any more."""
        self._clock = None
        if self.is_open:
            self.gradients.reducer.watch(None)

    def noting_wait(self) -> AbstractContextManager[None]:
        return nullcontext() if self._clock is None else self._clock.noting("wait")

    @contextmanager
    def noting_update(self, closure: Callable[[], Any]) -> Generator[Callable[[], Any], None, None]:
        """Around an optimizer's step with the closure that this gives: notes, where somebody measures, the time from the
        gradients to the end."""
        clock = self._clock
        if clock is None:
            yield closure
            return
        after: list[Any] = []

        def timed_closure() -> Any:
            result = closure()
            after[:] = [clock.mark()]
            return result

        yield timed_closure
        if after:
            clock.add("update", after[0])
