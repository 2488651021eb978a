"""StepRecorder: runs one training step of a copy and reads counters where each layer begins and ends.

recorder = StepRecorder(with_own_gradients(shadow_copy(module)), "layers", lambda: counter.counts)
recorder.step(arguments, nullcontext)
recorder.forward[1].flops                    # of the first layer
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.layers import LayerCalls


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
        self.calls = LayerCalls(shadow, layers, self._pass_through)
        size = self.num_layers = len(self.calls.layers)
        self.forward = [Counts()] * (size + 2)
        self.backward = [Counts()] * (size + 2)
        self.held = [0.0] * (size + 2)
        self.crossing = [0.0] * (size + 1)  # bytes of the input of layer 0, and of each layer's output
        self.crossing_elements = 0
        self.called_at: dict[str, set[int]] = {}
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
        self.calls.begin()
        for name, submodule in shadow.named_modules():
            if name:
                submodule.register_forward_pre_hook(self._note(name))
        for parameter in shadow.parameters():
            self._own(parameter, None)
        try:
            with (
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(self._hold, lambda tensor: tensor),
                context(),
            ):
                self.last = self.counts()
                output = shadow.training_step(*arguments)
                self._mark()
            self.calls.end()
            self._run_backward(output)
        finally:  # the copy refers to this object: its gradients and activations are freed now, not by the garbage collector
            self.storages.clear()
            self.calls.layers.clear()
            del self.shadow

    def _run_backward(self, output: Any) -> None:
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise UnsupportedModuleError(
                f"{type(self.shadow).__name__}.training_step returned no loss that requires a gradient on the profiled microbatch"
            )
        began = self.counts()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        end = self.counts()
        for position in range(self.num_layers + 1, -1, -1):
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

    def _pass_through(
        self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer, and record the counts at its begin and end."""
        self._mark()
        for tensor in tree.tensors_of((args, kwargs)):
            # masks and rotary angles are shared by all layers; the hidden state is held by the layer that receives it
            self._own(tensor, index + 1 if tensor.requires_grad else 0, move=tensor.requires_grad)
        if index == 0:
            self.crossing[0] = self._reach(0, (args, kwargs))
            self._mark()
        self.position = index + 1
        output = forward(*args, **kwargs)
        self._mark()
        self.crossing[index + 1] = self._reach(index + 1, output)
        if index == self.num_layers - 1:
            self.position = self.num_layers + 1
        return output

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
