"""Lightning's ``grad_norm`` where a rank has the gradients of its own stages only.

People import the function into files of their own, so it is exchanged there while a pipeline fits; where it is not found
so, tripwires.py brings all gradients, which is exact, too, and sends more. Every rank must call it (in a hook that runs
on all of them, as on_before_optimizer_step does).

    with GradNormExchange(pipeline, group, run.lifted): ...
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm as lightnings_grad_norm
from torch import Tensor, nn

from lightning_holmes.comm.objects import all_gather_values
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.strategy.compat.replacements import Replacements

_WITHOUT_LIGHTNING = sys.stdlib_module_names | {"torch", "numpy", "sympy", "mpmath"}
"""Packages that have nothing of Lightning's, and half of all names. A user's file that is called as one of them is left to the tripwires."""
_searched: dict[str, tuple[int, int]] = {}
"""Modules in which it was not found, each with its identity and number of names: to look through all of them costs 8 ms a fit. Who puts it in the
place of another name afterwards is left to the tripwires."""


class GradNormExchange(Replacements):
    """Inside, a ``grad_norm`` over all stages stands in place of Lightning's wherever the user's code has it.

    Args:
        group: the ranks of the pipeline.
        lifted: around what is done where a hook has called for it.
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
            held = getattr(module, "__dict__", {})  # whatever stands for a module
            seen = id(module), len(held)
            if _searched.get(name) == seen:
                continue
            names = [key for key, value in dict(held).items() if value is lightnings_grad_norm]
            if names and name != __name__:
                self.replace(module, **dict.fromkeys(names, self.grad_norm))
            else:
                _searched[name] = seen
        return self

    def grad_norm(
        self, module: nn.Module, norm_type: float | int | str, group_separator: str = "/"
    ) -> dict[str, Tensor]:
        """As Lightning's: the norm of each parameter's gradient, and of all together, over all stages."""
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
        """Whether it counts on this rank; one that is none of the module's counts everywhere."""
        name = self._pipeline.name_of(parameter, "")
        return not name or self._pipeline.is_owner(name)
