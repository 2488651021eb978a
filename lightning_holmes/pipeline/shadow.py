"""Copies of a module that can be run without leaving a trace on the module itself."""

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_holmes.comm.absent import detached
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import TRAINER
from lightning_holmes.pipeline import tree
from lightning_holmes.torch_private import fake_mode_of, registered_modules, registered_parameters

_CONTAINERS = frozenset((dict, OrderedDict, list, set))
"""Classes of which each submodule has a dozen empty containers, for hooks; deepcopy of these would be most of the
cost of a copy."""


def shadow_copy(module: pl.LightningModule) -> pl.LightningModule:
    """A deep copy of ``module`` that shares its parameters, data sets and loaders, and whatever cannot be copied.

    Its metrics do not synchronise between ranks, because not every rank runs the copy.
    """
    copied = _copy(module)
    for part in copied.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = never
    return copied


def never() -> bool:
    """A metric's ``distributed_available_fn`` that lets it gather nothing."""
    return False


def _copy(module: pl.LightningModule) -> pl.LightningModule:
    memo: dict[int, Any] = {id(p): p for p in module.parameters()}
    looked: set[int] = set()  # parts of a module share their configuration
    for submodule in module.modules():
        for value in vars(submodule).values():
            if id(value) in looked:
                continue
            if type(value) in _CONTAINERS and not value and not getattr(value, "__dict__", None):
                memo[id(value)] = type(value)()
                continue
            if tree.is_empty(value):
                continue
            looked.add(id(value))
            if isinstance(value, (Dataset, DataLoader, DeviceMesh)):
                memo[id(value)] = value
            elif isinstance(value, torch.Generator):  # deepcopy cannot copy one
                memo[id(value)] = value.clone_state()
            # deepcopy of a fake tensor copies memory that it does not have, and damages the heap (torch 2.13)
            memo |= {id(t): t for t in tree.tensors_of(value) if fake_mode_of(t) is not None}
    try:
        whole = dict(memo)
        return _rebind_functions(copy.deepcopy(module, whole), whole)
    except Exception:
        for submodule in module.modules():
            for key, value in vars(submodule).items():
                shared = (registered_modules(submodule), registered_parameters(submodule))
                if key == TRAINER or any(value is one for one in shared):
                    continue
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    memo[id(value)] = value
        return _rebind_functions(copy.deepcopy(module, memo), memo)


def _rebind_functions(module: pl.LightningModule, memo: dict[int, Any]) -> pl.LightningModule:
    """Make hooks and functions kept on the copied ``module`` refer to the copies: deepcopy does not copy closures."""

    def rebind(value: Any) -> Any:
        if isinstance(value, types.MethodType):
            owner = rebind(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if not isinstance(value, types.FunctionType):
            return memo.get(id(value), value)
        if id(value) in memo and memo[id(value)] is not value:
            return memo[id(value)]
        memo[id(value)] = value
        cells = []
        for cell in value.__closure__ or ():
            try:
                new = rebind(cell.cell_contents)
            except ValueError:  # an empty cell
                cells.append(cell)
                continue
            cells.append(cell if new is cell.cell_contents else types.CellType(new))
        defaults = tuple(rebind(d) for d in value.__defaults__ or ())
        same = all(a is b for a, b in zip(cells, value.__closure__ or (), strict=True)) and all(
            a is b for a, b in zip(defaults, value.__defaults__ or (), strict=True)
        )
        if not same:
            new = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults or None, tuple(cells))
            new.__kwdefaults__ = value.__kwdefaults__
            vars(new).update(vars(value))
            memo[id(value)] = new
        return memo[id(value)]

    for submodule in module.modules():
        for key, value in list(vars(submodule).items()):
            if isinstance(value, (types.FunctionType, types.MethodType)):
                vars(submodule)[key] = rebind(value)
            elif "hooks" in key and isinstance(value, dict):
                for handle, hook in value.items():
                    value[handle] = rebind(hook)
    return module


def with_own_gradients(shadow: pl.LightningModule) -> pl.LightningModule:
    """Give ``shadow`` its own parameters in the same memory, so that a backward leaves no gradient on the module's."""
    replace_parameters(shadow, lambda p: nn.Parameter(detached(p), requires_grad=p.requires_grad))
    return shadow


def replace_parameters(shadow: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace every parameter by what ``make`` returns for it; a tied parameter stays tied."""
    made: dict[int, nn.Parameter] = {}
    kept = []
    for submodule in shadow.modules():
        for name, parameter in list(submodule.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                kept.append(parameter)
                made[id(parameter)] = make(parameter)
            setattr(submodule, name, made[id(parameter)])
