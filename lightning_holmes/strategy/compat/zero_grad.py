"""Refuses an ``optimizer_zero_grad`` that keeps gradients: plain Lightning would add the next batch's gradients to them, but this strategy begins
anew with each batch.

with refusing_kept_gradients(module, True, run.lifted): ...
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.replacements import Replacements


@contextmanager
def refusing_kept_gradients(
    module: "pl.LightningModule", has_parameters: bool, lifted: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Inside, each call of the ``optimizer_zero_grad`` hook of ``module`` is checked, if the user has overridden it.

    Args:
        has_parameters: whether the optimizer's parameters are on this rank; if not, the hook is only checked for a call of zero_grad.
        lifted: returns a context for the strategy's own writes to gradients inside a hook (tripwires.py).
    """
    own = module.optimizer_zero_grad

    def watched(epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        called = False

        def noting(zero_grad: Callable[..., Any]) -> Callable[..., Any]:
            def note(*args: Any, **kwargs: Any) -> None:
                nonlocal called
                called = True
                zero_grad(*args, **kwargs)

            return note

        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        witness = min(parameters, key=torch.numel) if parameters and has_parameters else None
        with Replacements() as once:
            once.replace(optimizer, zero_grad=noting(optimizer.zero_grad))
            once.replace(module, zero_grad=noting(module.zero_grad))
            if witness is not None:
                with lifted():
                    has_gradient = witness.grad is not None
                    witness.grad = witness.grad if has_gradient else torch.ones_like(witness)
            own(epoch, batch_idx, optimizer)
        if witness is not None:
            with lifted():
                called = called or witness.grad is None or not bool(witness.grad.any())
                witness.grad = witness.grad if has_gradient else None
        if not called:
            raise UnsupportedModuleError(
                f"optimizer_zero_grad of {type(module).__name__} was not seen to empty the gradients before batch {batch_idx}: sums of "
                f"gradients over batches are not kept so; call optimizer.zero_grad() in it, and use Trainer(accumulate_grad_batches=...) for sums"
            )

    with Replacements() as run:
        if pl.utilities.model_helpers.is_overridden("optimizer_zero_grad", module):
            run.replace(module, optimizer_zero_grad=watched)
        yield
