"""Lightning's callbacks that average weights, SWA and EMA, for ranks that hold a part of the module.

These callbacks copy the module while each rank still holds it whole, and later iterate over its parameters and those of
the copy together. While such a callback runs, both yield only the rank's own parameters. If parameters are sharded, they yield this
replica's parts, and the copy is sharded in the same way. The entries that the callbacks write into checkpoints are gathered.

    averages = WeightAverages(trainer, pipeline, p2p, replicas, first_replica=0)
    with averages:
        averages.shard(stage_shards)                # after the parameters were sharded
        averages.close()                            # before they are whole again
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm.objects import all_gather_values
from lightning_holmes.comm.p2p import P2P
from lightning_holmes.lightning_package import PACKAGES, pl
from lightning_holmes.lightning_private import average_model, averaging_functions
from lightning_holmes.optim.stage_shards import StageShards
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
    """Inside, the averaging callbacks of ``trainer`` work on this rank's part of the module, ``pipeline``.

    Args:
        replicas: the data-parallel process group; None: there is one replica.
        first_replica: the replica that writes files, and that is sent parameters of which no replica has entries.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        pipeline: PipelineModule,
        p2p: P2P | None,
        replicas: dist.ProcessGroup | None,
        *,
        first_replica: int,
    ) -> None:
        super().__init__()
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks = [
            c
            for c in callbacks
            if isinstance(c, (pl.callbacks.WeightAveraging, pl.callbacks.StochasticWeightAveraging))
        ]
        self._pipeline = pipeline
        self._p2p, self._replicas, self._first = p2p, replicas, first_replica
        self._shards: StageShards | None = None
        self._averages: dict[pl.Callback, StageShards] = {}
        self._is_abandoned = False

    def __enter__(self) -> Self:
        """Wrap the callbacks' hooks, so that they do not see the average's copies of other stages' parameters."""
        for callback in self._callbacks:
            self.replace(callback, **{hook: self._wrapped(callback, getattr(callback, hook)) for hook in _HOOKS})
            if isinstance(callback, pl.callbacks.StochasticWeightAveraging):
                self.replace(callback, state_dict=self._gathering_state(callback))
            else:
                self.replace(callback, on_save_checkpoint=self._gathering_checkpoint(callback))
        return self

    # averages in shards

    def shard(self, shards: StageShards) -> None:
        """Shard the averages like the module's parameters, which are in ``shards`` from now on. All replicas must call."""
        self._shards = shards
        for callback in self._callbacks:
            average = average_model(callback)
            parameters = dict(
                (
                    average if isinstance(callback, pl.callbacks.StochasticWeightAveraging) else average.module
                ).named_parameters()
            )
            self._averages[callback] = shards.twin(parameters)

    def close(self) -> None:
        """Make the averages whole again, on every rank. All ranks must call, unless the run has failed: then :meth:`abandon` comes first."""
        for average in self._averages.values():
            average.close()
        self._averages.clear()
        self._shards = None
        for callback in [] if self._is_abandoned else self._callbacks:  # a checkpoint may be saved after the fit
            average = average_model(callback)
            if average is not None:
                weights = isinstance(callback, pl.callbacks.WeightAveraging)
                state = (average.module if weights else average).state_dict()
                for key, value in self._gathered(state).items():
                    state[key].copy_(value)

    def abandon(self) -> None:
        """Leave the averages as they are, after the run has failed."""
        self._is_abandoned = True
        for average in self._averages.values():
            average.abandon()

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
                shards = self._shards if module is self._pipeline.module else self._averages.get(callback)
                found = functools.partial(self._local_parameters, module)
                shown.replace(module, parameters=found if shards is None else functools.partial(_parts_of, shards))
                if (
                    shards is not None
                    and module is average
                    and isinstance(callback, pl.callbacks.StochasticWeightAveraging)
                ):
                    shown.replace(
                        module, to=lambda device, module=module: module
                    )  # its shards are on the same device as the module's
            yield

    def _local_parameters(self, module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        prefix = "module." if module is not self._pipeline.module and _is_averaged(module) else ""
        for name, parameter in module.named_parameters(recurse=recurse):
            if name.removeprefix(prefix) in self._pipeline.local_parameters:
                yield parameter

    # checkpoints

    def _gathered(self, state: Mapping[str, Any], collected: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """Gather ``state``, each entry from the rank that owns it; all ranks of the pipeline must call.

        Args:
            collected: if parameters are sharded, the whole ones that were brought to this rank; parameters that were brought to no rank are left
                out.
        """
        pipeline, p2p = self._pipeline, self._p2p
        if collected is None and (p2p is None or p2p.size == 1):
            return dict(state)
        keys = {key: pipeline.name_of(v, key) for key, v in pipeline.module.state_dict(keep_vars=True).items()}
        mine = {k: v for k, v in state.items() if pipeline.is_owner(keys.get(k, k))}
        if collected is not None:
            sharded = {k for k in mine if keys.get(k) in pipeline.parameters}
            mine = {
                k: collected[keys[k]] if k in sharded else v
                for k, v in mine.items()
                if k not in sharded or keys[k] in collected
            }
        mine = {k: v.detach().cpu() for k, v in mine.items()}
        whole = dict(mine)
        if p2p is not None:
            others = [rank for rank in range(p2p.size) if rank != p2p.rank]
            for rank in others:
                p2p.send_message(rank, TOPIC_AVERAGE, mine)
            for rank in others:
                whole |= p2p.receive_message(rank, TOPIC_AVERAGE)
            p2p.finish()
        return {key: whole[key] for key in state if key in whole}

    def _collected(
        self, shards: StageShards | None, destination: Callable[[str], int] | None = None
    ) -> dict[str, Tensor] | None:
        """Return whole parameters from ``shards``, on the replica that writes files, or on the replica that ``destination`` returns for each name;
        None without shards."""
        return None if shards is None else shards.collect(destination or (lambda name: self._first))

    def _holder_of(self, present: Iterable[str]) -> Callable[[str], int]:
        """Return a function from the name of a parameter to the replica that needs it, if each replica needs the parameters of its entries
        ``present``. All replicas must call."""
        keys = self._pipeline.module.state_dict(keep_vars=True)
        names = {self._pipeline.name_of(keys[key], key) for key in present if key in keys}
        everyone = [names] if self._replicas is None else all_gather_values(names, self._replicas)
        holders = {name: replica for replica, wanted in enumerate(everyone) for name in wanted}
        return lambda name: holders.get(name, self._first)

    def _gathering_state(self, callback: pl.callbacks.StochasticWeightAveraging) -> Callable[[], dict[str, Any]]:
        own = callback.state_dict

        def state_dict() -> dict[str, Any]:
            state = own()
            if state["average_model_state"] is not None:
                collected = self._collected(self._averages.get(callback))
                state["average_model_state"] = self._gathered(state["average_model_state"], collected)
            return state

        return state_dict

    def _gathering_checkpoint(self, callback: pl.callbacks.WeightAveraging) -> Callable[..., None]:
        own = callback.on_save_checkpoint

        def on_save_checkpoint(trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            # for one file: all entries, on rank 0; for a folder: this rank's part
            present = set(checkpoint["state_dict"])
            own(trainer, pl_module, checkpoint)
            if "averaging_state" in checkpoint:
                current = self._collected(self._shards)
                checkpoint["current_model_state"] = self._gathered(pl_module.state_dict(), current)
                shards = self._averages.get(callback)
                collected = None if shards is None else self._collected(shards, self._holder_of(present))
                average = self._gathered(checkpoint["state_dict"], collected)
                checkpoint["state_dict"] = {key: value for key, value in average.items() if key in present}

        return on_save_checkpoint


class WholeAverages(Replacements):
    """For an evaluation outside of fit, which begins with the whole module: inside, ``WeightAveraging`` swaps its average with the whole module,
    before and after the evaluation, so that afterwards both are unchanged on every rank.

    Args:
        whole: calls a function while the whole module is on every rank; all ranks must call.
    """

    def __init__(self, trainer: "pl.Trainer", whole: Callable[[Callable[[], None]], None]) -> None:
        super().__init__()
        self._callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._whole = whole

    def __enter__(self) -> Self:
        for callback in self._callbacks:
            if isinstance(callback, pl.callbacks.WeightAveraging) and average_model(callback) is not None:
                hooks = ("on_validation_epoch_start", "on_validation_epoch_end")
                self.replace(callback, **{hook: self._swapping(getattr(callback, hook)) for hook in hooks})
        return self

    def _swapping(self, hook: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> None:
            self._whole(lambda: hook(*args, **kwargs))

        return run


def _is_averaged(module: nn.Module) -> bool:
    return hasattr(module, "n_averaged") and hasattr(module, "update_parameters")


def _parts_of(shards: StageShards, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Yield this replica's part of each parameter, as a view: writing to it writes to the shard."""
    for name, parameter in shards.parameters.items():
        yield nn.Parameter(shards.own(name), requires_grad=parameter.requires_grad)


def refusal_of_averages(callbacks: Iterable[pl.Callback]) -> str:
    """Return why an averaging callback among ``callbacks`` may need more of a parameter than a replica's part; empty if none does."""
    for callback in callbacks:
        if not isinstance(callback, (pl.callbacks.WeightAveraging, pl.callbacks.StochasticWeightAveraging)):
            continue
        kind = type(callback).__name__
        for name in (*_HOOKS, "update_parameters", "transfer_weights"):
            method = getattr(type(callback), name, None)
            if method is not None and method.__module__.partition(".")[0] not in PACKAGES:
                return f"{kind}.{name} is not Lightning's, and may read whole parameters (override should_update only)"
        for function, is_multiple in averaging_functions(callback) if average_model(callback) is not None else ():
            if not _is_elementwise(function, is_multiple):
                return f"the average of {kind} treats elements of a parameter unlike when it sees a part of them"
    return ""


def _is_elementwise(function: Callable[..., Any], is_multiple: bool) -> bool:
    """Return whether an averaging function gives the same result for a tensor as for its parts."""

    def run(averaged: Tensor, current: Tensor) -> Tensor:
        averaged, count = averaged.clone(), torch.tensor(3)
        if not is_multiple:
            return torch.as_tensor(function(averaged, current, count))
        function([averaged], [current], count)
        return averaged

    averaged, current = torch.linspace(-1, 2, 12), torch.linspace(0.5, -1, 12)
    whole = run(averaged.view(3, 4), current.view(3, 4))
    parts = [run(averaged[part], current[part]) for part in (slice(0, 5), slice(5, 5), slice(5, 12))]
    return torch.allclose(whole.flatten(), torch.cat(parts), rtol=1e-6, atol=0)
