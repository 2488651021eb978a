"""Which hooks of a run the user has written: those that the module or a callback has of its own; and what else of the user's runs between them.

for owner, hook in overridden_hooks(module, callbacks):       # (module, "on_after_backward"), ...
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.torch_private import step_hooks

GRADIENT_HOOKS = ("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step", "optimizer_step")
"""Between the backward and the optimizer's step."""
BACKWARD_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")
"""Between the forward and the backward."""
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
"""Called with each batch of a step."""
_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_holmes.")


def users_callbacks(callbacks: Iterable["pl.Callback"]) -> list["pl.Callback"]:
    """The callbacks whose hooks the user has written."""
    return [c for c in callbacks if isinstance(c, LambdaCallback) or not type(c).__module__.startswith(_LIBRARIES)]


def overridden_hooks(
    module: "pl.LightningModule", callbacks: Iterable["pl.Callback"], hooks: Iterable[str]
) -> Iterator[tuple[Any, str]]:
    """Those of ``hooks`` that the module, then each of ``callbacks``, has of its own: whose, and its name."""
    hooks = tuple(hooks)
    owners: list[tuple[Any, Any]] = [(module, pl.LightningModule), *((callback, pl.Callback) for callback in callbacks)]
    for owner, base in owners:
        for hook in hooks:
            if hasattr(base, hook) and is_overridden(hook, owner, base):
                yield owner, hook


def steps_whose_state_is_read(
    module: "pl.LightningModule", callbacks: Iterable["pl.Callback"], schedulers: Iterable[Any] = ()
) -> frozenset[str]:
    """The steps after which code of the user's runs each batch, and may read what the step left on the module: a hook, or a function of
    a scheduler's."""
    callbacks = users_callbacks(callbacks)
    steps = {step for step, hooks in BATCH_HOOKS.items() if any(overridden_hooks(module, callbacks, hooks))}
    return frozenset(steps | {"training_step"} if any(map(_knows_module, schedulers)) else steps)


def _knows_module(scheduler: Any) -> bool:
    """Whether functions of a scheduler's do, as ``LambdaLR(optimizer, lambda step: self.pace)`` does, or methods of a class of the user's:
    what they read there cannot be seen, and is to be that of the whole step."""
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
        names = _names_in(value.__code__) & value.__globals__.keys()
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]  # an empty one has none
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [*cells, *defaults, *(value.__globals__[name] for name in names)]
    if isinstance(value, (type, ModuleType)):
        return []
    return [*getattr(value, "__dict__", {}).values(), *_users_functions(type(value))]


def _names_in(code: CodeType) -> set[str]:
    """What a function and those inside of it name."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _users_functions(kind: type) -> list[Any]:
    """What the user's classes among the bases of ``kind`` define, also behind properties and decorators."""
    own = [base for base in kind.__mro__ if not base.__module__.startswith((*_LIBRARIES, "torch.", "builtins"))]
    entries = [entry for base in own for entry in vars(base).values()]
    functions = [getattr(entry, "fget", None) or getattr(entry, "__func__", entry) for entry in entries]
    return [function for function in functions if isinstance(function, FunctionType)]


def takes_part_in_update(module: "pl.LightningModule", optimizers: Iterable[Optimizer]) -> bool:
    """Whether code of the user's may run inside of the optimizer's step, where no hook begins: in an ``optimizer_step`` that has called the
    closure, in an optimizer of another class than torch's, or in what is registered with one."""
    own = any(overridden_hooks(module, (), ("optimizer_step",)))
    return own or any(not type(o).__module__.startswith("torch.") or step_hooks(o) for o in optimizers)


def looks_at_checkpoints(module: "pl.LightningModule") -> bool:
    """Whether somebody reads a checkpoint's values before they are written, or puts others in their place."""
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, WeightAveraging) for callback in callbacks):  # it puts its average there
        return True
    return any(_checkpoint_hooks(module))


def _checkpoint_hooks(module: "pl.LightningModule") -> Iterator[tuple[Any, str]]:
    callbacks = users_callbacks(module.trainer.callbacks)  # type: ignore[attr-defined]
    return overridden_hooks(module, callbacks, ["on_save_checkpoint"])


def warn_of_parts(module: "pl.LightningModule") -> None:
    """Each rank of a pipeline writes its part of a folder, and hooks see that; where nobody reads values, nothing is wrong."""
    for owner, hook in _checkpoint_hooks(module):
        rank_zero_warn(
            f"{type(owner).__name__}.{hook} is shown the parameters of this rank's own stages in checkpoint['state_dict'], since each rank "
            f"writes its part of the folder. What it computes from all of them, such as a sum, needs save_distributed_checkpoint=False"
        )
