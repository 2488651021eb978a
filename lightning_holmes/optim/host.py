"""OptimizerHost: where optimizer.step() runs; it takes the reduced gradients, and computes their norm and clips them there.

    host.take_gradients(last=True)      # after the reduction: sets p.grad of the parameters, or of the pieces
    host.absorb()                       # after the user's hooks
    host.clip_by_norm(parameters, 1.0)

LocalHost steps whole parameters on every replica, ShardedHost (sharded_host.py) this replica's pieces; with RemoteHost (remote.py)
optimizer nodes step.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.errors import AnomalyError
from lightning_holmes.optim.bucket_reducer import BucketReducer
from lightning_holmes.optim.layered import LayeredReducer
from lightning_holmes.optim.loss_scale import LossScale
from lightning_holmes.optim.reducer import LocalReducer
from lightning_holmes.optim.shard_states import OwnedStates
from lightning_holmes.torch_private import clamp_all, multiply_all

_SHOWN = 5  # names in a message


class OptimizerHost:
    """The place where the optimizer of a run steps.

    All ranks must create one, with equal arguments, and call :meth:`take_gradients`, :meth:`norm` and the clipping methods together."""

    @property
    def shards(self) -> OwnedStates | None:
        """The owner of the optimizer's states; None if the optimizer steps whole parameters on this rank."""
        return None

    def take_gradients(self, *, last: bool, skipped: bool = False) -> None:
        """Give the accumulated gradients to the optimizer; after the ``last`` batch of a window they are reduced.

        ``skipped``: this batch had no backward; a loss scaler skips its step then, and no overflow is looked for."""
        raise NotImplementedError

    def absorb(self) -> None:
        """Take over changes that the user's hooks have made to ``p.grad``."""

    def loss_factor(self) -> float | Tensor:
        """Return the factor of the losses: the loss scale, or 1."""
        raise NotImplementedError

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the 2-norm over all stages of the gradients of ``parameters`` (this rank's), each element once; a scalar."""
        raise NotImplementedError

    def clip_by_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Scale all gradients so that their norm over all stages is at most ``max_norm``; ``parameters``: the optimizer's."""
        raise NotImplementedError

    def clip_by_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        """Clamp all gradients to within ``max_value``; ``parameters``: the optimizer's."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until all parameters have the values of the last step."""

    def abandon(self) -> None:
        """Stop waiting for other ranks, after the run has failed."""

    def close(self) -> None:
        """Give parameters memory of their own again, and remove hooks."""


class LocalHost(OptimizerHost):
    """The user's optimizer steps whole parameters, in the same way on every replica.

    Args:
        reducer: has the accumulated and reduced gradients.
        over: further groups whose ranks step different elements, beside those of stages and of a tensor group.
        is_owner: whether this rank's copy of a parameter, by name, is the one that counts in a norm.
        scaler: the scaler of ``precision="16-mixed"``, or None.
        place: this rank's stages in words, for messages.
    """

    def __init__(
        self,
        reducer: LocalReducer | BucketReducer | LayeredReducer,
        groups: ProcessGroups,
        *,
        is_owner: Callable[[str], bool],
        scaler: Any,
        place: str,
        over: Sequence[dist.ProcessGroup | None] = (),
    ) -> None:
        self._reducer = reducer
        self._groups = groups
        self._device = groups.builder.device
        self._is_owner = is_owner
        self._place = place
        self._over = (groups.pipeline, groups.tensor_parallel, *over)
        self._scale = None if scaler is None else LossScale(scaler, self._over, self._device)

    def take_gradients(self, *, last: bool, skipped: bool = False) -> None:
        """Set ``p.grad``; after the ``last`` batch of a window ranks agree on an overflow, or check for infinities if
        ``detect_anomaly`` is set."""
        self._assign(last=last)
        if not last or (skipped and self._scale is not None):
            return
        if self._scale is not None:
            self._scale.agree(tensor for _, tensor in self._owned())
        elif torch.is_anomaly_enabled():
            self._check_finite()

    def _check_finite(self) -> None:
        """Refuse infinities and NaN in reduced gradients.

        torch's anomaly mode checks for NaN after each operator; it does not detect an infinity, which becomes NaN in clipping or a
        later step, where its origin is no longer known.

        Raises:
            AnomalyError: with the names of the parameters.
        """
        gradients = ((name, dtensor.local_part(p.grad)) for name, p in self._owned() if p.grad is not None)
        values = ((name, g.coalesce().values() if g.is_sparse else g) for name, g in gradients)
        found = {name: gradient for name, gradient in values if not gradient.isfinite().all()}
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            kind = "NaN" if any(gradient.isnan().any() for gradient in found.values()) else "infinite"
            raise AnomalyError(
                f"detect_anomaly: {kind} in the summed gradients of {', '.join(list(found)[:_SHOWN])}{more} ({self._place}), though no "
                f"operator of the backward gave NaN: look for what overflows there, or for a hook that changes them"
            )

    def _assign(self, *, last: bool) -> None:
        self._reducer.show(self._reducer.reached())

    def _owned(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return what the optimizer steps on this rank, with the names of the parameters."""
        return self._reducer.parameters.items()

    def loss_factor(self) -> float | Tensor:
        return 1.0 if self._scale is None else self._scale.factor()

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        names = {id(p): name for name, p in self._reducer.parameters.items()}
        held = ((names[id(p)], p) for p in parameters if id(p) in names)
        return self._norm(held, (self._groups.pipeline, self._groups.tensor_parallel))

    def _norm(self, held: Iterable[tuple[str, nn.Parameter]], groups: Sequence[dist.ProcessGroup | None]) -> Tensor:
        """Return the 2-norm of the gradients of ``held`` over all ranks of ``groups``, whose ranks have different elements. Copies of a
        parameter count once: those of other stages, and in a tensor group."""
        first = self._groups.tensor_parallel is None or self._groups.tensor_parallel_rank == 0
        gradients = [
            dtensor.local_part(tensor.grad)
            for name, tensor in held
            if tensor.grad is not None
            and name
            and self._is_owner(name)
            and (first or dtensor.is_split(self._reducer.parameters[name]))
        ]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self._device)
        if all(group is None for group in groups):
            return norm
        squared = norm.to(self._device, torch.float32 if self._device.type == "mps" else torch.float64).square()
        for group in groups:
            if group is not None:
                dist.all_reduce(squared, group=group)
        return in_precision_of(self._reducer.parameters.values(), squared.sqrt())

    def clip_by_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        parameters = list(parameters)
        self.absorb()
        factor = torch.clamp(max_norm / (self._step_norm(parameters) + 1e-6), max=1.0)  # as torch does
        multiply_all(self._clipped(parameters), factor)
        self._note_shown()

    def clip_by_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        self.absorb()
        clamp_all(self._clipped(parameters), max_value)
        self._note_shown()

    def _step_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm by which gradients are clipped; ``parameters``: the optimizer's."""
        return self.norm(parameters)

    def _clipped(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return every gradient that clipping scales, each element once; ``parameters``: the optimizer's."""
        return [dtensor.local_part(p.grad) for p in parameters if p.grad is not None]

    def _note_shown(self) -> None:
        """Note that ``p.grad`` has been changed here, and not by a hook."""


def in_precision_of(parameters: Iterable[nn.Parameter], norm: Tensor) -> Tensor:
    """``norm`` in double precision if any of ``parameters`` is, else in single precision."""
    return norm if any(parameter.dtype is torch.float64 for parameter in parameters) else norm.float()
