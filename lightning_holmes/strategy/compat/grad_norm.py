"""Lightning's ``grad_norm`` for ranks that have the gradients of their own stages only.

Users import the function into their own files, so it is replaced there while a pipeline fits. If it is not found
there, tripwires.py brings all gradients, which is exact, too, but sends more. Every rank must call the function (in a hook that runs
on all ranks, such as on_before_optimizer_step).

    with GradNormExchange(pipeline, group, run.lifted): ...
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm.objects import all_gather_values
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.strategy.compat.replacements import Replacements

_WITHOUT_LIGHTNING = sys.stdlib_module_names | {"torch", "numpy", "sympy", "mpmath"}
"""Packages that never import from Lightning, but make up half of all modules. A user's file with one of these names is left to the tripwires."""
_searched: dict[str, tuple[int, int]] = {}
"""Modules in which the function was not found, each with its id and number of names, since searching all modules takes 8 ms a fit. A module that
assigns the function to an existing name afterwards is left to the tripwires."""


class GradNormExchange(Replacements):
    """Inside, Lightning's ``grad_norm`` is replaced by one over all stages in all modules that have imported it.

    Args:
        group: the process group of the pipeline.
        lifted: returns a context for the strategy's own work inside a hook (tripwires.py).
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        group: dist.ProcessGroup,
        lifted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._group = group
        self._lifted = lifted

    def __enter__(self) -> Self:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in _WITHOUT_LIGHTNING:
                continue
            held = getattr(module, "__dict__", {})  # entries of sys.modules need not be modules
            seen = id(module), len(held)
            if _searched.get(name) == seen:
                continue
            names = [key for key, value in dict(held).items() if value is pl.utilities.grad_norm]
            if names and name != __name__:
                self.replace(module, **dict.fromkeys(names, self.grad_norm))
            else:
                _searched[name] = seen
        return self

    def grad_norm(
        self, module: nn.Module, norm_type: float | int | str, group_separator: str = "/"
    ) -> dict[str, Tensor]:
        """Return, as Lightning's function does, the norm of each parameter's gradient and of all gradients together, over all stages. All ranks of
        the pipeline must call."""
        norm_type = float(norm_type)
        if norm_type <= 0:
            raise ValueError(f"norm_type={norm_type!r}: give a positive number or 'inf' (infinity norm)")
        parameters = dict(module.named_parameters())
        with self._lifted():
            mine = {
                name: float(parameter.grad.data.norm(norm_type))
                for name, parameter in parameters.items()
                if parameter.grad is not None and self._owns(parameter)
            }
            everyone = all_gather_values(mine, self._group)
        found = {name: value for norms in everyone for name, value in norms.items()}
        norms = {
            f"grad_{norm_type}_norm{group_separator}{name}": torch.tensor(found[name])
            for name in parameters
            if name in found
        }
        if norms:
            norms[f"grad_{norm_type}_norm_total"] = torch.tensor(list(norms.values())).norm(norm_type)
        return norms

    def _owns(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank contributes the parameter's norm; every rank does for a parameter that is not the module's."""
        name = self._pipeline.name_of(parameter, "")
        return not name or self._pipeline.is_owner(name)
