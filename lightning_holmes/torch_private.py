"""Everything of torch that this package uses and torch does not document; tests/test_torch_private.py fails when it changes.

No other file imports a name with a leading underscore from torch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TorchDispatchMode",
    "default_store",
    "is_batch_norm",
    "operator_name",
    "tensor_version",
    "written_arguments",
]


def default_store() -> Any:
    """The key-value store with which the default process group was formed."""
    return dist.distributed_c10d._get_default_store()


def operator_name(operator: Any) -> str:
    """The qualified name of an operator seen by a dispatch mode, without its overload: ``aten::add``."""
    name: str = operator._schema.name
    return name


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments which an operator changes in place; batch norms do not declare that they change their statistics."""
    given = {
        a.name: kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(operator._schema.arguments)
    }
    normalises = "batch_norm" in operator._schema.name and bool(given.get("training", given.get("train")))
    for argument in operator._schema.arguments:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or (normalises and argument.name in ("running_mean", "running_var")):
            yield given[argument.name]


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises by the statistics of its batch, in any number of dimensions."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def is_dropout(module: nn.Module) -> bool:
    """Whether a module drops values at random in training, in any number of dimensions."""
    return isinstance(module, torch.nn.modules.dropout._DropoutNd)


def tensor_version(tensor: Tensor) -> int:
    """A number that grows when a tensor is changed in place; inference tensors count none and give their address."""
    return tensor.data_ptr() if tensor.is_inference() else tensor._version
