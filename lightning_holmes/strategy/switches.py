"""Switches: settings of a module that hooks change in mid-run and that a checkpoint does not contain: which parameters are frozen, which modules
are in eval mode, which norms track no statistics.

A snapshot contains them, so that a resumed run has them even if the hook that has changed them is not called again: Lightning calls
on_train_epoch_start, in which BaseFinetuning changes them, only when an epoch begins.

    saved = read_switches(fit.pipeline)         # between two batches
    put_switches(fit.pipeline, saved)           # before the first batch of a resumed run
"""

from collections.abc import Mapping, Sequence

from lightning_holmes.pipeline.stage import PipelineModule

Switches = Mapping[str, Sequence[str]]
"""The names of parameters or modules that have a setting off, by the name of the setting (an attribute such as ``requires_grad``)."""


def read_switches(pipeline: PipelineModule) -> Switches:
    """Return which switches are off now."""
    modules = list(pipeline.module.named_modules())
    return {
        "requires_grad": [name for name, p in pipeline.parameters.items() if not p.requires_grad],
        "training": [name for name, module in modules if not module.training],
        "track_running_stats": [n for n, m in modules if getattr(m, "track_running_stats", None) is False],
    }


def put_switches(pipeline: PipelineModule, saved: Switches) -> None:
    """Restore ``saved``."""
    for name, parameter in pipeline.parameters.items():
        if parameter.requires_grad == (name in saved["requires_grad"]):
            parameter.requires_grad_(name not in saved["requires_grad"])
    for name, module in pipeline.module.named_modules():
        module.training = name not in saved["training"]
        if hasattr(module, "track_running_stats"):
            vars(module)["track_running_stats"] = name not in saved["track_running_stats"]
