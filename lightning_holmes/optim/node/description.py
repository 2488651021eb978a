"""The description that workers send to an optimizer node: its parameters, and the optimizer that steps them. Plain data.

told = describe_optimizer(optimizer, names, marks)            # on a worker
kind = find_class(told, may_import=True)                      # on the node
twin = build_optimizer(kind, told, parameters)
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.torch_private import holds_hooks

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_NOT_OPTIONS = ("params", "param_names")
_NOT_ATTRIBUTES = ("state", "param_groups", "defaults", "step")


def check_plain(value: Any, what: str) -> None:
    """Refuse a value that cannot be sent as plain data, or contains a tensor.

    Raises:
        ConfigurationError: names the value by ``what``.
    """
    if isinstance(value, Tensor):
        raise ConfigurationError(f"{what} is a tensor, and only plain numbers are sent to optimizer nodes; use a float")
    if type(value) in (list, tuple, set, dict):
        for each in [*value, *value.values()] if isinstance(value, Mapping) else value:
            check_plain(each, what)
    elif type(value) not in _PLAIN:
        raise ConfigurationError(
            f"{what} = {value!r} is a {type(value).__name__}, and only plain values are sent to optimizer nodes"
        )


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, without its parameters.

    Raises:
        ConfigurationError: an option is not plain data.
    """
    found = [{k: v for k, v in group.items() if k not in _NOT_OPTIONS} for group in optimizer.param_groups]
    for number, options in enumerate(found):
        for key, value in options.items():
            check_plain(value, f"{type(optimizer).__name__}.param_groups[{number}][{key!r}]")
    return found


def describe_optimizer(
    optimizer: Optimizer, names: Sequence[Sequence[str]], marks: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe an optimizer, without its parameters and states.

    Args:
        names: the names of the parameters in each group.
        marks: attributes that were set on parameters, by name.

    Raises:
        ConfigurationError: the optimizer holds something that is not plain data, or its class is defined inside a function.
    """
    kind = type(optimizer)
    if "<locals>" in kind.__qualname__:
        raise ConfigurationError(
            f"the optimizer's class {kind.__qualname__} is defined inside a function, where an optimizer node cannot find it; "
            f"define it at the top of a module"
        )
    groups = options_of(optimizer)
    attributes = {}
    for name, value in vars(optimizer).items():
        if name not in _NOT_ATTRIBUTES and not holds_hooks(name):
            check_plain(value, f"{kind.__name__}.{name}")
            attributes[name] = value
    check_plain(optimizer.defaults, f"{kind.__name__}.defaults")
    for name, value in marks.items():
        check_plain(value, f"what is written on the parameter {name}")
    return {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "source": _source_of(kind),
        "attributes": attributes,
        "defaults": dict(optimizer.defaults),
        "groups": groups,
        "names": [list(of_group) for of_group in names],
        "marks": dict(marks),
    }


def find_class(told: Mapping[str, Any], *, may_import: bool) -> type[Optimizer]:
    """Find the optimizer's class.

    Args:
        may_import: whether to import its module; otherwise it must be imported already.

    Raises:
        ConfigurationError: this process does not have the class, or has another version of its source.
    """
    found: Any = sys.modules.get(told["module"])
    cause: ImportError | None = None
    if may_import and told["module"] != "__main__":
        try:
            found = importlib.import_module(told["module"])  # waits for a session that is importing it
        except ImportError as error:
            cause = error
    for part in told["name"].split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Optimizer):
        if _source_of(found) != told["source"]:
            raise ConfigurationError(
                f"the optimizer's class {told['module']}.{told['name']} reads otherwise on the optimizer node, in "
                f"{inspect.getsourcefile(found)}: give workers and nodes the same files"
            )
        return found
    raise ConfigurationError(
        f"the optimizer's class {told['module']}.{told['name']} is not known on the optimizer node"
        f"{'' if cause is None else f' ({cause})'}; define it in a module of its own, which the script imports"
    ) from cause


def _source_of(kind: type[Optimizer]) -> str | None:
    """Return a digest of the source of a class and its bases, without torch's own, for which versions are compared; None if the source
    is not available."""
    digest = hashlib.sha256()
    try:
        for each in kind.__mro__[:-1]:
            if each.__module__.partition(".")[0] != "torch":
                digest.update(inspect.getsource(each).encode())
    except (OSError, TypeError):  # typed into an interpreter
        return None
    return digest.hexdigest()


def build_optimizer(
    kind: type[Optimizer], told: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]
) -> Optimizer | None:
    """Make the optimizer that ``told`` describes, for those of its parameters that are in ``parameters``; None if there are none.

    The ``__init__`` of the class is not called, since the arguments of a user's class are unknown here.
    """
    groups = [
        {**options, "params": [parameters[n] for n in names if n in parameters]}
        for options, names in zip(told["groups"], told["names"], strict=True)
    ]
    if not any(group["params"] for group in groups):
        return None
    made: Optimizer = object.__new__(kind)
    Optimizer.__init__(made, groups, dict(told["defaults"]))
    vars(made).update(told["attributes"])
    return made


def may_fuse(kind: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether torch's fused kernel can be used for a group: the user has not chosen an implementation in ``options``, and the results
    are the same. In low precision the fused kernel rounds once, while other implementations round after each operation."""
    is_adam = kind in (torch.optim.Adam, torch.optim.AdamW)
    is_open = all(options.get(key, 0) is None for key in ("fused", "foreach"))
    is_plain = not any(options.get(key) for key in ("capturable", "differentiable"))
    return is_adam and is_open and is_plain and dtype in (torch.float32, torch.float64)
