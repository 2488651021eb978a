"""OptimizerHost: where optimizer.step() happens, and so what becomes of reduced gradients, their norm, and the states.

    host.take_gradients(last=True)      # after the reduction: p.grad, or the pieces', is what the optimizer shall see
    host.absorb()                       # after hooks of the user
    host.clip_by_norm(parameters, 1.0)

LocalHost steps whole parameters on every replica, ShardedHost this replica's pieces; RemoteHost (remote.py) tells optimizer nodes to.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Where a host finds gradients that have been reduced: a GradBuffer, or a LayeredReducer."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's, by name."""

    def reached(self) -> frozenset[str]:
        """Those that have a gradient on some replica."""

    def assign_grads(self, *, last: bool, shown: bool = True) -> None:
        """Make them ``p.grad``, where they are ``shown``."""


class OptimizerHost(Protocol):
    """One a run. All ranks make one, alike, and call :meth:`take_gradients`, :meth:`norm` and clipping together."""

    @property
    def shards(self) -> OwnedStates | None:
        """Who has the optimizer's states, where it does not step whole parameters here."""

    def take_gradients(self, *, last: bool, skipped: bool = False) -> None:
        """Make what was gathered the optimizer's gradients, after the ``last`` batch of a window reduced ones; ``skipped``: this
        batch had no backward, and a loss scaler, which skips its step, is told nothing."""

    def absorb(self) -> None:
        """Take over what hooks of the user have made of ``p.grad``."""

    def loss_factor(self) -> float | Tensor:
        """What losses are multiplied by: the loss scale, or 1."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm over all stages of the gradients of ``parameters`` (this rank's), each element once; a scalar."""

    def clip_by_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Scale all gradients so that their norm over all stages is at most ``max_norm``; ``parameters``: the optimizer's."""

    def clip_by_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        """Clamp all gradients to within ``max_value``; ``parameters``: the optimizer's."""

    def settle(self) -> None:
        """Wait until all parameters are those of the last step."""

    def abandon(self) -> None:
        """The run has failed: wait for nothing any more."""

    def close(self) -> None:
        """Give the optimizer and the module back what they had."""


class LocalHost:
    """The user's optimizer steps whole parameters, alike on every replica.

    Args:
        buffer: where gradients were gathered and reduced.
        is_owner: whether this rank's copy of a parameter, by name, is the one that counts.
        scaler: of ``precision="16-mixed"``, or None.
        place: this rank's stages in words, for messages.
    """

    shards: ShardedOptimizer | None = None

    def __init__(
        self,
        buffer: GatheredGradients,
        groups: ProcessGroups,
        device: torch.device,
        *,
        is_owner: Callable[[str], bool],
        scaler: Any,
        place: str,
    ) -> None:
        self._buffer = buffer
        self._groups = groups
        self._device = device
        self._is_owner = is_owner
        self._scaler = scaler
        self._place = place
        self._scale = None if scaler is None else LossScale(scaler, (groups.pipeline, groups.tensor_parallel), device)

    def take_gradients(self, *, last: bool, skipped: bool = False) -> None:
        """They become ``p.grad``; after the ``last`` batch of a window they are checked, and stages agree on an overflow."""
        self._assign(last=last)
        if not last or (skipped and self._scale is not None):
            return
        if self._scale is not None:
            self._scale.agree(self._stepped())
        elif torch.is_anomaly_enabled():
            gradients = ((name, dtensor.local_part(p.grad)) for name, p in self._held() if p.grad is not None)
            check_finite(gradients, self._place)

    def _assign(self, *, last: bool) -> None:
        self._buffer.assign_grads(last=last)

    def _stepped(self) -> Iterable[nn.Parameter]:
        return self._buffer.parameters.values()

    def _held(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._buffer.parameters.items()

    def absorb(self) -> None:
        """Nothing: the optimizer reads ``p.grad`` itself."""

    def loss_factor(self) -> float | Tensor:
        return 1.0 if self._scale is None else self._scale.factor()

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        owned = {id(p) for name, p in self._buffer.parameters.items() if self._is_owner(name)}
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
        """Nothing: a step has ended when it returns."""

    def abandon(self) -> None:
        """Nothing is waited for."""

    def close(self) -> None:
        """Nothing was changed."""


class ShardedHost(LocalHost):
    """The user's optimizer steps this replica's pieces (sharded.py)."""

    shards: ShardedOptimizer

    def __init__(
        self,
        shards: ShardedOptimizer,
        buffer: GatheredGradients,
        groups: ProcessGroups,
        device: torch.device,
        **about: Any,
    ) -> None:
        super().__init__(buffer, groups, device, **about)
        self.shards = shards
        if self._scaler is not None:
            shards.fill(device)
            holders = (groups.pipeline, groups.tensor_parallel, groups.data_parallel)
            self._scale = LossScale(self._scaler, holders, device)

    def _assign(self, *, last: bool) -> None:
        self._buffer.assign_grads(last=last, shown=not last or self.shards.whole_gradients)
        if last:
            self.shards.take_gradients(self._buffer.reached())

    def _stepped(self) -> Iterable[nn.Parameter]:
        return self.shards.stepped()

    def _held(self) -> Iterable[tuple[str, nn.Parameter]]:
        return ((piece.name, tensor) for piece, tensor in self.shards.pieces.items())

    def absorb(self) -> None:
        """Pieces see what hooks have made of whole gradients."""
        self.shards.absorb()

    def unscaled(self, factor: float) -> None:
        """Pieces were unscaled by ``factor``; so are those parts of whole gradients that lie in no piece."""
        for rest in self.shards.rest_of_whole():
            rest.mul_(factor)
        self.shards.note_shown()

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        if self.shards.shows_gradients:
            return super().norm(parameters)
        given = {id(p) for p in parameters}
        wanted = {name for name, p in self._buffer.parameters.items() if id(p) in given}
        return self._norm_of_pieces(lambda name: name in wanted)

    def _norm_of_pieces(self, wanted: Callable[[str], bool]) -> Tensor:
        """Over stages, tensor groups and replicas, of the gradients that the optimizer steps with."""
        groups = self._groups
        first = groups.tensor_parallel is None or groups.tensor_parallel_rank == 0
        parameters: Mapping[str, nn.Parameter] = self._buffer.parameters

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
        """Updated parameters have been gathered."""
        self.shards.finish()

    def abandon(self) -> None:
        self.shards.abandon()

    def close(self) -> None:
        """Parameters have memory of their own again."""
        self.shards.close()
