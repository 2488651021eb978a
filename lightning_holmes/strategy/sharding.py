"""Sharding the optimizer of a run over its replicas: whether that can be done, whether it is, and what is said of it.

found = test_optimizers(optimizers, device)                      # while groups hold the whole module's parameters
shards, note = shard_optimizer(options, found, ...)              # None: not sharded
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_holmes.comm import dtensor
from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.optim.elementwise import Separability, step_seconds, test_separability
from lightning_holmes.optim.param_gather import can_gather_lazily
from lightning_holmes.optim.reducer import GradientReducer
from lightning_holmes.optim.remote import refusal_of_groups
from lightning_holmes.optim.shard_memory import ReplicatedMemory
from lightning_holmes.optim.shard_states import OwnedStates
from lightning_holmes.optim.sharded import ShardedOptimizer
from lightning_holmes.pipeline.attributes import attribute_tensors
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.pipeline.tape import is_fake
from lightning_holmes.plan.sharding_choice import ShardingChoice, ShardingFacts, choose_sharding, needs_times
from lightning_holmes.strategy.compat.averaging import refusal_of_averages
from lightning_holmes.strategy.compat.optimizer_states import StateOnNodes
from lightning_holmes.strategy.user_hooks import BACKWARD_HOOKS, GRADIENT_HOOKS, overridden_hooks, users_callbacks
from lightning_holmes.torch_private import step_hooks

_BEFORE_STEP = (*GRADIENT_HOOKS, *BACKWARD_HOOKS)

_KEPT_SHARE = 0.25  # of a worker's free memory; activations need the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions:
    """HolmesStrategy's arguments of the same names.

    Raises:
        ConfigurationError: one is no such value, or they do not go together.
    """

    sharded_optimizer: bool | Literal["auto"] = "auto"
    sharded_parameters: bool | Literal["auto"] = False
    optimizer_nodes: int = 0
    master_weights: bool = False

    def __post_init__(self) -> None:
        if self.sharded_optimizer not in ("auto", True, False):
            raise ConfigurationError(f'sharded_optimizer={self.sharded_optimizer!r}; use True, False or "auto"')
        if self.sharded_parameters is True and self.sharded_optimizer is False:
            raise ConfigurationError(
                "sharded_parameters=True keeps each parameter's optimizer state where its share is, but sharded_optimizer is "
                'False; leave it at "auto"'
            )
        if not isinstance(self.master_weights, bool):
            raise ConfigurationError(f"master_weights={self.master_weights!r}; use True or False")
        if self.master_weights and self.sharded_optimizer is False:
            raise ConfigurationError(
                "master_weights=True keeps fp32 weights in the shards of the optimizer, but sharded_optimizer is False; "
                'leave it at "auto"'
            )


def wants_shards(options: ShardingOptions, data_parallel_size: int) -> bool:
    """Whether it is worth while to test optimizers."""
    asked = options.master_weights or options.sharded_parameters is True or options.optimizer_nodes > 0
    return asked or (options.sharded_optimizer is not False and data_parallel_size > 1)


def test_optimizer(optimizer: Optimizer, device: torch.device, gather: Callable[[Any], list[Any]]) -> Separability:
    """How ``optimizer``, whose groups hold all parameters, can be sharded; the same on all ranks, which all call."""
    everyone: list[Separability] = gather(test_separability(optimizer, device))
    order = ("elements", "parameters", "none")
    return max(everyone, key=lambda found: order.index(found.level))


def may_couple(optimizer: Optimizer, pipeline_parallel_size: int) -> bool:
    """Whether it is not known that stages can step for themselves: torch's own optimizers see one parameter at a time."""
    return pipeline_parallel_size > 1 and not type(optimizer).__module__.startswith("torch.optim.")


def refuse_coupling(found: Separability, pipeline_parallel_size: int) -> None:
    """Stop where a stage's step would need parameters of other stages.

    Raises:
        UnsupportedModuleError: with what the test showed.
    """
    if found.couples and pipeline_parallel_size > 1:
        raise UnsupportedModuleError(
            f"{found.reason}: its step depends on all parameters at once, of which each of the {pipeline_parallel_size} stages "
            f"has a part; use an optimizer that steps each parameter by itself, or pipeline_parallel_size=1"
        )


test_optimizer.__test__ = False  # type: ignore[attr-defined]  # not one of pytest's


def shard_optimizer(
    options: ShardingOptions,
    found: Separability,
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    reducer: GradientReducer,
    trainer: "pl.Trainer",
    *,
    data_parallel_size: int,
    device: torch.device,
    gather: Callable[[Any], list[Any]],
) -> tuple[ShardedOptimizer | None, ShardingChoice]:
    """Shard ``optimizer`` if that is asked for, or better; all ranks must call.

    Args:
        names: for each group, those of this rank's parameters.
        gather: what each rank gives, on every rank.

    Raises:
        UnsupportedModuleError: it is asked for, and cannot be done exactly; names the reason.
    """
    module = trainer.lightning_module
    master_weights = keeps_masters(options, module)
    if options.master_weights and not master_weights and data_parallel_size == 1:
        return None, ShardingChoice(on=False, reason="since there is one replica")
    refusal = refusal_of(found, optimizer, trainer)
    asked = options.sharded_optimizer is True or master_weights
    if refusal and asked:
        argument = "master_weights" if master_weights else "sharded_optimizer"
        raise UnsupportedModuleError(f"{argument}=True: {refusal}; use {argument}=False")
    readers = gradient_readers(trainer)
    choice = ShardingChoice(on=True, reason="asked for")
    if refusal:
        choice = ShardingChoice(on=False, reason=refusal)
    elif not asked:
        choice = _choose(found, optimizer, names, reducer, device, bool(readers), data_parallel_size, gather)
    if not choice.on:
        return None, choice
    reducer.lay_out()
    groups = reducer.groups
    memory = ReplicatedMemory(
        reducer.buffer,
        None if groups.gradients is None else groups.gradients.whole,
        reducer.queue,
        gather=reducer.gather,
        lazily=can_gather_lazily(module),
    )
    shards = ShardedOptimizer(
        optimizer,
        names,
        memory,
        found,
        replicas=groups.data_parallel,
        whole_gradients=bool(readers),
        master_weights=master_weights,
    )
    shards.watch(module)
    reason = choice.reason
    if found.level == "parameters":
        reason += f"; by whole parameters, since {found.reason}"
    elif readers:
        reason += f"; gradients stay whole on each replica for {readers[0]}"
    if master_weights:
        reason += "; with fp32 master weights"
    return shards, ShardingChoice(on=True, reason=reason)


def keeps_masters(options: ShardingOptions, module: torch.nn.Module) -> bool:
    """Whether the optimizer steps fp32 weights beside the parameters."""
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())
    if options.master_weights and not low:
        rank_zero_warn('master_weights=True has nothing to do: parameters are fp32; it is for precision="bf16-true"')
    return options.master_weights and low


def refusal_of(found: Separability, optimizer: Optimizer, trainer: "pl.Trainer", *, lets_finetune: bool = False) -> str:
    """Why the optimizer cannot be sharded with the same numbers; empty if it can.

    Args:
        lets_finetune: callbacks may find whole parameters in its groups, and leave them there.
    """
    if found.level == "none":
        return found.reason
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning) and not lets_finetune:
            return f"the callback {type(callback).__name__} adds parameters to the optimizer while the module trains"
        if isinstance(callback, ModelPruning):
            return f"the callback {type(callback).__name__} gives parameters other memory while the module trains"
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        return "it has complex parameters"
    shared = next(shared_memory(trainer.lightning_module), None)
    if shared is not None:
        return (
            f"{shared[0]} and {shared[1]} lie in the same memory, which would be cut apart; tie parameters by giving both places the "
            f"same nn.Parameter, and compute views in the step"
        )
    return ""


def shared_memory(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Names of a parameter and of another parameter, a buffer or an attribute of ``module``, other objects in the same memory."""
    parameters = {id(p): (n, p) for n, p in module.named_parameters()}
    others = {id(t): (n, t) for n, t in [*module.named_buffers(), *_attributes(module)] if id(t) not in parameters}
    spans = sorted(
        (*span, name, index in parameters) for index, (name, t) in (parameters | others).items() for span in _spans(t)
    )
    before: list[Any] = []  # that reach as far as what comes next
    for device, first, end, name, is_parameter in spans:
        before = [b for b in before if b[0] == device and b[2] > first]
        for other in before:
            if is_parameter or other[4]:
                yield other[3], name
        before.append((device, first, end, name, is_parameter))


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a module keeps, but those that spectral_norm and the like make anew of ``weight_orig`` before each forward."""
    originals = {
        f"{owner}.{n}" if owner else n
        for owner, part in module.named_modules()
        for n, _ in part.named_parameters(recurse=False)
    }
    for name, tensor in attribute_tensors(module).items():
        if f"{name.rpartition('.')[0]}_orig" not in originals:
            yield name, tensor


def _spans(tensor: torch.Tensor) -> Iterator[tuple[str, int, int]]:
    """Device, first byte and the one after the last of what a tensor reaches in memory; nothing where it has none."""
    tensor = dtensor.local_part(tensor).detach()
    if tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() and not is_fake(tensor):
        reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        yield str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize


def refusal_of_changes(structure: ModuleStructure | None) -> str:
    """Why parameters cannot be elsewhere between their forward and their backward, as far as the traced steps tell; empty if they can."""
    if structure is None or not structure.changed_parameters:
        return ""
    name = structure.changed_parameters[0]
    return (
        f"a layer changes {name} in place in its forward, of which a stage has a copy only while it is computed: the change would be "
        f"lost. Change it in a hook between batches (on_train_batch_start)"
    )


def why_not_sharded(
    found: Separability | None,
    optimizer: Optimizer | None,
    trainer: "pl.Trainer",
    *,
    compression: str | None,
    structure: ModuleStructure | None,
) -> str | None:
    """Why ``sharded_parameters="auto"`` leaves parameters whole, as far as it can be told before a step; None: nothing is against it.

    Args:
        found: how ``optimizer`` can be sharded; None where it is not made yet, or there is one replica.
        structure: what is known of the steps.
    """
    if compression is not None:
        return f"compression={compression!r} is not exact, and each replica would own the only copy of its share"
    refusal = "" if found is None or optimizer is None else refusal_of_shards(found, optimizer, trainer, structure)
    readers = [f"{reader} reads whole gradients" for reader in gradient_readers(trainer)]
    return refusal or next(iter(readers), None)


def refusal_of_shards(
    found: Separability, optimizer: Optimizer, trainer: "pl.Trainer", structure: ModuleStructure | None
) -> str:
    """Likewise why parameters cannot live in shards."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return refusal_of(found, optimizer, trainer) or refusal_of_averages(callbacks) or refusal_of_changes(structure)


def gradient_readers(trainer: "pl.Trainer") -> list[str]:
    """The hooks of the user between the backward and the step, which may read gradients; in others tripwires.py sees it."""
    callbacks = users_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
    found = overridden_hooks(trainer.lightning_module, callbacks, GRADIENT_HOOKS)
    return [f"{type(owner).__name__}.{hook}" for owner, hook in found]


def refusal_of_nodes(
    found: Separability, optimizer: Optimizer, trainer: "pl.Trainer", structure: ModuleStructure | None
) -> str:
    """Likewise why optimizer nodes cannot hold them."""
    refusal = _refusal_of_steps(optimizer) or refusal_of(found, optimizer, trainer, lets_finetune=True)
    refusal = refusal or refusal_of_changes(structure)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            refusal = refusal or f"the callback {type(callback).__name__} reads whole parameters between steps"
    scales = getattr(trainer.precision_plugin, "scaler", None) is not None
    refusal = refusal or refusal_of_groups(optimizer.param_groups, found, scales=scales)
    if torch.is_anomaly_enabled():
        refusal = refusal or "detect_anomaly=True looks at reduced gradients, which workers do not have"
    return refusal


def _refusal_of_steps(optimizer: Optimizer) -> str:
    """Why the step of this object is not the one of its class, which is all that a node has of it; empty if it is."""
    name = type(optimizer).__name__
    if isinstance(optimizer.state, StateOnNodes):
        return f"this {name} was trained with before, when nodes took its parameters and states; make a new one in configure_optimizers"
    hooks = step_hooks(optimizer)
    if hooks:
        hook = getattr(hooks[0], "__qualname__", type(hooks[0]).__qualname__)
        return f"{hook} is called with each step of {name} (register_step_pre_hook or the like), on workers, where it would find no parameters"
    step = inspect.unwrap(vars(optimizer).get("step", type(optimizer).step))  # schedulers wrap that of the class
    if getattr(step, "__func__", step) is not inspect.unwrap(type(optimizer).step):
        return f"{name}.step was replaced on this optimizer, and nodes know that of its class; override it in a class"
    return ""


def why_deferred(trainer: "pl.Trainer") -> str:
    """Why optimizer nodes must wait for the optimizer's step before they update anything; empty if they need not: nothing between
    a batch's beginning and the step needs gradients, or may change it or leave it out."""
    if trainer.gradient_clip_val:
        return f"gradient_clip_val={trainer.gradient_clip_val} needs all gradients first"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "a GradScaler leaves out steps that overflow"
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    found = overridden_hooks(trainer.lightning_module, users_callbacks(callbacks), _BEFORE_STEP)
    return next((f"{type(owner).__name__}.{hook} may change a step or leave it out" for owner, hook in found), "")


def keeps_parameters(
    asked: bool | Literal["auto"], num_bytes: int, device: torch.device, gather: Callable[[Any], list[Any]]
) -> tuple[bool, str]:
    """Whether workers of optimizer nodes keep their ``num_bytes`` of parameters from the forward to the backward, and why; the same on
    all ranks, which all call."""
    if asked != "auto":
        return asked, "asked for"
    largest, free = max(gather(num_bytes)), min(gather(_free_bytes(device, gather)))
    why = f"up to {largest / 1e6:.1f} MB, where {free / 1e6:.0f} MB are free"
    return largest <= _KEPT_SHARE * free, why


def hidden_in_hooks(shards: OwnedStates | None, *, shards_parameters: bool, optimizer_nodes: int) -> dict[str, str]:
    """What of parameters ("value", "grad") hooks of the user cannot see whole, and why, for Tripwires."""
    if optimizer_nodes:
        why = "optimizer nodes hold it between steps; use optimizer_nodes=0"
        return {"value": why, "grad": why}
    if shards_parameters:
        return {"grad": "each replica holds a share of it; use sharded_parameters=False"}
    if shards is None or shards.whole_gradients:
        return {}
    return {
        "grad": "the optimizer is sharded, and each replica has the sums of its own share: read it in "
        "on_before_optimizer_step, for which they are kept whole, or use sharded_optimizer=False"
    }


def _choose(
    found: Separability,
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    reducer: GradientReducer,
    device: torch.device,
    whole_gradients: bool,
    data_parallel_size: int,
    gather: Callable[[Any], list[Any]],
) -> ShardingChoice:
    """By memory, and where that leaves it open, by what is measured; the same on all ranks, which all call."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    num_elements = sum(p.numel() for p in parameters)
    state_bytes = round(found.state_bytes * num_elements)
    known = ShardingFacts(state_bytes=state_bytes, free_bytes=_free_bytes(device, gather), whole_s=0.0, sharded_s=0.0)
    facts: list[ShardingFacts] = gather(known)
    if not needs_times(facts):
        return choose_sharding(facts)
    reducer.lay_out()
    sum_s, scatter_s, gather_s = reducer.measure_sharing()
    dtype = parameters[0].dtype if parameters else torch.float32
    step_s = num_elements * step_seconds(optimizer, dtype, device)
    reduce_s = sum_s if whole_gradients or found.level == "parameters" else scatter_s
    measured = ShardingFacts(
        state_bytes=state_bytes,
        free_bytes=known.free_bytes,
        whole_s=sum_s + step_s,
        sharded_s=reduce_s + step_s / data_parallel_size + gather_s,
    )
    return choose_sharding(gather(measured))


def _free_bytes(device: torch.device, gather: Callable[[Any], list[Any]]) -> int:
    """Memory that this rank may still take; on the host an equal share of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import socket

    hosts = gather(socket.gethostname())
    return int(psutil.virtual_memory().available) // hosts.count(socket.gethostname())
