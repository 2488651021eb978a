"""Converts states of a sharded optimizer between whole parameters and pieces on several ranks.

A state is the dictionary that an optimizer keeps for a parameter. Entries with a value for each element (the
moments of Adam) are cut and joined; entries for the parameter as a whole (its step) are copied.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.comm.objects import all_gather_values
from lightning_holmes.optim.unit import Piece

MASTER_WEIGHT = "master_weight"
"""The entry of a parameter's state that is the parameter itself in fp32."""
_SMALL = 64  # elements; tensors up to this size are sent with the descriptions of the others


class OwnedStates(Protocol):
    """Optimizer states that are not kept for whole parameters on this rank: a sharded optimizer's, or those of optimizer nodes."""

    whole_gradients: bool
    """Whether each replica has whole gradients in ``p.grad``."""

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""

    @property
    def names(self) -> set[str]:
        """The parameters whose states this rank reads from a checkpoint."""

    def cut_by_group(self, states: Mapping[str, Mapping[str, Any]]) -> list[list[dict[str, Any] | None]]:
        """Cut ``states``, of whole parameters by name, into one state for each entry of the optimizer's groups."""

    def loaded(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the remaining parts of ``states``, of whole parameters by name, after ``optimizer.load_state_dict``."""

    def each_state(self, destination: Callable[[str], int] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the states as they are now, by parameter name, each whole on the replica ``destination(name)``, or on all, some in memory at a
        time. All replicas must call, and iterate to the end."""

    def destination(self, name: str) -> int:
        """Return the replica that saves a parameter's state to a checkpoint folder."""

    def prepare(self) -> None:
        """Take up new parameter groups of the optimizer; called when a batch begins."""


@dataclass(frozen=True, slots=True)
class _Described:
    """The description of a state entry that is a tensor. ``shape``: of the whole entry; None: pieces join to the parameter's shape."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None
    is_laid_out: bool


def cut_state(
    state: Mapping[str, Any], piece: Piece, parameter: Tensor, element_keys: frozenset[str]
) -> dict[str, Any]:
    """Return the state of a piece, in memory of its own, cut from the state of the whole ``parameter``."""
    found = {}
    for key, value in state.items():
        if key == MASTER_WEIGHT:
            continue
        if isinstance(value, Tensor):
            if value.shape == parameter.shape and (key in element_keys or value.ndim):
                local = dtensor.local_part(dtensor.share_of(value, parameter))
                value = local.reshape(-1)[piece.start : piece.stop]
            value = value.clone()
        found[key] = value
    return found


def collect_states(
    pieces: Sequence[Piece],
    local: Mapping[Piece, Mapping[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    *,
    element_keys: Callable[[str], frozenset[str]],
    group: dist.ProcessGroup | None,
    destination: Callable[[str], int] | None,
) -> dict[str, dict[str, Any]]:
    """Return whole states by parameter name, on rank ``destination(name)`` of ``group``, or on all its ranks. All of them must call.

    Args:
        pieces: the pieces of all ranks, in the same order on every rank.
        local: the states of this rank's pieces; either all pieces of a parameter have a state, or none.
        element_keys: returns the keys of a parameter's state, by name, that have a value for each element.
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    numbers = {piece: number for number, piece in enumerate(pieces)}
    described: dict[int, dict[str, Any]] = {
        numbers[piece]: {k: _describe(piece, k, v, element_keys(piece.name)) for k, v in state.items()}
        for piece, state in local.items()
    }
    everyone: list[Any] = [described] if group is None else all_gather_values(described, group)
    known = {number: entries for part in everyone for number, entries in part.items()}
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    found: dict[str, dict[str, Any]] = {}
    for name, parts in by_name.items():
        entries = known.get(numbers[parts[0]])
        if not entries:
            continue
        targets = list(range(size)) if destination is None else [destination(name)]
        state = {}
        for key, value in entries.items():
            if isinstance(value, _Described):
                value = _join(parts, key, value, local, parameters[name], targets, group, rank)
            elif rank in targets and parts[0] in local:
                value = local[parts[0]][key]  # this rank's own value, on its own device
            state[key] = value
        if rank in targets:
            found[name] = state
    return found


def _describe(piece: Piece, key: str, value: Any, element_keys: frozenset[str]) -> Any:
    if not isinstance(value, Tensor):
        return value
    local = dtensor.local_part(value)
    if local.ndim == 1 and local.numel() == piece.numel and (key in element_keys or piece.numel > 1):
        return _Described(value.dtype, None, is_laid_out=True)
    if local.numel() <= _SMALL and not dtensor.is_dtensor(value):
        return value.detach().cpu()
    return _Described(value.dtype, tuple(local.shape), is_laid_out=dtensor.is_dtensor(value))


def _join(
    parts: Sequence[Piece],
    key: str,
    described: _Described,
    local: Mapping[Piece, Mapping[str, Any]],
    parameter: nn.Parameter,
    targets: Sequence[int],
    group: dist.ProcessGroup | None,
    rank: int,
) -> Tensor | None:
    """Return one entry of a whole parameter's state on each of the ranks ``targets``; None on others. All ranks must call."""
    here = dtensor.local_part(parameter)
    shape = tuple(here.shape) if described.shape is None else described.shape
    wanted = rank in targets
    if targets == [rank] and len(parts) == 1 and parts[0].rank == rank:
        whole = dtensor.local_part(local[parts[0]][key]).detach().view(shape)
        return dtensor.like(whole, parameter) if described.is_laid_out else whole
    whole = torch.empty(shape if wanted else 0, dtype=described.dtype, device=here.device)
    flat = whole.view(-1)
    for piece in parts:
        numel = piece.numel if described.shape is None else math.prod(shape)
        start = piece.start if described.shape is None else 0
        own = None
        if piece.rank == rank:
            own = dtensor.local_part(local[piece][key]).detach().contiguous().view(-1)
        for target in targets:
            if target == rank and own is not None:
                flat[start : start + numel].copy_(own)
            elif own is not None:
                _transfer(dist.isend, own, group, target)
            elif target == rank:
                _transfer(dist.irecv, flat[start : start + numel], group, piece.rank)
    if not wanted:
        return None
    return dtensor.like(whole, parameter) if described.is_laid_out else whole


def _transfer(operation: Any, tensor: Tensor, group: dist.ProcessGroup | None, peer: int) -> None:
    """Send or receive a tensor, and wait. As a batch of one, since NCCL makes a new communicator of two ranks for any other transfer."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=group, group_peer=peer)]):
        wait_for(work, group)
