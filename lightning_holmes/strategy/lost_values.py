"""Modules that have lost parameter values: a run has failed while this process held only a part of them, and no rank sends the rest.

note_lost(module, "each rank of a pipeline held the parameters of its own stages")      # warns
refuse_lost(module)                                                                     # at the next run
"""

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl

_CURE = "Go on from a checkpoint (ModelCheckpoint, or snapshot_every_n_steps)"
_LOST = "_holmes_lost_values"  # set on a module that has lost values


def note_lost(module: pl.LightningModule, held: str) -> None:
    """Mark ``module`` as having lost values in a failed run, and warn. ``held``: where the values were, in words after "the run has failed while"."""
    vars(module)[_LOST] = True
    pl.utilities.rank_zero_warn(
        f"the run has failed while {held}: parameters that this process did not hold whole are NaN now, where plain Lightning would keep their values. {_CURE}"
    )


def refuse_lost(module: pl.LightningModule) -> None:
    """Refuse to run a module that lost parameter values in an earlier, failed run, whose exception the user has caught.

    Raises:
        UnsupportedModuleError: the module has lost values.
    """
    if _LOST in vars(module):
        raise UnsupportedModuleError(
            f"parameters of {type(module).__name__} have been NaN since a run before has failed, in which each process held a part of them. "
            f"{_CURE}, with a new module, in new processes"
        )
