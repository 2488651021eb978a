"""Switches: what hooks change of a module and its optimizers in mid-run, and a checkpoint has not: which parameters are frozen, which modules
evaluate, which norms keep no statistics; and the groups that an optimizer was given.

A snapshot has them, so that a run goes on with them where a hook that has switched them is not called again: Lightning calls on_train_epoch_start,
by which BaseFinetuning does it, only when an epoch begins.

    switches = Switches(lambda: fit.pipeline, resumption)
    saved = switches.read()             # between two batches
    switches.put(saved)                 # before the first batch of a run that goes on
"""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.strategy.resuming import Resumption

Saved = Mapping[str, Sequence[str]]
"""Names, by what is off."""


class Switches:
    """Of a fit.

    Args:
        pipeline: gives its module.
        resumption: has the optimizers' states, with their groups, until the first batch.
    """

    def __init__(self, pipeline: Callable[[], PipelineModule], resumption: Resumption) -> None:
        self._pipeline, self._resumption = pipeline, resumption

    def read(self) -> Saved:
        """What is off now."""
        modules = self._modules
        return {
            "requires_grad": [name for name, p in self._parameters.items() if not p.requires_grad],
            "training": [name for name, module in modules.items() if not module.training],
            "track_running_stats": [n for n, m in modules.items() if getattr(m, "track_running_stats", None) is False],
        }

    def put(self, saved: Saved) -> None:
        """Switch to that, and give the optimizers the groups with which they were saved."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad == (name in saved["requires_grad"]):
                parameter.requires_grad_(name not in saved["requires_grad"])
        for name, module in self._modules.items():
            module.training = name not in saved["training"]
            if hasattr(module, "track_running_stats"):
                vars(module)["track_running_stats"] = name not in saved["track_running_stats"]
        self._resumption.put_groups(self._parameters)

    @property
    def _parameters(self) -> Mapping[str, nn.Parameter]:
        return self._pipeline().parameters

    @property
    def _modules(self) -> Mapping[str, nn.Module]:
        return dict(self._pipeline().module.named_modules())
