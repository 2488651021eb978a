"""ShardedHost: the user's optimizer steps this replica's pieces of the parameters, and keeps the states of these only.

The user's optimizer and its param_groups stay the same objects, since schedulers hold references to them. Only the
contents of the groups change, to this rank's pieces instead of whole parameters: flat tensors in the memory of the
parameters for an element-wise optimizer (elementwise.py), or some of the parameters themselves for any other.
A ShardMemory has the values and gradients of pieces, and distributes what was updated.

    host = ShardedHost(ShardedStep(optimizer=optimizer, ...), memory, reducer, groups, ...)
    host.take_gradients(last=True)        # after the reduction: set the gradients of the pieces
    optimizer.step()                      # steps this rank's pieces; updated ones are then distributed
    host.settle()                         # optional: reading a parameter waits for it anyway
    states = dict(host.each_state())      # whole states by parameter name

Results equal those of the unsharded optimizer. With ``master_weights`` pieces are fp32 whatever type the parameters have, and the
parameters are rounded from them after each step (as Megatron's distributed optimizer does).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.optim.after_step import AfterStep
from lightning_holmes.optim.bucket_reducer import BucketReducer
from lightning_holmes.optim.elementwise import Separability, find_separability, marks_of
from lightning_holmes.optim.host import LocalHost
from lightning_holmes.optim.layered import LayeredReducer
from lightning_holmes.optim.shard_memory import ShardMemory
from lightning_holmes.optim.shard_states import MASTER_WEIGHT, collect_states, cut_state
from lightning_holmes.optim.unit import Piece, adopt, holders_of
from lightning_holmes.torch_private import tensor_version

FROZEN = -1
"""``Piece.unit`` of a parameter that is not trained now, and so is in no unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStep:
    """An optimizer, and how its step is sharded.

    Attributes:
        names: for each of the optimizer's groups, the names of the parameters that this rank's stages hold.
        found: how the optimizer can be sharded; not "none".
        whole_gradients: each rank gets whole gradients in ``p.grad``, for code that reads them; otherwise only its shards.
        master_weights: keep the pieces in fp32.
    """

    optimizer: Optimizer
    names: Sequence[Sequence[str]]
    found: Separability
    whole_gradients: bool = False
    master_weights: bool = False

    @property
    def by_elements(self) -> bool:
        """Whether parameters are cut by elements, or else assigned whole."""
        return self.found.level == "elements"


class ShardedHost(LocalHost):
    """Shards the optimizer of ``step`` over the replicas; implements OwnedStates, too. All replicas must create one, with equal arguments.

    Args:
        memory: holds the values and gradients of the pieces.
        about: see LocalHost.
    """

    def __init__(
        self,
        step: ShardedStep,
        memory: ShardMemory,
        reducer: BucketReducer | LayeredReducer,
        groups: ProcessGroups,
        **about: Any,
    ) -> None:
        assert step.found.level != "none"
        optimizer, replicas = step.optimizer, groups.data_parallel
        super().__init__(reducer, groups, over=(replicas,), **about)
        self.optimizer = optimizer
        self.by_elements = step.by_elements
        # without masters an optimizer that is not cut by elements steps parameters themselves
        steps_parameters = not (self.by_elements or step.master_weights)
        self.whole_gradients = memory.is_whole and (step.whole_gradients or steps_parameters)
        self._names = [list(of_group) for of_group in step.names]
        self._memory = memory
        self._rank = 0 if replicas is None else dist.get_rank(replicas)
        self._size = 1 if replicas is None else dist.get_world_size(replicas)
        self._found = step.found
        self._replicas = replicas
        self._master = step.master_weights
        self._generation = -1
        self._shown: dict[str, tuple[Tensor | None, int]] = {}
        self._pieces: list[Piece] = []
        self._holders: dict[str, int] = {}
        self._tensors: dict[Piece, nn.Parameter] = {}
        # of the units' values after the last step, where only this package writes to them
        self._versions: dict[int, int] = {}
        parameters = memory.parameters
        self._group_of = {n: i for i, of_group in enumerate(self._names) for n in of_group}
        self._filler: nn.Parameter | None = None
        if self._scale is not None:  # a GradScaler refuses an optimizer without gradients
            self._filler = nn.Parameter(torch.zeros((1,) if self.by_elements else (1, 1), device=self._device))
        first = {n: dict(optimizer.state[parameters[n]]) for n in self._group_of if optimizer.state.get(parameters[n])}
        self._lay_out(first)
        self._hook = AfterStep(optimizer, self._stepped)
        reducer.on_laid_out = self.prepare
        if isinstance(reducer, BucketReducer):
            reducer.sums_shares = replicas is not None and self.by_elements and not self.whole_gradients
            reducer.keeps_sums = self._master

    # layout

    def _lay_out(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Cut the buckets as they are now, and put this rank's pieces into the optimizer's groups.

        Args:
            states: the states of whole parameters, by name.
        """
        assigned = self._memory.lay_out(by_elements=self.by_elements)
        in_bucket = {piece.name for piece in assigned}
        pieces = [piece for piece in assigned if piece.name in self._group_of]
        for number, name in enumerate(n for n in self._group_of if n not in in_bucket):
            size = dtensor.local_part(self._memory.parameters[name]).numel()
            pieces.append(Piece(name=name, start=0, stop=size, rank=number % self._size, unit=FROZEN, offset=0))
        self._pieces, self._holders, self._versions = pieces, {}, {}
        self._tensors = {piece: self._make_tensor(piece) for piece in pieces if piece.rank == self._rank}
        self._generation = self._memory.generation
        for key in [k for k in self.optimizer.state if isinstance(k, Tensor)]:
            del self.optimizer.state[key]
        for group, of_group in zip(self.optimizer.param_groups, self._held_by_group(), strict=True):
            group["params"] = [self._tensors[piece] for piece in of_group]
            if "param_names" in group:
                group["param_names"] = [piece.name for piece in of_group]
        if self._filler is not None:
            self.optimizer.param_groups[0]["params"].append(self._filler)
        for piece, tensor in self._tensors.items():
            if piece.name in states:
                self.optimizer.state[tensor] = self.cut(piece, states[piece.name])
                self._restore_master(piece, states[piece.name])

    def _make_tensor(self, piece: Piece) -> nn.Parameter:
        """Make the tensor that the optimizer steps for a piece of this rank."""
        parameter = self._memory.parameters[piece.name]
        if self._memory.is_whole and not self.by_elements and not self._master:
            return parameter
        flat = self._flat(piece).detach()
        if self._master:
            flat = flat.float() if flat.dtype != torch.float32 else flat.clone()
        if not self.by_elements:
            flat = flat.view(dtensor.local_part(parameter).shape)
        made = nn.Parameter(flat, requires_grad=parameter.requires_grad)
        vars(made).update(marks_of(parameter))
        return made

    def _flat(self, piece: Piece) -> Tensor:
        """The piece in the memory of its parameter, 1-D."""
        if piece.unit == FROZEN:
            return dtensor.local_part(self._memory.parameters[piece.name]).detach().reshape(-1)
        return self._memory.values(piece)

    def _held_by_group(self) -> list[list[Piece]]:
        """Return this rank's pieces by group, in the order of the group's parameters."""
        held: dict[str, list[Piece]] = {}
        for piece in self._tensors:
            held.setdefault(piece.name, []).append(piece)
        return [[piece for name in names for piece in held.get(name, [])] for names in self._names]

    # a step

    def prepare(self) -> None:
        """Cut new pieces if the buckets have been laid out anew; after a batch's ``buffer.begin()``. All replicas must call.

        Parameter groups that were added meanwhile, with parameters of this rank's stages, are sharded, too.

        Raises:
            UnsupportedModuleError: such a group cannot be sharded as the others are.
        """
        added = self.optimizer.param_groups[len(self._names) :]
        if added:
            self._take_groups(added)
        elif self._generation != self._memory.generation:
            self._lay_out(dict(self.each_state()))

    def _take_groups(self, added: Sequence[dict[str, Any]]) -> None:
        parameters = self._memory.parameters
        device = next(iter(parameters.values())).device
        found = find_separability(self.optimizer, device, added)
        if found.level != "elements" and (self.by_elements or found.level == "none"):
            raise UnsupportedModuleError(
                f"{type(self.optimizer).__name__} was given a parameter group while the module trains, which cannot be "
                f'sharded over replicas as the others are: {found.reason}; use sharding="none"'
            )
        states = dict(self.each_state())
        names = {id(p): n for n, p in parameters.items()}
        self._found = replace(self._found, element_keys=(*self._found.element_keys, *found.element_keys))
        for group in added:
            self._names.append([names[id(p)] for p in group["params"]])
        self._group_of = {n: i for i, of_group in enumerate(self._names) for n in of_group}
        self._lay_out(states)

    def _assign(self, *, last: bool) -> None:
        reached = self._reducer.reached()
        self._reducer.show(reached if self.whole_gradients or not last else ())
        if last:
            self._give_gradients(reached)

    def _give_gradients(self, reached: frozenset[str]) -> None:
        """Give each piece its gradient from the reduced units; None if the parameter has none on any replica.

        With ``whole_gradients`` ``p.grad`` is whole by now, and without master weights the gradients of pieces are views of it.
        """
        if not self._master and not self.whole_gradients:
            for unit in self._memory.units:
                unit.round_gradient()
        any_gradient = False
        for piece, tensor in self._tensors.items():
            if piece.unit == FROZEN or piece.name not in reached:
                tensor.grad = None
                continue
            any_gradient = True
            if self.whole_gradients and not self._master:
                self._take_whole(piece, tensor)
            else:
                tensor.grad = self._memory.gradient(piece).to(tensor.dtype).view(tensor.shape)
        if self._filler is not None:
            self._filler.grad = None if any_gradient else torch.zeros_like(self._filler)
        self._note_shown()

    def absorb(self) -> None:
        """Take over changes that the user's hooks have made to ``p.grad``."""
        if not self.whole_gradients:
            return
        for piece, tensor in self._tensors.items():
            gradient = self._memory.parameters[piece.name].grad
            shown, version = self._shown.get(piece.name, (None, 0))
            is_same = self._master and gradient is shown and _version(gradient) == version
            if piece.unit != FROZEN and not is_same:
                self._take_whole(piece, tensor)
        self._note_shown()

    def _take_whole(self, piece: Piece, tensor: nn.Parameter) -> None:
        """Give a piece its part of ``p.grad``, of which it is a view if the types are equal."""
        parameter = self._memory.parameters[piece.name]
        if tensor is parameter:
            return
        tensor.grad = None
        if parameter.grad is not None:
            local = dtensor.local_part(parameter.grad)
            if not local.is_contiguous():  # a hook's; the piece's gradient could not be a view of it
                local = local.contiguous()
                parameter.grad = dtensor.like(local, parameter)
            tensor.grad = local.view(-1)[piece.start : piece.stop].view(tensor.shape).to(tensor.dtype)

    def unscaled(self, factor: float) -> None:
        """Multiply whole gradients by ``factor``, by which the scaler has unscaled the pieces, some of which are views of them."""
        own = [(t.grad, t.grad.clone()) for t in self._tensors.values() if t.grad is not None]
        for whole in self._whole():
            whole.mul_(factor)
        for gradient, value in own:
            gradient.copy_(value)
        self._note_shown()

    def _note_shown(self) -> None:
        """Record the present ``p.grad``, so that :meth:`absorb` does not take it for a change by a hook. Without master weights it need not
        know, since gradients of pieces are views."""
        if self.whole_gradients and self._master:
            gradients = {name: self._memory.parameters[name].grad for name in self._group_of}
            self._shown = {name: (gradient, _version(gradient)) for name, gradient in gradients.items()}

    def _stepped(self) -> None:
        if self._master:
            with torch.no_grad():
                for piece, tensor in self._tensors.items():
                    if piece.unit != FROZEN:
                        self._flat(piece).copy_(tensor.detach().view(-1))
        if not self._memory.is_whole:
            self._versions = {p.unit: tensor_version(self._flat(p)) for p in self._tensors if p.unit != FROZEN}
            # nothing reads the gradients any more
            for tensor in self._tensors.values():
                tensor.grad = None
        self._memory.start()

    def adopt_values(self) -> None:
        """After the user's hooks, when the optimizer is about to step: take over parameters, and update master weights, that were written to since the last step (by a checkpoint, an
        average, a hook).

        Whole parameters are compared each time, since a write through ``.data``, a NumPy array or a kernel of the user's has no version."""
        self._memory.adopt()
        for piece, tensor in self._tensors.items() if self._master else ():
            if piece.unit != FROZEN:
                now = self._flat(piece)
                if self._versions.get(piece.unit) != tensor_version(now):
                    adopt(tensor.detach().view(-1), now.detach())

    def settle(self) -> None:
        """Wait until updated parameters have been gathered."""
        self._memory.finish()

    # this rank's pieces

    @property
    def shards(self) -> "ShardedHost":
        return self

    def _owned(self) -> Iterable[tuple[str, nn.Parameter]]:
        yield from ((piece.name, tensor) for piece, tensor in self._tensors.items())
        if self._filler is not None:
            yield "", self._filler

    def _whole(self) -> list[Tensor]:
        """Return the whole gradients in ``p.grad``, which hooks see."""
        gradients = [self._memory.parameters[name].grad for name in self._group_of] if self.whole_gradients else []
        return [dtensor.local_part(gradient) for gradient in gradients if gradient is not None]

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        if self.whole_gradients and not self._master:
            return super().norm(parameters)
        given = {id(p) for p in parameters}
        names = {name for name, p in self._reducer.parameters.items() if id(p) in given}
        return self._norm((entry for entry in self._owned() if entry[0] in names), self._over)

    def _step_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return self._norm(self._owned(), self._over)

    def _clipped(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return every gradient that clipping scales, each element once; including whole gradients that hooks see."""
        whole = self._whole()
        if self.whole_gradients and not self._master:
            return whole  # those of pieces are views
        return [*(dtensor.local_part(t.grad) for t in self._tensors.values() if t.grad is not None), *whole]

    # states

    def each_state(self, destination: Callable[[str], int] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the states as they are now, one unit at a time; see OwnedStates."""
        self.settle()
        local: dict[Piece, dict[str, Any]] = {}
        for piece, tensor in self._tensors.items():
            state = self.optimizer.state.get(tensor, {})
            if state or self._master:  # a master weight is saved even if the optimizer keeps no state
                local[piece] = {**state, **({MASTER_WEIGHT: tensor.detach()} if self._master else {})}
        units: dict[int, list[Piece]] = {}
        for piece in self._pieces:
            units.setdefault(piece.unit, []).append(piece)

        def join_each() -> Iterator[tuple[str, dict[str, Any]]]:
            for pieces in units.values():
                give_back_freed_memory()  # of the unit before, which is large
                yield from collect_states(
                    pieces,
                    {piece: local[piece] for piece in pieces if piece in local},
                    self._memory.parameters,
                    element_keys=self._element_keys,
                    group=self._replicas,
                    destination=destination,
                ).items()

        return join_each()

    def destination(self, name: str) -> int:
        """Return the replica that saves a parameter's state: one that holds much of it. With DTensors, whose local parts may
        differ in size between the ranks of a tensor group, its index decides instead, so that these ranks agree."""
        if not self._holders:
            numbers = enumerate(self._group_of)
            if any(dtensor.is_dtensor(p) for p in self._memory.parameters.values()):
                self._holders = {name: number % self._size for number, name in numbers}
            else:
                self._holders = holders_of(self._group_of, self._pieces, self._size)
        return self._holders[name]

    def cut(self, piece: Piece, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a piece, cut from the state of the whole parameter."""
        parameter = self._memory.parameters[piece.name]
        if not self.by_elements:
            kept = {k: v for k, v in state.items() if k != MASTER_WEIGHT}
            if self._master:
                return kept
            return {k: laid_out(v, parameter) for k, v in kept.items()}
        return cut_state(state, piece, parameter, self._element_keys(piece.name))

    @property
    def names(self) -> set[str]:
        """The names of the parameters of which this rank has pieces."""
        return {piece.name for piece in self._tensors}

    def cut_by_group(self, states: Mapping[str, Mapping[str, Any]]) -> list[list[dict[str, Any] | None]]:
        """Return, for each group of the optimizer, the state of each piece in its "params", cut from ``states``."""
        return [
            [self.cut(piece, states[piece.name]) if piece.name in states else None for piece in pieces]
            for pieces in self._held_by_group()
        ]

    def loaded(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the master weights that ``states`` contains; after ``optimizer.load_state_dict``."""
        for piece in self._tensors if self._master else ():
            if piece.name in states:
                self._restore_master(piece, states[piece.name])

    def _restore_master(self, piece: Piece, state: Mapping[str, Any]) -> None:
        if MASTER_WEIGHT not in state:
            return
        master = self._tensors[piece].detach().view(-1)
        saved = dtensor.local_part(dtensor.share_of(state[MASTER_WEIGHT], self._memory.parameters[piece.name]))
        saved = saved.reshape(-1)[piece.start : piece.stop].to(master)
        now = self._flat(piece)
        # they differ if other weights were loaded
        master.copy_(torch.where(saved.to(now.dtype) == now, saved, now.float()))

    def _element_keys(self, name: str) -> frozenset[str]:
        return self._found.element_keys[self._group_of[name]] | {MASTER_WEIGHT}

    def abandon(self) -> None:
        """Stop waiting for parameters, after the run has failed. Parameters may then be a mixture of two steps."""
        self._memory.abandon()

    def close(self) -> None:
        """Give each parameter its own memory again; states can still be collected."""
        self._hook.remove()
        self._memory.close()


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor_version(tensor)


def laid_out(value: Any, parameter: Tensor) -> Any:
    """Return a value of a saved state; if it has one for each element, this rank's shard of it, as of ``parameter``."""
    if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape:
        return dtensor.share_of(value, parameter)
    return value
