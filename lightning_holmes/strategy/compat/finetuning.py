"""The optimizer's parameter groups, of which a rank holds a part, also if callbacks add groups in mid-run.

Keeps the names of all parameters in all groups. ``BaseFinetuning`` adds the parameters that it unfreezes, and writes the names of all
groups into checkpoints. While a hook of such a callback runs, the groups hold all parameters of the module, as in plain
Lightning; after it, only the rank's own again. After the fit they are whole.

    with ParameterGroups(pipeline, trainer.optimizers, names, callbacks, job.all_gather) as groups:
        groups.names_of(optimizer)
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from lightning_holmes import checkpoint
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.replacements import Replacements
from lightning_holmes.strategy.agreement import content_of

_NOT_TRAINING = ("on_save_checkpoint", "on_load_checkpoint", "on_exception")
_STEPPED = "_holmes_stepped"  # set on an optimizer after a fit: the parameters, by name, whose states this rank has


class ParameterGroups(Replacements):
    """The groups of ``optimizers``: keeps the names and places of all parameters, and removes other stages' parameters from the groups.

    Inside, hooks of finetuning callbacks see whole groups.

    Args:
        names: the names of all parameters of each optimizer's groups, as configure_optimizers made them.
        callbacks: the trainer's callbacks, of any kind.
        gather: all-gathers a Python value over all ranks; all ranks must call.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        optimizers: Sequence[Optimizer],
        names: Sequence[list[list[str]]],
        callbacks: Iterable[pl.Callback],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._optimizers = list(optimizers)
        self._names = list(names)
        self._num_taken = [len(of_optimizer) for of_optimizer in names]  # the number of groups before the last batch
        self._finetuning = [c for c in callbacks if isinstance(c, pl.callbacks.BaseFinetuning)]
        self._gather = gather

    def keep_local(self) -> None:
        """Remove from the groups the parameters that this rank does not hold, with their states. Call once, when the plan is known.

        Raises:
            UnsupportedModuleError: an earlier fit has left this rank states of other parameters.
        """
        local = self._pipeline.local_parameters
        for index, optimizer in enumerate(self._optimizers):
            if not local <= vars(optimizer).get(_STEPPED, local):
                raise UnsupportedModuleError(
                    f"this {type(optimizer).__name__} was trained with before, when each rank took a part of its states, and this fit needs "
                    f"others here; make a new one in configure_optimizers, whose states a checkpoint (ckpt_path) gives"
                )
            self._names[index] = checkpoint.parameter_group_names(self._pipeline, optimizer)
            self._num_taken[index] = len(self._names[index])
            checkpoint.keep_local_parameters(optimizer.param_groups, self._names[index], local)
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for parameter in [p for p in optimizer.state if isinstance(p, nn.Parameter) and id(p) not in held]:
                del optimizer.state[parameter]

    def give_back(self, *, in_shards: bool) -> None:
        """After the fit: put the parameters of all stages into the groups again, as in plain Lightning. ``in_shards``: the states are those of
        shares of parameters."""
        for optimizer, of_optimizer in zip(self._optimizers, self._names, strict=True):
            began = optimizer.param_groups[: len(of_optimizer)]  # groups that were added later are whole
            self._fill(began, of_optimizer)
            stepped = set[str]() if in_shards else set(self._pipeline.local_parameters)
            vars(optimizer)[_STEPPED] = stepped & vars(optimizer).get(_STEPPED, stepped)

    def _fill(self, groups: Sequence[dict[str, Any]], names: Sequence[list[str]]) -> None:
        for group, of_group in zip(groups, names, strict=True):
            group["params"] = [self._pipeline.parameters[name] for name in of_group]
            if "param_names" in group:
                group["param_names"] = list(of_group)

    def take_added(self, optimizer: Optimizer, *, in_window: bool) -> None:
        """Before a batch, reduce groups that were added since the last batch to this rank's part.

        Args:
            in_window: whether earlier batches have accumulated gradients for the same optimizer step.

        Raises:
            UnsupportedModuleError: a group was added inside an accumulation window: its parameters may have gradients of any earlier batch.
        """
        index, count = self._index(optimizer), len(self.names_of(optimizer))
        before, self._num_taken[index] = self._num_taken[index], count
        if count > before and in_window:
            raise UnsupportedModuleError(
                f"{type(optimizer).__name__} was given a parameter group between batches of one step (accumulate_grad_batches), when plain "
                f"Lightning steps with all gradients that its parameters have had since the epoch began: add it before the first of them"
            )

    def names_of(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the names of all parameters, of all stages, in each group of ``optimizer``. From groups that were added
        meanwhile, remove other stages' parameters.

        Raises:
            UnsupportedModuleError: the optimizer is not one of those with which the run began.
        """
        index = self._index(optimizer)
        known = len(self._names[index])
        if len(optimizer.param_groups) > known:
            added = checkpoint.parameter_group_names(self._pipeline, optimizer, known)
            self._names[index] = [*self._names[index], *added]
            checkpoint.keep_local_parameters(optimizer.param_groups[known:], added, self._pipeline.local_parameters)
        return self._names[index]

    def _index(self, optimizer: Optimizer) -> int:
        index = next((i for i, o in enumerate(self._optimizers) if o is optimizer), None)
        if index is None:
            raise UnsupportedModuleError(
                f"this {type(optimizer).__name__} was put into trainer.optimizers (or trainer.strategy.optimizers) while the module trains: "
                f"gradients and states belong to those of configure_optimizers. Return it there, change the options of its "
                f"param_groups in mid-run, or begin another fit with ckpt_path"
            )
        return index

    def __enter__(self) -> Self:
        for callback in self._finetuning:
            for hook in dir(type(callback)):
                own = getattr(type(callback), hook) is not getattr(pl.Callback, hook, None)
                if hook.startswith("on_") and own and hook not in _NOT_TRAINING:
                    self.replace(callback, **{hook: self._wrapped(getattr(callback, hook))})
        return self

    def _wrapped(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.whole():
                return hook(*args, **kwargs)

        return run

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the groups hold all parameters of the module, and may be changed, in the same way on all ranks."""
        for optimizer in self._optimizers:
            self._fill(optimizer.param_groups, self.names_of(optimizer))
        try:
            with Replacements() as shown:
                shown.replace(pl.callbacks.BaseFinetuning, filter_on_optimizer=staticmethod(self._filter_on_optimizer))
                yield
        finally:
            for index, optimizer in enumerate(self._optimizers):
                self._names[index] = checkpoint.parameter_group_names(self._pipeline, optimizer)
                checkpoint.keep_local_parameters(
                    optimizer.param_groups, self._names[index], self._pipeline.local_parameters
                )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the groups show all parameters of the module, even if the optimizer steps other tensors in their place.

        Raises:
            UnsupportedModuleError: parameters were added to a group, or removed from it.
        """
        named = [(o, g, n) for o in self._optimizers for g, n in zip(o.param_groups, self.names_of(o), strict=True)]
        held = [(group["params"], group.get("param_names")) for _, group, _ in named]
        shown = [[self._pipeline.parameters[name] for name in names] for _, _, names in named]
        for (_, group, names), parameters in zip(named, shown, strict=True):
            group["params"] = list(parameters)
            if "param_names" in group:
                group["param_names"] = list(names)
        try:
            yield
            for (optimizer, group, _), parameters in zip(named, shown, strict=True):
                if list(map(id, group["params"])) != list(map(id, parameters)):
                    raise UnsupportedModuleError(
                        f"a hook has changed which parameters are in a group of {type(optimizer).__name__} while the module "
                        f"trains; add a group by optimizer.add_param_group, or switch parameters by requires_grad_"
                    )
        finally:
            for (_, group, _), (parameters, param_names) in zip(named, held, strict=True):
                group["params"] = parameters
                if param_names is not None:
                    group["param_names"] = param_names

    def _filter_on_optimizer(self, optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Replace Lightning's filter_on_optimizer, which skips parameters that are equal to one that the optimizer has: compare digests of the
        values, which may be on other stages. All ranks must call."""
        values = self._values()
        params = list(params)
        held = {values.get(id(p)) or content_of(p) for group in optimizer.param_groups for p in group["params"]}
        added = [p for p in params if (values.get(id(p)) or content_of(p)) not in held]
        if len(added) < len(params):
            pl.utilities.rank_zero_warn(
                "The provided params to be frozen already exist within another group of this optimizer, or are equal to one "
                "that does. Those parameters will be skipped."
            )
        return added

    def _values(self) -> dict[int, str]:
        """Return a digest of each parameter of the module, by the parameter's id. Parameters are whole: where they are
        not, finetuning callbacks are refused. All ranks must call."""
        parameters = self._pipeline.parameters
        mine = {
            name: f"{tuple(value.shape)} {value.dtype} {content_of(value)}"
            for name, value in self._pipeline.parameters.items()
            if self._pipeline.is_owner(name)
        }
        found: dict[str, str] = {}
        # ranks of a tensor-parallel group have different parts of a parameter, which are the same on all replicas
        for theirs in self._gather(mine):
            for name, value in theirs.items():
                known = found.get(name, "")
                found[name] = known if value in known else f"{known}, {value}"
        return {id(p): found[name] for name, p in parameters.items()}
