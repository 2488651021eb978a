"""Gradient clipping over all stages, and what the hooks between backward and step do to whole gradients and to parameters.

with clipping(trainer.precision_plugin, host, run.lifted): ...
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_holmes.comm.label import labelled
from lightning_holmes.lightning_private import AFTER_CLOSURE, handles_unscaling
from lightning_holmes.optim.host import OptimizerHost
from lightning_holmes.optim.sharded_host import ShardedHost
from lightning_holmes.replacements import Replacements


@contextmanager
def clipping(plugin: Any, host: OptimizerHost, lifted: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, ``plugin`` clips by the norm over all stages, and hooks between backward and step can read and change whole gradients.

    Args:
        plugin: the trainer's precision plugin.
        lifted: returns a context for the host's work inside a hook (tripwires.py).
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        with lifted(), labelled(lambda: "holmes: clip gradients by norm"):
            host.clip_by_norm(plugin.main_params(optimizer), clip_val)

    def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        with lifted(), labelled(lambda: "holmes: clip gradients by value"):
            host.clip_by_value(plugin.main_params(optimizer), clip_val)

    with Replacements() as run:
        run.replace(plugin, clip_grad_by_norm=clip_grad_by_norm, clip_grad_by_value=clip_grad_by_value)
        if isinstance(host, ShardedHost):
            run.replace(plugin, **{AFTER_CLOSURE: _with_whole_gradients(plugin, host)})
        yield


def _with_whole_gradients(plugin: Any, host: ShardedHost) -> Callable[[Any, Any], None]:
    own, scaler = getattr(plugin, AFTER_CLOSURE), getattr(plugin, "scaler", None)

    def after_closure(model: Any, optimizer: Any) -> None:
        if scaler is not None and not handles_unscaling(optimizer):  # the scaler has unscaled the pieces of this rank
            host.unscaled(1.0 / scaler.get_scale())
        own(model, optimizer)
        host.absorb()
        host.adopt_values()

    return after_closure
