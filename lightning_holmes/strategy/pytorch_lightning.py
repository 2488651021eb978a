"""Refuses trainers of pytorch_lightning, the other name under which Lightning is published, with a message that says what to change.

pytorch_lightning is a copy of lightning.pytorch with its own classes, so that neither accepts a trainer, module or callback of the other. Its
trainer would refuse a HolmesStrategy as an invalid strategy name. Therefore the strategy is registered with pytorch_lightning, so that its
trainers accept the strategy, and reach the refusal here.

    introduce(HolmesStrategy)              # when this package is imported
    refuse_trainer(strategy.accelerator)   # when a trainer takes the strategy
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from lightning_holmes.errors import ConfigurationError

_NAME = "pytorch_lightning"
_STRATEGIES = f"{_NAME}.strategies"


def introduce(strategy: type) -> None:
    """Register ``strategy`` with pytorch_lightning, also as "holmes": now, or as soon as that package is imported."""
    if _STRATEGIES in sys.modules:
        _register(sys.modules[_STRATEGIES], strategy)
    else:
        sys.meta_path.insert(0, _Introduction(strategy))


class _Introduction(importlib.abc.MetaPathFinder):
    def __init__(self, strategy: type) -> None:
        self._strategy = strategy

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of pytorch_lightning's strategies, as the other finders find it, with the registration added; None for other modules."""
        if fullname != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module, self._strategy)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(strategies: ModuleType, strategy: type) -> None:
    strategies.Strategy.register(strategy)
    strategies.StrategyRegistry.register("holmes", strategy, description="refused: use lightning.pytorch")


def refuse_trainer(accelerator: object) -> None:
    """Refuse a trainer by its accelerator.

    Raises:
        ConfigurationError: the accelerator is pytorch_lightning's.
    """
    if any(base.__module__.split(".")[0] == _NAME for base in type(accelerator).__mro__):
        raise ConfigurationError(
            "this Trainer is pytorch_lightning's, and HolmesStrategy is a strategy of lightning.pytorch: the same code under "
            "two names, whose classes do not know each other. Write `import lightning.pytorch as pl` in place of `import "
            "pytorch_lightning as pl`, and likewise in every other import of pytorch_lightning, also where the module, "
            "its data and its callbacks are defined"
        )
