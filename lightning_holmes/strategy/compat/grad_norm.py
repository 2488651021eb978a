"""Lightning's ``grad_norm`` for ranks that have the gradients of their own stages only: they exchange norms, not gradients.

Users import the function into their own files, so it stays the same object, and its code is replaced while a pipeline fits.

    with exchanging_norms(tripwires.norms, pipeline.name_of): ...
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_holmes.lightning_package import pl
from lightning_holmes.strategy.compat.replacements import Replacements

grad_norm: Any = pl.utilities.grad_norm
_own: Any = FunctionType(grad_norm.__code__, grad_norm.__globals__)


@contextmanager
def exchanging_norms(
    norms: Callable[[float], Mapping[str, float] | None], name_of: Callable[[nn.Parameter, str], str]
) -> Iterator[None]:
    """Inside, Lightning's ``grad_norm`` gives the norms over all stages, in hooks of the user.

    Args:
        norms: returns the norm of each gradient of all stages, of a given type, by the parameter's name; None: gradients are read as they are.
        name_of: returns the global name of a parameter, or a default.
    """

    def of_all_stages(module: nn.Module, norm_type: float | int | str, group_separator: str) -> dict[str, Tensor]:
        kind = float(norm_type)
        found = norms(kind) if kind > 0 else None
        if found is None:
            return _own(module, norm_type, group_separator)  # type: ignore[no-any-return]
        values = {}
        for name, parameter in module.named_parameters():
            known = name_of(parameter, "")
            if known in found:
                values[name] = torch.tensor(found[known])
            elif not known and parameter.grad is not None:  # of another module
                values[name] = parameter.grad.norm(kind)
        named = {f"grad_{kind}_norm{group_separator}{name}": value for name, value in values.items()}
        if named:
            named[f"grad_{kind}_norm_total"] = torch.tensor(list(named.values())).norm(kind)
        return named

    with Replacements() as run:
        run.replace(grad_norm, of_all_stages=of_all_stages)
        run.callback(setattr, grad_norm, "__code__", grad_norm.__code__)
        grad_norm.__code__ = _forward.__code__
        yield


def _forward(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> Any:
    """Stand in for the code of ``grad_norm``, whose module has that name, too."""
    return grad_norm.of_all_stages(module, norm_type, group_separator)
