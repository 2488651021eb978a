"""Whether a fit's parameters may live in shards: what would read them while they are not whole is refused by name.

check_parameter_sharding(found, optimizer, trainer)          # raises, with the reason and the cure
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch.optim import Optimizer

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.optim.elementwise import Separability
from lightning_holmes.strategy.sharding import refusal_of

_READ_PARAMETERS = (ModelPruning, StochasticWeightAveraging, WeightAveraging)


def check_parameter_sharding(found: Separability, optimizer: Optimizer, trainer: "pl.Trainer") -> None:
    """Refuse what cannot be exact where a rank holds shares.

    Raises:
        UnsupportedModuleError: names the callback, the hook or the optimizer.
    """
    reason = refusal_of(found, optimizer, trainer)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, _READ_PARAMETERS):
            reason = reason or f"the callback {type(callback).__name__} reads whole parameters between steps"
    if reason:
        raise UnsupportedModuleError(f"sharded_parameters=True: {reason}; use sharded_parameters=False")
