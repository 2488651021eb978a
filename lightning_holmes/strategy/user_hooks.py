"""Finds the hooks that the user has written, in the module or in callbacks, and other code of the user's that runs between them.

for owner, hook in overridden_hooks(module, callbacks, GRADIENT_HOOKS):       # (module, "on_after_backward"), ...
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.lightning_package import PACKAGES, pl
from lightning_holmes.pipeline.outside import names_in
from lightning_holmes.torch_private import step_hooks

GRADIENT_HOOKS = ("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step", "optimizer_step")
"""Hooks between the backward and the optimizer's step."""
BACKWARD_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")
"""Hooks between the forward and the backward."""
BATCH_HOOKS = {
    "training_step": (
        "on_train_batch_end",
        "on_train_batch_start",
        "on_before_batch_transfer",
        "on_after_batch_transfer",
        "lr_scheduler_step",
        *BACKWARD_HOOKS,
        *GRADIENT_HOOKS,
    ),
    "validation_step": ("on_validation_batch_end", "on_validation_batch_start"),
    "test_step": ("on_test_batch_end", "on_test_batch_start"),
    "predict_step": ("on_predict_batch_end", "on_predict_batch_start"),
}
"""Hooks that are called with each batch, by the name of the step."""
_LIBRARIES = (*(f"{package}." for package in PACKAGES), "lightning_holmes.")


def users_callbacks(callbacks: Iterable["pl.Callback"]) -> list["pl.Callback"]:
    """Return the callbacks whose hooks the user has written."""
    return [
        c
        for c in callbacks
        if isinstance(c, pl.callbacks.LambdaCallback) or not type(c).__module__.startswith(_LIBRARIES)
    ]


def overridden_hooks(
    module: "pl.LightningModule", callbacks: Iterable["pl.Callback"], hooks: Iterable[str]
) -> Iterator[tuple[Any, str]]:
    """Yield the owner and the name of each of ``hooks`` that the module, and then each of ``callbacks``, overrides."""
    hooks = tuple(hooks)
    owners: list[tuple[Any, Any]] = [(module, pl.LightningModule), *((callback, pl.Callback) for callback in callbacks)]
    for owner, base in owners:
        for hook in hooks:
            if hasattr(base, hook) and pl.utilities.model_helpers.is_overridden(hook, owner, base):
                yield owner, hook


def steps_whose_state_is_read(
    module: "pl.LightningModule", callbacks: Iterable["pl.Callback"], schedulers: Iterable[Any] = ()
) -> frozenset[str]:
    """Return the steps after which code of the user's runs each batch, and may read the state that the step has left on the module: a hook, or a
    function of a scheduler."""
    callbacks = users_callbacks(callbacks)
    steps = {step for step, hooks in BATCH_HOOKS.items() if any(overridden_hooks(module, callbacks, hooks))}
    return frozenset(steps | {"training_step"} if any(map(_knows_module, schedulers)) else steps)


def _knows_module(scheduler: Any) -> bool:
    """Return whether a scheduler holds a reference to a module or trainer, in a function, as ``LambdaLR(optimizer, lambda step: self.pace)`` does,
    or in a class of the user's. Its reads cannot be seen, and must give the state after the whole step."""
    found, waiting = {id(scheduler)}, [scheduler]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (nn.Module, pl.Trainer)):
            return True
        for inner in _held_by(value):
            if id(inner) not in found and not isinstance(inner, (str, int, float, Tensor, Optimizer)):
                found.add(id(inner))
                waiting.append(inner)
    return False


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        names = names_in(value.__code__) & value.__globals__.keys()
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]  # an empty one has none
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [*cells, *defaults, *(value.__globals__[name] for name in names)]
    if isinstance(value, (type, ModuleType)):
        return []
    return [*getattr(value, "__dict__", {}).values(), *_users_functions(type(value))]


def _users_functions(kind: type) -> list[Any]:
    """Return the functions that the user's classes among the bases of ``kind`` define, also behind properties and decorators."""
    own = [base for base in kind.__mro__ if not base.__module__.startswith((*_LIBRARIES, "torch.", "builtins"))]
    entries = [entry for base in own for entry in vars(base).values()]
    functions = [getattr(entry, "fget", None) or getattr(entry, "__func__", entry) for entry in entries]
    return [function for function in functions if isinstance(function, FunctionType)]


def takes_part_in_update(module: "pl.LightningModule", optimizers: Iterable[Optimizer]) -> bool:
    """Return whether code of the user's may run inside the optimizer's step, outside of hooks: in an ``optimizer_step`` that has called the
    closure, in an optimizer class that is not torch's, or in a step hook that is registered with an optimizer."""
    own = any(overridden_hooks(module, (), ("optimizer_step",)))
    return own or any(not type(o).__module__.startswith("torch.") or step_hooks(o) for o in optimizers)


def looks_at_checkpoints(module: "pl.LightningModule") -> bool:
    """Return whether a callback or the module reads a checkpoint's values before they are written, or replaces them."""
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    # it replaces the values by its average
    if any(isinstance(callback, pl.callbacks.WeightAveraging) for callback in callbacks):
        return True
    return any(_checkpoint_hooks(module))


def _checkpoint_hooks(module: "pl.LightningModule") -> Iterator[tuple[Any, str]]:
    callbacks = users_callbacks(module.trainer.callbacks)  # type: ignore[attr-defined]
    return overridden_hooks(module, callbacks, ["on_save_checkpoint"])


def warn_of_parts(module: "pl.LightningModule") -> None:
    """Warn for each on_save_checkpoint hook that it sees only this rank's part of the parameters; harmless if the hook does not read them."""
    for owner, hook in _checkpoint_hooks(module):
        pl.utilities.rank_zero_warn(
            f"{type(owner).__name__}.{hook} is shown the parameters of this rank's own stages in checkpoint['state_dict'], since each rank "
            f"writes its part of the folder. What it computes from all of them, such as a sum, needs save_distributed_checkpoint=False"
        )
