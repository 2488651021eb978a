"""Lightning's callbacks that average weights, SWA and EMA, where a rank holds a part of the module.

They copy the module, which each rank still holds as a whole then, and later go through all its parameters and those of
the copy in turn. Here both show them the rank's own only, while such a callback runs; what they write into checkpoints
is brought together.

    with WeightAverages(trainer, pipeline, p2p): ...
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from torch import nn
from typing_extensions import Self

from lightning_holmes.comm.p2p import P2P
from lightning_holmes.lightning_private import average_model
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.strategy.compat.replacements import Replacements

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
    """Inside, the averaging callbacks of ``trainer`` are right for this rank's part, ``pipeline``."""

    def __init__(self, trainer: "pl.Trainer", pipeline: PipelineModule, p2p: P2P | None) -> None:
        super().__init__()
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks = [c for c in callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]
        self._pipeline = pipeline
        self._p2p = p2p

    def __enter__(self) -> Self:
        """Wrap the callbacks' hooks; take the average's copies of other stages' parameters out of what they see."""
        for callback in self._callbacks:
            self.replace(callback, **{hook: self._wrapped(callback, getattr(callback, hook)) for hook in _HOOKS})
            if isinstance(callback, StochasticWeightAveraging):
                self.replace(callback, state_dict=self._gathering_state(callback))
            else:
                self.replace(callback, on_save_checkpoint=self._gathering_checkpoint(callback))
        return self

    def _wrapped(self, callback: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._showing_local(callback):
                return hook(*args, **kwargs)

        return run

    @contextmanager
    def _showing_local(self, callback: Any) -> Iterator[None]:
        """``parameters()`` of the module and of its average yield those that this rank holds, by the same names."""
        average = average_model(callback)
        modules = [self._pipeline.module]
        if average is not None:
            modules += [average, average.module] if isinstance(callback, WeightAveraging) else [average]
        with Replacements() as shown:
            for module in modules:
                shown.replace(module, parameters=functools.partial(self._local_parameters, module))
            yield

    def _local_parameters(self, module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        prefix = "module." if module is not self._pipeline.module and _is_averaged(module) else ""
        for name, parameter in module.named_parameters(recurse=recurse):
            if name.removeprefix(prefix) in self._pipeline.local_parameters:
                yield parameter

    # checkpoints

    def _gathered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Each entry from the rank whose copy counts; all ranks of the pipeline must call."""
        pipeline, p2p = self._pipeline, self._p2p
        if p2p is None or p2p.size == 1:
            return dict(state)
        keys = {key: pipeline.name_of(v, key) for key, v in pipeline.module.state_dict(keep_vars=True).items()}
        mine = {k: v.detach().cpu() for k, v in state.items() if pipeline.is_owner(keys.get(k, k))}
        others = [rank for rank in range(p2p.size) if rank != p2p.rank]
        for rank in others:
            p2p.send_message(rank, TOPIC_AVERAGE, mine)
        whole = dict(mine)
        for rank in others:
            whole |= p2p.receive_message(rank, TOPIC_AVERAGE)
        p2p.finish()
        return {key: whole[key] for key in state}

    def _gathering_state(self, callback: StochasticWeightAveraging) -> Callable[[], dict[str, Any]]:
        own = callback.state_dict

        def state_dict() -> dict[str, Any]:
            state = own()
            if state["average_model_state"] is not None:
                state["average_model_state"] = self._gathered(state["average_model_state"])
            return state

        return state_dict

    def _gathering_checkpoint(self, callback: WeightAveraging) -> Callable[..., None]:
        own = callback.on_save_checkpoint

        def on_save_checkpoint(trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            present = set(checkpoint["state_dict"])  # of one file: all on rank 0; of a folder: this rank's part
            own(trainer, pl_module, checkpoint)
            if "averaging_state" in checkpoint:
                checkpoint["current_model_state"] = self._gathered(pl_module.state_dict())
                average = self._gathered(checkpoint["state_dict"])
                checkpoint["state_dict"] = {key: value for key, value in average.items() if key in present}

        return on_save_checkpoint


def _is_averaged(module: nn.Module) -> bool:
    return hasattr(module, "n_averaged") and hasattr(module, "update_parameters")
