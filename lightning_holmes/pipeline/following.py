"""The modes under which a traced step runs: one sees every operator, the other the accesses from Python that use none.

They carry sources from inputs to outputs and report to a :class:`Follower`, which knows the position of the step: the
tracer of trace.py.

    with FollowValues(tracer), FollowPython(tracer):
        step(batch, 0)
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_holmes.comm.absent import READ_BY_PYTHON, SET_DATA, TO_PYTHON, VALUE_FREE, depends_on_values
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.own_generators import describe_draw
from lightning_holmes.torch_private import TorchDispatchMode, operator_name, written_arguments

_READ_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]


class Follower(Protocol):
    """Keeps what the modes find: where the step is, the sources of each tensor, and where they were read or changed."""

    original: pl.LightningModule
    step_name: str
    paused: bool
    inside: bool
    position: int
    num_layers: int
    called: list[int]
    layer_bits: dict[int, int]
    written_at: dict[int, int]
    written_early: set[int]
    output_keys: dict[int, tuple[int, int]]
    changed_outputs: set[tuple[int, int]]

    @property
    def here(self) -> int:
        """The position to which reads and writes are attributed."""
        ...

    def key(self, tensor: Tensor) -> int:
        """An identifier of a tensor's memory."""
        ...

    def taint_of(self, tensors: list[Tensor]) -> int:
        """All sources of some tensors."""
        ...

    def mark(self, tensor: Tensor, taint: int) -> None:
        """Add sources to a tensor."""
        ...

    def read(self, taint: int, position: int | None = None) -> None:
        """Note that ``position`` (default: the current one) reads these sources."""
        ...

    def refuse_parameter_write(self, tensor: Tensor) -> None:
        """Raise UnsupportedModuleError if ``tensor`` is a parameter that the step may not change here."""
        ...

    def is_of_tensor_group(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a collective is among the ranks of this tensor-parallel group only."""
        ...


class FollowValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries the sources of every operator's inputs to its outputs."""

    def __init__(self, tracer: Follower) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracer = self.tracer
        if tracer.paused:
            return func(*args, **kwargs)
        name = operator_name(func)
        if func.namespace in ("c10d", "_c10d_functional") and not tracer.is_of_tensor_group(func, args, kwargs):
            raise UnsupportedModuleError(
                f"{type(tracer.original).__name__}.{tracer.step_name} calls the collective {name}: the stages of a "
                f"pipeline run different parts of a step, so it would hang; use pipeline_parallel_size=1"
            )
        if isinstance(kwargs.get("generator"), torch.Generator):
            place = f"{type(tracer.original).__name__}.{tracer.step_name}"
            raise UnsupportedModuleError(describe_draw(place, "a torch.Generator", torch.Generator))
        inputs = tree.tensors_of((args, kwargs))
        taint = tracer.taint_of(inputs)
        keys = {tracer.key(t) for t in inputs}
        written = [t for value in written_arguments(func, args, kwargs) for t in tree.tensors_of(value)]
        for tensor in written:
            tracer.refuse_parameter_write(tensor)
        output = func(*args, **kwargs)
        if name in VALUE_FREE:
            taint = 0
        if depends_on_values(func):
            _read_by_python(tracer, taint)
        if name in TO_PYTHON:
            return output
        results = tree.tensors_of(output) if tree.is_container(output) or isinstance(output, Tensor) else []
        fresh = [t for t in results if tracer.key(t) not in keys]
        if written or fresh or not results:
            if tracer.inside:
                tracer.read(taint)
                taint |= tracer.layer_bits[tracer.position]
            elif tracer.here == tracer.num_layers:
                tracer.read(taint)
        for tensor in written:
            tracer.mark(tensor, taint)
            key = tracer.key(tensor)
            tracer.written_at[key] = tracer.here
            if not tracer.inside:
                if tracer.here < tracer.num_layers:
                    tracer.written_early.add(key)
                if key in tracer.output_keys:
                    tracer.changed_outputs.add(tracer.output_keys[key])
        for tensor in fresh:
            tracer.mark(tensor, taint)
        return output


class FollowPython(TorchFunctionMode):
    """Sees reads of a tensor's values by Python that use no operator, and refuses autograd calls that a pipeline cannot run."""

    def __init__(self, tracer: Follower) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = self.tracer
        if func in READ_BY_PYTHON and args:
            _read_by_python(tracer, tracer.taint_of(tree.tensors_of(args[0])))
        elif func in (torch.autograd.backward, Tensor.backward):
            self._refuse("calls backward", "a pipeline runs the backward itself; return one loss that holds all parts")
        elif func is torch.autograd.grad and tracer.called and not tracer.inside:
            self._refuse(
                "calls torch.autograd.grad after layers have run",
                "no stage holds the whole graph; use pipeline_parallel_size=1",
            )
        elif func == _READ_GRAD and isinstance(args[0], nn.Parameter):
            self._refuse(
                "reads .grad of a parameter",
                "a stage has the gradients of its own layers only; read them in on_before_optimizer_step",
            )
        elif func == SET_DATA:
            tracer.refuse_parameter_write(args[0])
        return func(*args, **(kwargs or {}))

    def _refuse(self, what: str, why: str) -> None:
        tracer = self.tracer
        raise UnsupportedModuleError(f"{type(tracer.original).__name__}.{tracer.step_name} {what}: {why}")


def _read_by_python(tracer: Follower, taint: int) -> None:
    """Note that Python has read a value: inside a layer only that layer depends on it, elsewhere every later position may."""
    if tracer.inside:
        tracer.read(taint)
    else:
        for position in range(max(tracer.position, 0), tracer.num_layers + 1):
            tracer.read(taint, position)
