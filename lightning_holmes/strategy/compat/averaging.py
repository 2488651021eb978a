"""Lightning's callbacks that average weights, SWA and EMA, for ranks that hold a part of the module.

These callbacks copy the module while each rank still holds it whole, and later iterate over its parameters and those of
the copy together. While such a callback runs, both yield only the parameters of the rank's own stages. The entries that the callbacks write
into checkpoints are gathered. Beside sharded parameters these callbacks are refused.

    averages = WeightAverages(trainer, pipeline, p2p)
    with averages:
        averages.close()                            # before the parameters are whole again
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from torch import nn

from lightning_holmes.comm.p2p import P2P, exchange
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import average_model
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.replacements import Replacements

TOPIC_AVERAGE = 11
_HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)


class WeightAverages(Replacements):
    """Inside, the averaging callbacks of ``trainer`` work on this rank's part of the module, ``pipeline``."""

    def __init__(self, trainer: "pl.Trainer", pipeline: PipelineModule, p2p: P2P) -> None:
        super().__init__()
        self._callbacks = list(averaging(trainer.callbacks))  # type: ignore[attr-defined]
        self._pipeline, self._p2p = pipeline, p2p

    def __enter__(self) -> Self:
        """Wrap the callbacks' hooks, so that they do not see the average's copies of other stages' parameters."""
        for callback in self._callbacks:
            self.replace(callback, **{hook: self._wrapped(callback, getattr(callback, hook)) for hook in _HOOKS})
            if isinstance(callback, pl.callbacks.StochasticWeightAveraging):
                self.replace(callback, state_dict=self._gathering_state(callback))
            else:
                self.replace(callback, on_save_checkpoint=self._gathering_checkpoint(callback))
        return self

    def close(self) -> None:
        """Make the averages whole again, on every rank, for a checkpoint that is saved after the fit. All ranks must call."""
        for callback in self._callbacks:
            average = average_model(callback)
            if average is not None:
                weights = isinstance(callback, pl.callbacks.WeightAveraging)
                state = (average.module if weights else average).state_dict()
                for key, value in self._gathered(state).items():
                    state[key].copy_(value)

    # what callbacks see

    def _wrapped(self, callback: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._showing_local(callback):
                return hook(*args, **kwargs)

        return run

    @contextmanager
    def _showing_local(self, callback: Any) -> Iterator[None]:
        """Inside, ``parameters()`` of the module and of its average yield the parameters that this rank holds, of the same names."""
        average = average_model(callback)
        modules = [self._pipeline.module]
        if average is not None:
            modules += [average, average.module] if isinstance(callback, pl.callbacks.WeightAveraging) else [average]
        with Replacements() as shown:
            for module in modules:
                shown.replace(module, parameters=functools.partial(self._local_parameters, module))
            yield

    def _local_parameters(self, module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        is_average = hasattr(module, "n_averaged") and hasattr(module, "update_parameters")
        prefix = "module." if module is not self._pipeline.module and is_average else ""
        for name, parameter in module.named_parameters(recurse=recurse):
            if name.removeprefix(prefix) in self._pipeline.local_parameters:
                yield parameter

    # checkpoints

    def _gathered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Gather ``state``, each entry from the rank that owns it; all ranks of the pipeline must call."""
        pipeline, p2p = self._pipeline, self._p2p
        keys = {key: pipeline.name_of(v, key) for key, v in pipeline.module.state_dict(keep_vars=True).items()}
        mine = {k: v.detach().cpu() for k, v in state.items() if pipeline.is_owner(keys.get(k, k))}
        whole = {key: value for part in exchange(p2p, TOPIC_AVERAGE, mine) for key, value in part.items()}
        return {key: whole[key] for key in state}

    def _gathering_state(self, callback: pl.callbacks.StochasticWeightAveraging) -> Callable[[], dict[str, Any]]:
        own = callback.state_dict

        def state_dict() -> dict[str, Any]:
            state = own()
            if state["average_model_state"] is not None:
                state["average_model_state"] = self._gathered(state["average_model_state"])
            return state

        return state_dict

    def _gathering_checkpoint(self, callback: pl.callbacks.WeightAveraging) -> Callable[..., None]:
        own = callback.on_save_checkpoint

        def on_save_checkpoint(trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            # for one file: all entries, on rank 0; for a folder: this rank's part
            present = set(checkpoint["state_dict"])
            own(trainer, pl_module, checkpoint)
            if "averaging_state" in checkpoint:
                checkpoint["current_model_state"] = self._gathered(pl_module.state_dict(keep_vars=True))
                average = self._gathered(checkpoint["state_dict"])
                checkpoint["state_dict"] = {key: value for key, value in average.items() if key in present}

        return on_save_checkpoint


@contextmanager
def swapping_whole(trainer: "pl.Trainer", whole: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """For an evaluation outside of fit, which begins with the whole module: inside, ``WeightAveraging`` swaps its average with the whole module,
    before and after the evaluation, so that afterwards both are unchanged on every rank.

    Args:
        whole: calls a function while the whole module is on every rank; all ranks must call.
    """

    def swapping(hook: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> None:
            whole(lambda: hook(*args, **kwargs))

        return run

    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    with Replacements() as changes:
        for callback in callbacks:
            if isinstance(callback, pl.callbacks.WeightAveraging) and average_model(callback) is not None:
                hooks = ("on_validation_epoch_start", "on_validation_epoch_end")
                changes.replace(callback, **{hook: swapping(getattr(callback, hook)) for hook in hooks})
        yield


def averaging(callbacks: Iterable[Any]) -> Iterator[Any]:
    """Yield the callbacks that average weights."""
    for callback in callbacks:
        if isinstance(callback, (pl.callbacks.WeightAveraging, pl.callbacks.StochasticWeightAveraging)):
            yield callback


def refusal_of_averages(callbacks: Iterable[pl.Callback]) -> str:
    """Return why averaging callbacks cannot run where no rank has whole parameters between steps; empty if there are none."""
    found = next(averaging(callbacks), None)
    return "" if found is None else f"the callback {type(found).__name__} reads whole parameters between steps"
