"""A check of parameters that every rank of a tensor group holds a copy of: their gradients must be equal on all ranks.

Parameters that ``parallelize_module`` leaves alone (embeddings, norms, a head) are ordinary tensors, whose gradients torch
does not sum over the tensor group. That is right if their inputs are whole on each rank. Between sharded activations (sequence
parallelism) each rank would have the gradient of its own part, and the copies would diverge without any error.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.errors import UnsupportedModuleError

_SAMPLES = 64  # elements of each gradient that are compared
_TOLERANCE = 1e-2  # of the largest value; low precision and other summation orders differ by less, gradients of other inputs by more


def check_replicated(
    parameters: Mapping[str, nn.Parameter],
    gradients: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Compare samples of the accumulated ``gradients`` of plain parameters, by name, over a tensor group; all its ranks must call.

    Raises:
        UnsupportedModuleError: on every rank of the group; names the first parameter whose gradients differ.
    """
    if group is None:
        return
    names = sorted(name for name, p in parameters.items() if p.requires_grad and not dtensor.is_dtensor(p))
    samples = torch.zeros(len(names), _SAMPLES, device=device)
    for row, name in zip(samples, names, strict=True):
        gradient = gradients.get(name)
        if gradient is not None and gradient.numel():
            flat = gradient.flatten()
            picked = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
            row[: picked.numel()] = picked
    everyone = [torch.empty_like(samples) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, samples, group=group)
    different = differing(names, everyone)
    if different:
        name, here, there = different[0]
        more = f" (and {len(different) - 1} more parameters)" if len(different) > 1 else ""
        raise UnsupportedModuleError(
            f"the gradients of {name}{more} differ between the ranks of a tensor group ({here:.6g} and {there:.6g} at one "
            f"place), but it is no DTensor, so each rank has its own copy and nothing adds them up: its inputs are a "
            f"rank's part. Include its module in parallelize_module (SequenceParallel() for norms between sharded "
            f"activations)"
        )


def differing(names: Sequence[str], everyone: Sequence[Tensor]) -> list[tuple[str, float, float]]:
    """Return the parameters in ``names`` whose samples differ: name, a value on one rank, the value at the same place on another.

    Args:
        everyone: the samples of each rank, (parameters, samples).
    """
    found: dict[str, tuple[float, float]] = {}
    largest = torch.stack([samples.abs().amax(dim=1) for samples in everyone]).amax(dim=0)
    for reference, other in ((everyone[0], samples) for samples in everyone[1:]):
        gaps = (reference - other).abs()
        for index in torch.nonzero(gaps.amax(dim=1) > _TOLERANCE * largest).flatten().tolist():
            place = int(gaps[index].argmax())
            found.setdefault(names[index], (float(reference[index, place]), float(other[index, place])))
    return [(name, *values) for name, values in found.items()]
