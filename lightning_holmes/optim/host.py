"""OptimizerHost: where optimizer.step() runs; it takes the reduced gradients, and computes their norm and clips them there.

    host.take_gradients(last=True)      # after the reduction: sets p.grad of the parameters, or of the pieces
    host.absorb()                       # after the user's hooks
    host.clip_by_norm(parameters, 1.0)

LocalHost steps whole parameters on every replica, ShardedHost this replica's pieces; with RemoteHost (remote.py) optimizer nodes step.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.optim.clip import (
    clip_by_norm,
    clip_by_value,
    clip_parts_by_norm,
    clip_parts_by_value,
    global_grad_norm,
    norm_over_groups,
)
from lightning_holmes.optim.finite import check_finite
from lightning_holmes.optim.loss_scale import LossScale
from lightning_holmes.optim.shard_states import OwnedStates
from lightning_holmes.optim.sharded import ShardedOptimizer


class GatheredGradients(Protocol):
    """Accumulated and reduced gradients, for a host: a reducer."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters, by name."""

    def reached(self) -> frozenset[str]:
        """Return the names of the parameters that have a gradient: after the last batch of a window on some replica."""

    def show(self, names: Collection[str]) -> None:
        """Set ``p.grad`` of the parameters ``names`` to their gradients, and of the others to None."""


class OptimizerHost(Protocol):
    """The place where the optimizer of a run steps.

    All ranks must create one, with equal arguments, and call :meth:`take_gradients`, :meth:`norm` and the clipping methods together."""

    @property
    def shards(self) -> OwnedStates | None:
        """The owner of the optimizer's states; None if the optimizer steps whole parameters on this rank."""

    def take_gradients(self, *, last: bool, skipped: bool = False) -> None:
        """Give the accumulated gradients to the optimizer; after the ``last`` batch of a window they are reduced.

        ``skipped``: this batch had no backward; a loss scaler skips its step then, and no overflow is looked for."""

    def absorb(self) -> None:
        """Take over changes that the user's hooks have made to ``p.grad``."""

    def loss_factor(self) -> float | Tensor:
        """Return the factor of the losses: the loss scale, or 1."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the 2-norm over all stages of the gradients of ``parameters`` (this rank's), each element once; a scalar."""

    def clip_by_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Scale all gradients so that their norm over all stages is at most ``max_norm``; ``parameters``: the optimizer's."""

    def clip_by_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        """Clamp all gradients to within ``max_value``; ``parameters``: the optimizer's."""

    def settle(self) -> None:
        """Wait until all parameters have the values of the last step."""

    def abandon(self) -> None:
        """Stop waiting for other ranks, after the run has failed."""

    def close(self) -> None:
        """Give parameters memory of their own again, and remove hooks."""


class LocalHost:
    """The user's optimizer steps whole parameters, in the same way on every replica.

    Args:
        reducer: has the accumulated and reduced gradients.
        is_owner: whether this rank's copy of a parameter, by name, is the one that counts in a norm.
        scaler: the scaler of ``precision="16-mixed"``, or None.
        place: this rank's stages in words, for messages.
    """

    shards: ShardedOptimizer | None = None

    def __init__(
        self,
        reducer: GatheredGradients,
        groups: ProcessGroups,
        device: torch.device,
        *,
        is_owner: Callable[[str], bool],
        scaler: Any,
        place: str,
    ) -> None:
        self._reducer = reducer
        self._groups = groups
        self._device = device
        self._is_owner = is_owner
        self._scaler = scaler
        self._place = place
        self._scale = None if scaler is None else LossScale(scaler, (groups.pipeline, groups.tensor_parallel), device)

    def take_gradients(self, *, last: bool, skipped: bool = False) -> None:
        """Set ``p.grad``; after the ``last`` batch of a window stages agree on an overflow, or check for infinities if
        ``detect_anomaly`` is set."""
        self._assign(last=last)
        if not last or (skipped and self._scale is not None):
            return
        if self._scale is not None:
            self._scale.agree(self._stepped())
        elif torch.is_anomaly_enabled():
            gradients = ((name, dtensor.local_part(p.grad)) for name, p in self._held() if p.grad is not None)
            check_finite(gradients, self._place)

    def _assign(self, *, last: bool) -> None:
        self._reducer.show(self._reducer.reached())

    def _stepped(self) -> Iterable[nn.Parameter]:
        return self._reducer.parameters.values()

    def _held(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._reducer.parameters.items()

    def absorb(self) -> None:
        """Do nothing: the optimizer reads ``p.grad`` itself."""

    def loss_factor(self) -> float | Tensor:
        return 1.0 if self._scale is None else self._scale.factor()

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        owned = {id(p) for name, p in self._reducer.parameters.items() if self._is_owner(name)}
        return global_grad_norm(
            parameters,
            counts=lambda p: id(p) in owned,
            pipeline_group=self._groups.pipeline,
            tensor_group=self._groups.tensor_parallel,
            device=self._device,
        )

    def clip_by_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        parameters = list(parameters)
        clip_by_norm([p for p in parameters if p.grad is not None], max_norm, self.norm(parameters))

    def clip_by_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        clip_by_value(list(parameters), max_value)

    def settle(self) -> None:
        """Do nothing: parameters are up to date when ``step`` returns."""

    def abandon(self) -> None:
        """Do nothing: nothing is under way."""

    def close(self) -> None:
        """Do nothing: the optimizer and the module were not changed."""


class ShardedHost(LocalHost):
    """The user's optimizer steps this replica's pieces (sharded.py)."""

    shards: ShardedOptimizer

    def __init__(
        self,
        shards: ShardedOptimizer,
        reducer: GatheredGradients,
        groups: ProcessGroups,
        device: torch.device,
        **about: Any,
    ) -> None:
        super().__init__(reducer, groups, device, **about)
        self.shards = shards
        if self._scaler is not None:
            shards.fill(device)
            holders = (groups.pipeline, groups.tensor_parallel, groups.data_parallel)
            self._scale = LossScale(self._scaler, holders, device)

    def _assign(self, *, last: bool) -> None:
        reached = self._reducer.reached()
        self._reducer.show(reached if self.shards.whole_gradients or not last else ())
        if last:
            self.shards.take_gradients(reached)

    def _stepped(self) -> Iterable[nn.Parameter]:
        return self.shards.stepped()

    def _held(self) -> Iterable[tuple[str, nn.Parameter]]:
        return ((piece.name, tensor) for piece, tensor in self.shards.pieces.items())

    def absorb(self) -> None:
        """Pass changes that hooks have made to whole gradients on to the gradients of the pieces."""
        self.shards.absorb()

    def unscaled(self, factor: float) -> None:
        """Multiply the parts of whole gradients that are in no piece by ``factor``, by which the scaler has unscaled the pieces."""
        for rest in self.shards.rest_of_whole():
            rest.mul_(factor)
        self.shards.note_shown()

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        if self.shards.shows_gradients:
            return super().norm(parameters)
        given = {id(p) for p in parameters}
        wanted = {name for name, p in self._reducer.parameters.items() if id(p) in given}
        return self._norm_of_pieces(lambda name: name in wanted)

    def _norm_of_pieces(self, wanted: Callable[[str], bool]) -> Tensor:
        """Return the norm of the gradients that the optimizer steps with, over stages, tensor groups and replicas."""
        groups = self._groups
        first = groups.tensor_parallel is None or groups.tensor_parallel_rank == 0
        parameters: Mapping[str, nn.Parameter] = self._reducer.parameters

        def counts(name: str) -> bool:
            return wanted(name) and self._is_owner(name) and (first or dtensor.is_split(parameters[name]))

        gradients: Sequence[Tensor] = list(self.shards.gradients(counts))
        return norm_over_groups(
            gradients, (groups.pipeline, groups.tensor_parallel, groups.data_parallel), self._device
        )

    def clip_by_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        self.shards.absorb()
        clip_parts_by_norm(self.shards.clipped(), max_norm, self._norm_of_pieces(lambda name: True))
        self.shards.note_shown()

    def clip_by_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        self.shards.absorb()
        clip_parts_by_value(self.shards.clipped(), max_value)
        self.shards.note_shown()

    def settle(self) -> None:
        """Wait until updated parameters have been gathered."""
        self.shards.finish()

    def abandon(self) -> None:
        self.shards.abandon()

    def close(self) -> None:
        """Give each parameter its own memory again."""
        self.shards.close()
