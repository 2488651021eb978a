"""Switches: settings of a module and its optimizers that hooks change in mid-run and that a checkpoint does not contain: which parameters are
frozen, which modules are in eval mode, which norms track no statistics; and the groups that were added to an optimizer.

A snapshot contains them, so that a resumed run has them even if the hook that has changed them is not called again: Lightning calls
on_train_epoch_start, in which BaseFinetuning changes them, only when an epoch begins.

    switches = Switches(lambda: fit.pipeline, loaded_state)
    saved = switches.read()             # between two batches
    switches.put(saved)                 # before the first batch of a resumed run
"""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.strategy.loaded_state import LoadedState

Saved = Mapping[str, Sequence[str]]
"""The names of parameters or modules that have a setting off, by the name of the setting (an attribute such as ``requires_grad``)."""


class Switches:
    """Reads and restores the switches of a fit.

    Args:
        pipeline: returns the fit's module.
        loaded_state: keeps the optimizers' states, with their groups, until the first batch.
    """

    def __init__(self, pipeline: Callable[[], PipelineModule], loaded_state: LoadedState) -> None:
        self._pipeline, self._loaded_state = pipeline, loaded_state

    def read(self) -> Saved:
        """Return which switches are off now."""
        modules = self._modules
        return {
            "requires_grad": [name for name, p in self._parameters.items() if not p.requires_grad],
            "training": [name for name, module in modules.items() if not module.training],
            "track_running_stats": [n for n, m in modules.items() if getattr(m, "track_running_stats", None) is False],
        }

    def put(self, saved: Saved) -> None:
        """Restore ``saved``, and add the groups with which the optimizers were saved."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad == (name in saved["requires_grad"]):
                parameter.requires_grad_(name not in saved["requires_grad"])
        for name, module in self._modules.items():
            module.training = name not in saved["training"]
            if hasattr(module, "track_running_stats"):
                vars(module)["track_running_stats"] = name not in saved["track_running_stats"]
        self._loaded_state.put_groups(self._parameters)

    @property
    def _parameters(self) -> Mapping[str, nn.Parameter]:
        return self._pipeline().parameters

    @property
    def _modules(self) -> Mapping[str, nn.Module]:
        return dict(self._pipeline().module.named_modules())
