"""The undocumented parts of torch that this package uses; tests/test_torch_private.py fails when one of them changes.

No other file imports a name with a leading underscore from torch.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["FakeTensorMode", "TorchDispatchMode"]  # of torch, for other modules to import from here


MODULE_REGISTRIES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_backward_hooks")
"""The attributes in which a module keeps its parameters, buffers, submodules and hooks; they are not plain attributes of the user."""


def default_store() -> Any:
    """The key-value store with which the default process group was formed."""
    return dist.distributed_c10d._get_default_store()


def abort_groups() -> None:
    """Abort all NCCL groups: operations under way end, and the groups cannot be used any more."""
    dist.distributed_c10d._abort_process_group()


def gloo_device(interface: str | None, *, address: str | None = None) -> Any:
    """Return a gloo transport device, with its thread, on a network interface, or on the one that has ``address``.

    The device is not lazy: groups that share a lazy device wait for each other's connections for ever (torch 2.13).

    Raises:
        RuntimeError: the interface does not exist, or has no address.
    """
    if address is not None:
        return dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    if interface is None:
        return dist.ProcessGroupGloo.create_default_device(lazy_init=False)
    return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=False)


def gloo_group(
    store: Any, rank: int, size: int, devices: Sequence[Any], timeout: timedelta, *, connect: timedelta
) -> Any:
    """Return a gloo group that connects on ``devices`` within ``connect``, and whose operations time out after ``timeout``.

    Raises:
        RuntimeError: a rank cannot be reached; the message has its address and port.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._timeout = min(timeout, connect)
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(timeout)  # does not apply to sends and receives: their wait() must be given the timeout
    group._set_sequence_number_for_group()
    return group


def gloo_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of the operations of a group that :func:`gloo_group` has made."""
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def nccl_options(net_name: str) -> Any:
    """Options of an NCCL group that uses the network module ``net_name``: "IB" (RoCE, too) or "Socket"."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.net_name = net_name  # type: ignore[attr-defined]
    return options


def is_backend_registered(name: str) -> bool:
    """Whether a third-party backend of this name is registered with torch.distributed."""
    return name.upper() in dist.Backend._plugins


def operator_name(operator: Any) -> str:
    """The qualified name of an operator that a dispatch mode sees, without its overload: ``aten::add``."""
    return _traits(operator).name


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator changes in place. Batch norms do not declare in their schema that they change their statistics."""
    traits = _traits(operator)
    if not traits.written and traits.trains is None:
        return

    def given(place: tuple[int, str]) -> Any:
        index, name = place
        return kwargs[name] if name in kwargs else args[index] if index < len(args) else None

    yield from map(given, traits.written)
    if traits.trains is not None and given(traits.trains):
        yield from map(given, traits.statistics)


def computes(operator: Any) -> bool:
    """Whether an operator does more than return a view of its argument, or query its device."""
    return _traits(operator).computes


class _Traits(NamedTuple):
    """Facts from an operator's schema, cached because reading a schema takes longer than running many an operator.

    Arguments are given as position and name.

    Attributes:
        written: the arguments that the operator changes in place.
        statistics: the running statistics, which a batch norm also changes if its argument ``trains`` is true.
        trains: the argument of a batch norm that says whether it is in training mode; None for other operators.
    """

    name: str
    computes: bool
    written: tuple[tuple[int, str], ...]
    statistics: tuple[tuple[int, str], ...]
    trains: tuple[int, str] | None


@functools.cache
def _traits(operator: Any) -> _Traits:
    schema = operator._schema
    places = {argument.name: (index, argument.name) for index, argument in enumerate(schema.arguments)}
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    normalises = "batch_norm" in schema.name
    returned = [value.alias_info for value in schema.returns]
    return _Traits(
        name=schema.name,
        computes=not schema.name.startswith("prim::")
        and (not returned or any(i is None or i.is_write for i in returned)),
        written=tuple(places[name] for name in written),
        statistics=tuple(
            places[n] for n in ("running_mean", "running_var") if normalises and n in places and n not in written
        ),
        trains=places.get("training", places.get("train")) if normalises else None,
    )


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises by the statistics of its batch, in any number of dimensions."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def is_dropout(module: nn.Module) -> bool:
    """Whether a module drops values at random in training, in any number of dimensions."""
    return isinstance(module, torch.nn.modules.dropout._DropoutNd)


def tensor_version(tensor: Tensor) -> int:
    """A number that grows when a tensor is changed in place. Inference tensors have no version counter: for them it is their address."""
    return tensor.data_ptr() if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def noticing_checkpoints(noticed: Callable[[], None]) -> Iterator[None]:
    """A context that calls ``noticed`` whenever activation checkpointing, reentrant or not, begins inside it."""
    from torch.utils import checkpoint

    module: Any = checkpoint
    # torch 2.14 has an inner function, through which its own callers go directly
    inner, outer = "_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator"
    name = inner if hasattr(module, inner) else outer
    without, function = getattr(module, name), module.CheckpointFunction

    def noticing(*args: Any, **kwargs: Any) -> Any:
        noticed()
        return without(*args, **kwargs)

    class Noticing(function):  # type: ignore[misc, valid-type]
        @classmethod
        def apply(cls, *args: Any) -> Any:
            noticed()
            return function.apply(*args)

    setattr(module, name, noticing)
    module.CheckpointFunction = Noticing
    try:
        yield
    finally:
        setattr(module, name, without)
        module.CheckpointFunction = function


def local_tensor(tensor: Any) -> Tensor:
    """The local shard of a DTensor, outside of autograd and without waiting for pending collectives."""
    local: Tensor = tensor._local_tensor
    return local


def set_local_tensor(tensor: Any, local: Tensor) -> None:
    """Replace the local shard of a DTensor by ``local``, as FSDP2 does; the DTensor's ``data`` setter does not change its shard."""
    tensor._local_tensor = local


@contextmanager
def sharded_locally(chosen: Callable[[Tensor], bool]) -> Iterator[None]:
    """A context in which each rank shards a ``chosen`` tensor from its own copy without communication, as with
    ``src_data_rank=None``; by default parallelize_module and distribute_tensor send the shards from rank 0."""
    from torch.distributed.tensor import placement_types as types

    def local(own: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
        def share(*args: Any, **kwargs: Any) -> Tensor:
            if chosen(kwargs["tensor"] if "tensor" in kwargs else args[place]):
                args, kwargs = args[: place + 3], {**kwargs, "src_data_rank": None}
            return own(*args, **kwargs)

        return share

    shard, strided, replicate = types.Shard, types._StridedShard, types.Replicate
    before = shard._shard_tensor, strided._shard_tensor, replicate.__dict__["_make_replicate_tensor"]
    shard._shard_tensor = local(before[0], 1)  # type: ignore[method-assign]
    strided._shard_tensor = local(before[1], 1)  # type: ignore[method-assign]
    replicate._make_replicate_tensor = staticmethod(local(replicate._make_replicate_tensor, 0))  # type: ignore[method-assign]
    try:
        yield
    finally:
        shard._shard_tensor, strided._shard_tensor = before[:2]  # type: ignore[method-assign]
        replicate._make_replicate_tensor = before[2]  # type: ignore[method-assign]


def async_value(tensor: Tensor) -> Tensor:
    """The tensor that a functional collective fills; ``tensor`` itself if it is not the result of one."""
    loaded = sys.modules.get("torch.distributed._functional_collectives")
    return tensor.elem if loaded is not None and isinstance(tensor, loaded.AsyncCollectiveTensor) else tensor


def collective_ranks(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """The global ranks of the group of a functional collective; None for an operator without a group, which only waits."""
    given = {
        a.name: kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(operator._schema.arguments)
    }
    name = given.get("group_name")
    if name is None:
        return None
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]
    return dist.get_process_group_ranks(group)


def forget_conversions(mode: Any) -> None:
    """Drop the weak references that a fake tensor mode holds to its fake tensors. ``Module.to`` swaps fake parameters, which fails if a weak
    reference exists. The mode keeps them, to reuse the fake tensor of a real one, when an operator first meets such arguments."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def fake_mode_of(tensor: Tensor) -> FakeTensorMode | None:
    """The mode under which a fake tensor was made; None for a real tensor."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_mode
    if not isinstance(tensor, nn.Parameter):
        return None
    with without_modes(), without_torch_functions():  # a mode would make a fake tensor of a real parameter's data
        found = tensor.data
    return found.fake_mode if isinstance(found, FakeTensor) else None


def without_modes() -> Any:
    """A context in which no dispatch mode is active, FakeTensorMode included."""
    return _disable_current_modes()


def attention_flop_formulas() -> dict[Any, Any]:
    """FLOP formulas of the CPU's fused attention, as ``custom_mapping`` of FlopCounterMode, which does not count it (torch 2.13).

    The forward has two matrix products; the backward recomputes the first of them and has four more. As in torch's own
    formulas, a causal mask does not reduce the count.
    """

    def product(query: Any, key: Any, value: Any) -> tuple[int, int]:
        batch, heads, queries, size = query
        pairs = batch * heads * queries * key[2]
        return 2 * pairs * size, 2 * pairs * value[3]

    def forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return sum(product(query, key, value))

    def backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        scores, mixed = product(query, key, value)
        return 3 * scores + 2 * mixed

    return {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


def gives_one_number(node: Any) -> bool:
    """Whether the operator that made a node of the autograd graph has given a single number."""
    return all(math.prod(output.shape) == 1 for output in node._input_metadata)


def divisor_of(node: Any) -> Tensor | float | None:
    """The number by which the operator that made a node of the autograd graph divides: that of a division by a single number, the
    elements of a mean, the weights of the targets of a negative log-likelihood; None if it divides by none."""
    name = node.name()
    if name.startswith("DivBackward"):
        other = node._saved_other
        return other if not isinstance(other, Tensor) or other.numel() == 1 else None
    if name.startswith("NllLoss"):
        return node._saved_total_weight if node._saved_reduction == 1 else None
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel)
    if getattr(node, "_saved_reduction", 0) == 1:
        return float(node._saved_self.numel())
    return None


def registered_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name, those registered as None included; the dictionary may be changed in place."""
    return module._parameters


def registered_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name; the dictionary may be changed in place."""
    return module._buffers


def registered_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own children by name. A child with several names is listed under each; ``named_children`` lists it once."""
    return module._modules


def has_load_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that run before its state is loaded and may rename its entries."""
    return bool(module._load_state_dict_pre_hooks)


def initialiser_of(module: nn.Module) -> Callable[[], Any] | None:
    """The method that initialises a module's own parameters: ``reset_parameters``, or ``_reset_parameters`` (``nn.MultiheadAttention``)."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def holds_hooks(name: str) -> bool:
    """Whether the attribute ``name`` of an optimizer holds hooks that were registered with it."""
    return "hooks" in name


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """The hooks that run before and after each step of an optimizer: its own, and those registered for all optimizers."""
    registries: tuple[Mapping[int, Callable[..., Any]], ...] = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return [hook for registry in registries for hook in registry.values()]


def argument_names(operator: Any) -> set[str]:
    """The names of an operator's arguments."""
    return {argument.name for argument in operator._schema.arguments}


def is_broken_graph(error: BaseException) -> bool:
    """Whether ``error`` says that torch.compile(fullgraph=True) met code under torch.compiler.disable."""
    return type(error).__module__ == "torch._dynamo.exc" and "torch.compiler.disable" in str(error)


def has_accumulation_hook(parameter: Tensor) -> bool:
    """Whether a parameter has hooks that run after each accumulation of its gradient."""
    with without_torch_functions():
        return bool(parameter._post_accumulate_grad_hooks)


def has_gradient_hook(parameter: Tensor) -> bool:
    """Whether a parameter has hooks that are given its gradient (``register_hook``)."""
    with without_torch_functions():
        return bool(parameter._backward_hooks)


def has_backward_hook(module: nn.Module) -> bool:
    """Whether a module has backward hooks, which get the gradients of its inputs and outputs."""
    return bool(module._backward_hooks)


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a scalar tensor; on an accelerator by few kernels for all of them."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        torch._foreach_mul_([t for t in tensors if t.device == device], factor.to(device))


def clamp_all(tensors: Sequence[Tensor], most: float) -> None:
    """Clamp tensors in place to within ``most``; on an accelerator by few kernels for all of them."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [tensor for tensor in tensors if tensor.device == device]
        torch._foreach_clamp_min_(here, -most)
        torch._foreach_clamp_max_(here, most)


def is_profiling() -> bool:
    """Whether one of torch's profilers runs in this process; takes a twentieth of a microsecond."""
    return torch.autograd.profiler._is_profiler_enabled


def profiling_all_threads() -> Any:
    """The ``experimental_config`` with which ``torch.profiler.profile`` records all threads, not only the one that started it."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is the result of ``torch.compile``, or was compiled in place by ``module.compile()``."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def is_in_backward() -> bool:
    """Whether this thread runs a part of a backward pass."""
    return torch._C._current_graph_task_id() != -1


without_torch_function = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` for tensor subclasses that torch's functions shall treat as ordinary tensors, at no cost."""


def without_torch_dispatch() -> AbstractContextManager[None]:
    """A context in which operators treat tensors whose class has a ``__torch_dispatch__`` as ordinary tensors."""
    made: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return made


def without_torch_functions() -> AbstractContextManager[None]:
    """A context in which operations treat tensors whose class has a ``__torch_function__`` as ordinary tensors."""
    made: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return made


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The indices and values of a COO tensor, uncoalesced or not; the public accessors refuse an uncoalesced one."""
    return tensor._indices(), tensor._values()
