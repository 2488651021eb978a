"""What a batch goes through: a step in the pipeline, the gradients handed over, the optimizer's step, and their clock.

A base of HolmesStrategy, which makes the parts when it is set up; the pipeline itself is pipeline/'s.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_private import active_loop
from lightning_holmes.pipeline.module_state import ModuleState
from lightning_holmes.pipeline.observer import UNOBSERVED, StepObserver
from lightning_holmes.pipeline.replay import replay
from lightning_holmes.pipeline.request import StepRequest, StepResult
from lightning_holmes.pipeline.runner import loss_of
from lightning_holmes.pipeline.seeds import derive_seed
from lightning_holmes.pipeline.step_clock import StepClock
from lightning_holmes.pipeline.steps import StepDriver
from lightning_holmes.strategy.checkpointing import CheckpointingStrategy
from lightning_holmes.strategy.gradients import Gradients
from lightning_holmes.strategy.split_trial import SplitTrial

_EVALUATION = {"validation_step": 1, "test_step": 2, "predict_step": 3}


class SteppingStrategy(CheckpointingStrategy):
    """Runs the steps of a strategy that sets ``_driver``, ``_gradients`` and the like."""

    _driver: StepDriver | None = None
    _gradients: Gradients | None = None
    _state: ModuleState | None = None
    _trial: SplitTrial | None = None
    _clock: StepClock | None = None
    _last_step: int | None = None
    _accumulating = False
    _state_each_batch: frozenset[str] = frozenset()

    @property
    def _trainer(self) -> "pl.Trainer":
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def inside_step(self) -> bool:
        return self._driver is not None and self._driver.inside_step

    def _step_context(self, step_name: str) -> Any:
        plugin = self.precision_plugin
        contexts = {
            "training_step": plugin.train_step_context,
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }
        return contexts[step_name]()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole batch, forward and backward, through the pipeline; gradients stay with the strategy."""
        with self._explaining(self._replicas):
            return self._training_step(*args, *kwargs.values())

    def _training_step(self, batch: Any, *arguments: Any) -> Any:
        assert self._gradients is not None and self._driver is not None and self._plan is not None
        trainer = self._trainer
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
        if self._shards is not None and self._parameter_groups is not None:
            self._parameter_groups.names_of(self._shards.optimizer)  # of groups added since, before they are sharded
        self._gradients.reducer.begin(last=not self._accumulating)
        result = self._run(
            "training_step", batch, arguments, self._plan.num_microbatches, (0, step), self._start_loss_scales
        )
        self._gradients.reducer.end()
        if self._trial is not None:
            self._plan = self._trial.after_batch(self._plan)
        output = result.output
        if self.world_size > 1:
            loss_of(output, "training_step")
        return output

    def _start_loss_scales(self, weights: Sequence[float]) -> Callable[[], Sequence[float]]:
        assert self._gradients is not None
        reducer, host = self._gradients.reducer, self._gradients.host
        return reducer.start_loss_scales(weights, self._trainer.accumulate_grad_batches, host.loss_factor)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation_step", *args, *kwargs.values())

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test_step", *args, *kwargs.values())

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("predict_step", *args, *kwargs.values())

    def _evaluation_step(self, step_name: str, batch: Any, *arguments: Any) -> Any:
        assert self._plan is not None
        place = tuple(a for a in arguments if isinstance(a, int))
        if self._shards is not None:
            self._shards.finish()  # some of torch's modules run evaluation otherwise while anything watches parameters
        if self._clock is not None:
            self._clock.interrupt()
        with self._explaining():
            count = self._plan.eval_num_microbatches
            result = self._run(step_name, batch, arguments, count, (_EVALUATION[step_name], *place), None)
            if self._ends_loader(step_name, arguments):
                self.synchronise_module_state()
            return result.output

    def _run(
        self,
        step_name: str,
        batch: Any,
        arguments: tuple[Any, ...],
        num_microbatches: int,
        place: tuple[int, ...],
        loss_scales: Callable[[Sequence[float]], Callable[[], Sequence[float]]] | None,
    ) -> StepResult:
        assert self._driver is not None and self.lightning_module is not None
        request = StepRequest(
            step_name=step_name,
            batch=batch,
            arguments=arguments,
            num_microbatches=num_microbatches,
            seed=derive_seed(self._base_seed, *place),
            replica=self.data_parallel_rank,
            context=functools.partial(self._step_context, step_name),
            loss_scales=loss_scales,
            exchange=None if self._gradients is None else self._gradients.exchange,
            observer=UNOBSERVED if loss_scales is None else self._observer(),
        )
        result = self._driver.run(request)
        if step_name in self._state_each_batch:
            self.synchronise_module_state()
        if result.calls:
            replay(self.lightning_module, result.calls, self.root_device)
        return result

    def _observer(self) -> StepObserver:
        """Who watches a training step: the clock of a monitored run, the trial's meter, or nobody."""
        observer = self._clock or UNOBSERVED
        meter = None if self._trial is None else self._trial.meter
        if meter is None:
            return observer
        meter.other = observer
        return meter

    def _ends_loader(self, step_name: str, arguments: tuple[Any, ...]) -> bool:
        """Whether this is the last batch of an evaluation loader, after which Lightning computes metrics."""
        if step_name == "predict_step":
            return False
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        loop: Any = self._trainer.fit_loop.epoch_loop.val_loop if fitting else active_loop(self._trainer)
        if loop is None or loop.batch_progress.is_last_batch:
            return True
        index = arguments[1] if len(arguments) > 1 else 0
        return bool(arguments) and arguments[0] + 1 >= loop.max_batches[index]

    def synchronise_module_state(self) -> None:
        """Bring what steps left on the module, and metrics, to every rank of the pipeline; all must call."""
        if self._state is not None:
            with self._explaining():
                self._state.synchronise()

    # gradients

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hand over the gradients that the pipeline has gathered, reduced unless more batches are to come."""
        assert self.lightning_module is not None and self._gradients is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with self._explaining(self._replicas), nullcontext() if self._clock is None else self._clock.noting("reduce"):
            self._gradients.reducer.finish(last=not self._accumulating)
            self._gradients.host.take_gradients(last=not self._accumulating)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        if not self._accumulating:
            self._gradients.host.absorb()
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As Lightning does; a monitored run notes the time from the gradients to the end of the optimizer's step."""
        clock = self._clock
        if clock is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        after: list[Any] = []

        def timed_closure() -> Any:
            result = closure()
            after[:] = [clock.mark()]
            return result

        output = super().optimizer_step(optimizer, timed_closure, model, **kwargs)
        if after:
            clock.add("update", after[0])
        return output

    # monitoring

    def start_monitoring(self) -> StepClock:
        """Note from now on when this rank computes, waits and communicates."""
        assert self._driver is not None
        rank = 0 if self._groups is None else self._groups.pipeline_rank
        self._clock = StepClock(self.root_device, rank)
        if self._gradients is not None:
            self._gradients.reducer.watch(self._clock.add_beside)
        return self._clock

    def _noting_wait(self) -> AbstractContextManager[None]:
        return nullcontext() if self._clock is None else self._clock.noting("wait")

    def stop_monitoring(self) -> None:
        """Note nothing any more."""
        self._clock = None
        if self._gradients is not None:
            self._gradients.reducer.watch(None)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """While gradients accumulate over batches they stay on their rank."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False
