"""Lightning's ``grad_norm`` where a rank has the gradients of its own stages only.

People import the function into their own files, so it is exchanged there while a pipeline fits. Every rank must call it
(in a hook that runs on all of them, as on_before_optimizer_step does).

    with GradNormExchange([module, *callbacks], pipeline, group): ...
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm as lightnings_grad_norm
from torch import Tensor, nn
from typing_extensions import Self

from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.strategy.compat.replacements import Replacements


class GradNormExchange(Replacements):
    """Inside, a ``grad_norm`` over all stages stands in place of Lightning's wherever the user's code has it.

    Args:
        users: the module, callbacks: objects whose classes' files may have imported it.
        group: the ranks of the pipeline.
    """

    def __init__(self, users: Iterable[Any], pipeline: PipelineModule, group: dist.ProcessGroup) -> None:
        super().__init__()
        files = {parent.__module__ for user in users for parent in type(user).__mro__}
        files |= {part.__module__ for part in map(type, pipeline.module.modules())}
        files |= {"lightning.pytorch.utilities", "lightning.pytorch.utilities.grads", "__main__"}
        self._files = sorted(
            name for name in files if not name.startswith(("torch.", "lightning_holmes.strategy.compat.grad_norm"))
        )
        self._pipeline = pipeline
        self._group = group

    def __enter__(self) -> Self:
        for module in [sys.modules[file] for file in self._files if file in sys.modules]:
            names = [name for name, value in vars(module).items() if value is lightnings_grad_norm]
            self.replace(module, **dict.fromkeys(names, self.grad_norm))
        return self

    def grad_norm(
        self, module: nn.Module, norm_type: float | int | str, group_separator: str = "/"
    ) -> dict[str, Tensor]:
        """As Lightning's: the norm of each parameter's gradient, and of all together, over all stages."""
        norm_type = float(norm_type)
        if norm_type <= 0:
            raise ValueError(f"norm_type={norm_type!r}: give a positive number or 'inf' (infinity norm)")
        names = {id(p): n for n, p in self._pipeline.module.named_parameters()}
        parameters = dict(module.named_parameters())
        mine = {
            name: float(parameter.grad.data.norm(norm_type))
            for name, parameter in parameters.items()
            if parameter.grad is not None
            and (id(parameter) not in names or self._pipeline.is_owner(names[id(parameter)]))
        }
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        found = {name: value for norms in everyone for name, value in norms.items()}
        norms = {
            f"grad_{norm_type}_norm{group_separator}{name}": torch.tensor(found[name])
            for name in parameters
            if name in found
        }
        if norms:
            norms[f"grad_{norm_type}_norm_total"] = torch.tensor(list(norms.values())).norm(norm_type)
        return norms
