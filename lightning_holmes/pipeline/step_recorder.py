"""StepRecorder: runs one training step of a copy and reads counters where each layer begins and ends.

recorder = StepRecorder(with_own_gradients(shadow_copy(module)), "layers", lambda: counter.counts)
recorder.step(arguments, nullcontext)
recorder.forward[1].flops                    # of the first layer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline import tree


class NotTheLayersError(Exception):
    """The step does not call the chosen list of layers once each and in order."""


class Counts(NamedTuple):
    """FLOPs of matrix products; numbers of operators that compute something and of matrix products among them; bytes
    that the other operators read and write; and FLOPs that run with gradients enabled, which in a backward are those of
    a forward that is run again."""

    flops: float = 0.0
    operators: float = 0.0
    products: float = 0.0
    moved_bytes: float = 0.0
    watched_flops: float = 0.0

    def __add__(self, other: Counts) -> Counts:  # type: ignore[override]
        return Counts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class StepRecorder:
    """Runs one step of a copy and records counts where each layer begins and ends.

    The copy has its own parameters (with_own_gradients, or fake ones): the backward leaves gradients on them.

    forward, backward, held: one entry for what is before the layers, one for each layer, and one for what is after them.

    Args:
        counts: returns numbers that only grow; their increments are recorded.
    """

    def __init__(self, shadow: pl.LightningModule, layers: str, counts: Callable[[], Counts]) -> None:
        self.shadow, self.layers, self.counts = shadow, layers, counts
        self.layer_list = list(shadow.get_submodule(layers).children())
        size = len(self.layer_list)
        self.forward = [Counts()] * (size + 2)
        self.backward = [Counts()] * (size + 2)
        self.held = [0.0] * (size + 2)
        self.crossing = [0.0] * (size + 1)  # bytes of the input of layer 0, and of each layer's output
        self.crossing_elements = 0
        self.called: list[int] = []
        self.called_at: dict[str, set[int]] = {}
        self.recomputes = False  # the forward is over: what is called now belongs to the backward
        self.position = 0  # 0 before the layers, i + 1 in layer i and until the next, size + 1 after the last
        self.storages: dict[int, tuple[Any, int | None]] = {}
        self.reached: dict[int, Counts] = {}  # the counts when the backward reached the output of a position
        self.last = Counts()

    def step(self, arguments: tuple[Any, ...], context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run the step, forward and backward."""
        shadow = self.shadow
        # on the copy only: a profile logs nothing
        for name in ("log", "log_dict"):
            object.__setattr__(shadow, name, lambda *args, **kwargs: None)
        shadow.train()
        places: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layer_list):
            places.setdefault(id(layer), []).append(index)
        gated = [(layer, vars(layer).get("forward")) for layer in {id(x): x for x in self.layer_list}.values()]
        for layer, _ in gated:
            layer.forward = self._gate(places[id(layer)], layer.forward)
        named = [(name, submodule) for name, submodule in shadow.named_modules() if name]
        handles = [submodule.register_forward_pre_hook(self._note(name)) for name, submodule in named]
        for parameter in shadow.parameters():
            self._own(parameter, None)
        try:
            with torch.enable_grad(), ExitStack() as stack:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._hold, lambda tensor: tensor))
                stack.enter_context(context())
                self.last = self.counts()
                output = shadow.training_step(*arguments)
                self._mark()
            if self.called != list(range(len(self.layer_list))):
                raise NotTheLayersError(f"called in the order {self.called[:8]}")
            self._run_backward(output)
        finally:
            for handle in handles:
                handle.remove()
            for layer, own in gated:
                if own is None:
                    del layer.forward
                else:
                    layer.forward = own

    def _run_backward(self, output: Any) -> None:
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise UnsupportedModuleError(
                f"{type(self.shadow).__name__}.training_step returned no loss that requires a gradient on the profiled microbatch"
            )
        self.recomputes = True
        began = self.counts()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        end = self.counts()
        for position in range(len(self.layer_list) + 1, -1, -1):
            # if no gradient reached the position before, the rest of the backward ran here: nothing earlier trains
            reached = self.reached.get(position - 1, end)
            self.backward[position] = reached - began
            if position - 1 not in self.reached:
                break
            began = reached

    def _mark(self) -> None:
        now = self.counts()
        self.forward[self.position] += now - self.last
        self.last = now

    def _note(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.called_at.setdefault(name, set()).add(self.position)

        return hook

    def _hold(self, tensor: Tensor) -> Tensor:
        self._own(tensor, self.position)
        return tensor

    def _own(self, tensor: Tensor, position: int | None, *, move: bool = False) -> None:
        """Count a tensor's memory once, as held by ``position`` or, if that is None, by no position."""
        storage = tensor.untyped_storage()
        owner = self.storages.get(id(storage))
        if owner is not None and not move:
            return
        if owner is not None and owner[1] is not None:
            self.held[owner[1]] -= storage.nbytes()
        self.storages[id(storage)] = (storage, position)  # kept alive, so that its id stays unique
        if position is not None:
            self.held[position] += storage.nbytes()

    def _gate(self, places: Sequence[int], forward: Callable[..., Any]) -> Callable[..., Any]:
        def gate(*args: Any, **kwargs: Any) -> Any:
            if self.recomputes:  # a checkpoint around the whole layer runs it again
                return forward(*args, **kwargs)
            expected = len(self.called)
            if expected not in places:
                raise NotTheLayersError(f"layer {places[0]} is called where layer {expected} would follow")
            self._mark()
            for tensor in tree.tensors_of((args, kwargs)):
                # masks and rotary angles are shared by all layers; the hidden state is held by the layer that receives it
                self._own(tensor, expected + 1 if tensor.requires_grad else 0, move=tensor.requires_grad)
            self.called.append(expected)
            if expected == 0:
                self.crossing[0] = self._reach(0, (args, kwargs))
                self._mark()
            self.position = expected + 1
            output = forward(*args, **kwargs)
            self._mark()
            self.crossing[expected + 1] = self._reach(expected + 1, output)
            if expected == len(self.layer_list) - 1:
                self.position = len(self.layer_list) + 1
            return output

        return gate

    def _reach(self, position: int, value: Any) -> float:
        """Record when the backward reaches these tensors; returns the bytes of those that need a gradient, or of all
        if none does."""
        tensors = tree.tensors_of(value)
        wanting = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in wanting:

            def reached(gradient: Tensor) -> None:
                self.reached[position] = self.counts()  # of several gradients, the last one counts

            tensor.register_hook(reached)  # type: ignore[no-untyped-call]
        self.crossing_elements += sum(tensor.numel() for tensor in (wanting or tensors))
        return float(sum(tensor.numel() * tensor.element_size() for tensor in (wanting or tensors)))
