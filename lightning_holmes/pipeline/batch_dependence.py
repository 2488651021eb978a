"""Losses that depend on which samples are together, and so cannot equal the whole batch when it is assigned.

Batch normalisation, negatives taken from the batch, means over tokens with padding: no splitting is exact
for them, by any library. They are found by trying: the loss of a few samples together against the weighted
mean of the losses of their halves, without dropout, on a copy of the module.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_private import set_trainer, trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import BatchSplitter, weighted_mean
from lightning_holmes.pipeline.runner import loss_of
from lightning_holmes.pipeline.seeds import preserved_random_state, seed_all
from lightning_holmes.pipeline.shadow import shadow_copy
from lightning_holmes.torch_private import is_batch_norm, is_dropout

_SAMPLES = 4
_TOLERANCE = 1e-4


def describe_batch_dependence(
    module: LightningModule,
    batch: Any,
    arguments: tuple[Any, ...],
    splitter: BatchSplitter,
    *,
    context: Callable[[], Any] | None = None,
) -> str | None:
    """Why dealing a batch out changes the loss of ``module``, as a sentence that names the cause; None if it does not.

    A step that draws random numbers beside dropout (noise, time steps) cannot be judged and gives None.
    """
    norms = [name for name, m in module.named_modules() if is_batch_norm(m) and m.training]
    name = type(module).__name__
    if norms:
        shown = ", ".join(norms[:3]) + (f" and {len(norms) - 3} more" if len(norms) > 3 else "")
        return (
            f"{name} has batch normalisation ({shown}): its statistics run over a microbatch, so results equal those of "
            f"plain Lightning with the microbatch as batch, not with the whole batch; GroupNorm and LayerNorm are exact"
        )
    try:
        size = splitter.batch_size(batch)
    except UnsupportedModuleError:  # the module's own split_batch reads it
        return None
    count = min(_SAMPLES, size)
    if count < 2:
        return None
    small = splitter.split(batch, -(-size // count))[0]
    halves = splitter.split(small, 2)
    sizes = [splitter.batch_size(h) for h in halves]
    weigh = getattr(module, "microbatch_weight", None)
    weights = [float(weigh(h)) for h in halves] if callable(weigh) else [float(s) for s in sizes]

    def loss(part: Any, seed: int) -> Tensor:
        copy = shadow_copy(module)
        for submodule in copy.modules():
            if is_dropout(submodule):
                submodule.eval()
        set_trainer(copy, trainer_of(module))
        vars(copy)["log"] = lambda *_, **__: None
        seed_all(seed, part_device)
        with torch.no_grad(), context() if context is not None else nullcontext():
            return loss_of(
                copy.training_step(tree.map_tensors(Tensor.clone, part), *arguments), "training_step"
            ).double()

    part_device = next((t.device for t in tree.tensors_of(small)), torch.device("cpu"))
    with preserved_random_state(part_device):
        together, again = loss(small, 1), loss(small, 2)
        if not torch.equal(together, again) or not bool(together.isfinite().all()):
            return None
        apart = weighted_mean([loss(h, 1) for h in halves], weights)
    gap = float((apart - together).abs().max() / together.abs().max().clamp_min(1e-12))
    if gap <= _TOLERANCE:
        return None
    return (
        f"the loss of {name} over {sum(sizes)} samples is {float(together):.6g}, the mean over their halves "
        f"{float(apart):.6g}: it depends on which samples are together, as with negatives taken from the batch or a mean "
        f"over tokens with padding. Microbatches then give the numbers of plain Lightning with the microbatch as batch; "
        f"for a mean over tokens define `microbatch_weight(self, batch)`, the number of tokens, or use num_microbatches=1"
    )
