"""Sharding the optimizer of a run over its replicas: whether it is done, and the reasons that are reported.

sharded, notes = choose_sharding(trainer, context, plan, ...)    # while the plan is made
"""

import inspect
import socket
from collections.abc import Collection, Iterator
from typing import Any

import psutil
import torch
from torch.optim import Optimizer

from lightning_holmes.comm import dtensor
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.optim.elementwise import Separability
from lightning_holmes.optim.shard_states import OwnedStates
from lightning_holmes.optim.unit import sum_dtype
from lightning_holmes.pipeline.attributes import attribute_tensors
from lightning_holmes.pipeline.device_speed import total_memory_bytes
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.pipeline.tape import is_fake
from lightning_holmes.plan.collective_choice import Sharding
from lightning_holmes.plan.memory import lack_of_memory
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.plan import Plan
from lightning_holmes.strategy.compat.averaging import refusal_of_averages
from lightning_holmes.strategy.compat.optimizer_states import StateOnNodes
from lightning_holmes.strategy.connection import Connection
from lightning_holmes.strategy.options import Options
from lightning_holmes.strategy.run_context import RunContext
from lightning_holmes.strategy.user_hooks import BACKWARD_HOOKS, GRADIENT_HOOKS, overridden_hooks, users_callbacks
from lightning_holmes.torch_private import step_hooks

_BEFORE_STEP = (*GRADIENT_HOOKS, *BACKWARD_HOOKS)

_PLANNED_SHARE = 0.5  # of a device's memory; above it, a plan for it is made


def wants_shards(options: Options, data_parallel_size: int) -> bool:
    """Return whether the optimizer may be sharded, so that it has to be tested."""
    asked = options.master_weights or options.is_layered
    return asked or (options.asked.sharding != "none" and data_parallel_size > 1)


def may_shard_parameters(
    options: Options, module: torch.nn.Module, placement: Placement, connection: Connection
) -> bool:
    """Return whether parameters are sharded or, with "auto", may be: because several stages are planned by their memory anyway, or because
    parameters, gradients and a share of Adam's states might not fit a single stage. All ranks must call."""
    device = connection.device
    if options.asked.sharding != "auto" or options.optimizer_nodes or placement.data_parallel_size == 1:
        return options.asked.sharding == "parameters"
    if placement.pipeline_parallel_size > 1:
        return True
    parameters = list(module.parameters())
    trained = sum(p.numel() * sum_dtype(p.dtype).itemsize for p in parameters if p.requires_grad)
    needed = sum(p.numel() * p.itemsize for p in parameters) + trained * (1 + 2 / placement.data_parallel_size)
    own = socket.gethostname() if device.type == "cpu" else connection.rank
    everyone: list[tuple[Any, float]] = connection.all_gather((own, needed))
    here = sum(bytes_of_rank for memory, bytes_of_rank in everyone if memory == own)
    return any(connection.all_gather(here > _PLANNED_SHARE * total_memory_bytes(device)))


def may_couple(optimizer: Optimizer, pipeline_parallel_size: int) -> bool:
    """Return whether the optimizer's step may couple stages. torch's own optimizers step each parameter by itself."""
    return pipeline_parallel_size > 1 and not type(optimizer).__module__.startswith("torch.optim.")


def refuse_coupling(found: Separability, pipeline_parallel_size: int) -> None:
    """Refuse an optimizer whose step on one stage would need parameters of other stages.

    Raises:
        UnsupportedModuleError: the message says what the test showed.
    """
    if found.couples and pipeline_parallel_size > 1:
        raise UnsupportedModuleError(
            f"{found.reason}: its step depends on all parameters at once, of which each of the {pipeline_parallel_size} stages "
            f"has a part; use an optimizer that steps each parameter by itself, or pipeline_parallel_size=1"
        )


def choose_sharding(
    trainer: "pl.Trainer",
    context: RunContext,
    plan: Plan,
    structure: ModuleStructure | None,
    found: Separability | None,
) -> tuple[Sharding, list[str]]:
    """Choose what is sharded over the replicas, with a note that says why; the same on all ranks. All ranks must call.

    Args:
        structure: the traced structure of the steps.
        found: how the optimizer can be sharded; None if nothing is trained, or it was not tested.

    Raises:
        UnsupportedModuleError: sharding is asked for, but is not exact for this optimizer or trainer; the message names the reason.
    """
    options, asked, replicas = context.options, context.options.asked, plan.data_parallel_size
    if asked.optimizer_nodes:
        return "none", []  # nodes hold everything
    if asked.sharding == "parameters" or plan.sharding == "parameters":
        return "parameters", []
    if found is None:
        return "none", []
    module, (optimizer,) = trainer.lightning_module, trainer.strategy.optimizers
    master_weights = keeps_masters(options, module)
    refusal = refusal_of(found, optimizer, trainer)
    if master_weights and found.level == "parameters" and dtensor.has_dtensor_parameters(module):
        refusal = refusal or (
            f"{found.reason}, and of a matrix that is sharded over the tensor group each rank would step its part of the fp32 weights as a "
            f"matrix of its own"
        )
    if options.master_weights and not master_weights and replicas == 1:
        return "none", ["sharding: none, there is one replica"]
    if asked.sharding == "optimizer" or master_weights:
        if refusal:
            argument, without = options.describe_sharding("optimizer")
            if master_weights:
                argument, without = "master_weights=True", "use master_weights=False"
            raise UnsupportedModuleError(f"{argument}: {refusal}; {without}")
        return "optimizer", ["sharding: optimizer, asked for"]
    if asked.sharding == "none" or replicas == 1:
        return "none", []
    connection = context.job.connection
    names = {name for name, _ in module.named_parameters()}
    if structure is not None:
        own, _, _ = plan.placement.coordinate(connection.rank)
        names = set().union(*(structure.parameters_of(plan.partition, stage) for stage in plan.stages_of(own)))
    lack = lack_of_memory(connection.all_gather(_state_and_free(found, optimizer, module, names, connection)))
    if refusal:
        return "none", [f"sharding: none, {refusal}"]
    if lack is not None:
        return "optimizer", [f"sharding: optimizer, {lack}"]
    if plan.prediction is not None and plan.prediction.sharded_optimizer:
        return "optimizer", ["sharding: optimizer, a step is predicted to be faster so"]
    return "none", ["sharding: none, the whole state fits"]


def _state_and_free(
    found: Separability, optimizer: Optimizer, module: torch.nn.Module, names: Collection[str], connection: Connection
) -> tuple[int, int]:
    """Return the bytes of this rank's optimizer state, for the parameters ``names`` that it will hold, and those that will be free for it; all ranks
    must call."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    released, state, gradients = 0, 0.0, 0
    for name, parameter in module.named_parameters():
        local = dtensor.detached(parameter)
        has_memory = local.device.type != "meta" and not is_fake(local)
        if name in names:
            released -= 0 if has_memory else local.numel() * local.itemsize
            state += found.state_bytes * local.numel() * (id(parameter) in trained)
            gradients += max(4, local.itemsize) * local.numel() * (id(parameter) in trained)
        elif has_memory:
            released += local.numel() * local.itemsize
    free = _free_bytes(connection) + released - gradients
    return round(state), free


def keeps_masters(options: Options, module: torch.nn.Module) -> bool:
    """Return whether the optimizer steps fp32 master weights; warn if they are asked for but the parameters are fp32 themselves."""
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())
    if options.master_weights and not low:
        pl.utilities.rank_zero_warn(
            'master_weights=True has nothing to do: parameters are fp32; it is for precision="bf16-true"'
        )
    return options.master_weights and low


def refusal_of(found: Separability, optimizer: Optimizer, trainer: "pl.Trainer") -> str:
    """Return why sharding the optimizer would not give the same numbers; empty if it would."""
    if found.level == "none":
        return found.reason
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, pl.callbacks.BaseFinetuning):
            return f"the callback {type(callback).__name__} adds parameters to the optimizer while the module trains"
        if isinstance(callback, pl.callbacks.ModelPruning):
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
    """Yield pairs of names of different tensors of ``module`` that share memory: a parameter, and another parameter, a buffer or an attribute."""
    parameters = {id(p): (n, p) for n, p in module.named_parameters()}
    others = {id(t): (n, t) for n, t in [*module.named_buffers(), *_attributes(module)] if id(t) not in parameters}
    spans = sorted(
        (*span, name, index in parameters) for index, (name, t) in (parameters | others).items() for span in _spans(t)
    )
    before: list[Any] = []  # earlier spans that reach into the present one
    for device, first, end, name, is_parameter in spans:
        before = [b for b in before if b[0] == device and b[2] > first]
        for other in before:
            if is_parameter or other[4]:
                yield other[3], name
        before.append((device, first, end, name, is_parameter))


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensor attributes of a module, except those that spectral_norm and the like recompute from ``weight_orig`` before each forward."""
    originals = {
        f"{owner}.{n}" if owner else n
        for owner, part in module.named_modules()
        for n, _ in part.named_parameters(recurse=False)
    }
    for name, tensor in attribute_tensors(module).items():
        if f"{name.rpartition('.')[0]}_orig" not in originals:
            yield name, tensor


def _spans(tensor: torch.Tensor) -> Iterator[tuple[str, int, int]]:
    """Yield the device, the first byte and the byte after the last of a tensor's memory; nothing if it has no memory."""
    tensor = dtensor.detached(tensor)
    if tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() and not is_fake(tensor):
        reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        yield str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize


def refusal_of_changes(structure: ModuleStructure | None) -> str:
    """Return why parameters cannot be released between their forward and their backward, as far as the traced steps show; empty if they can."""
    if structure is None or not structure.changed_parameters:
        return ""
    name = structure.changed_parameters[0]
    return (
        f"a layer changes {name} in place in its forward, of which a stage has a copy only while it is computed: the change would be "
        f"lost. Change it in a hook between batches (on_train_batch_start)"
    )


def why_not_sharded(
    trainer: "pl.Trainer",
    options: Options,
    found: Separability | None,
    structure: ModuleStructure | None,
    *,
    may_shard: bool,
) -> str | None:
    """Return why ``sharding="auto"`` must leave parameters whole, as far as is known before a step; None if nothing prevents sharding.

    Args:
        found: how the optimizer can be sharded; None if it was not tested.
        structure: the traced structure of the steps.
        may_shard: see :func:`may_shard_parameters`.
    """
    if trainer.state.fn != pl.trainer.states.TrainerFn.FITTING:
        return "nothing is trained"
    if not may_shard:
        return "whole ones fit"
    if options.compression is not None:
        return f"compression={options.compression!r} is not exact, and each replica would own its share alone"
    optimizer = next(iter(trainer.strategy.optimizers), None)
    refusal = "" if found is None or optimizer is None else refusal_of_shards(found, optimizer, trainer, structure)
    readers = [f"{reader} reads whole gradients" for reader in gradient_readers(trainer)]
    return refusal or next(iter(readers), None)


def refusal_of_shards(
    found: Separability, optimizer: Optimizer, trainer: "pl.Trainer", structure: ModuleStructure | None
) -> str:
    """Return why parameters cannot live in shards; empty if they can."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return refusal_of(found, optimizer, trainer) or refusal_of_averages(callbacks) or refusal_of_changes(structure)


def gradient_readers(trainer: "pl.Trainer") -> list[str]:
    """Return the user's hooks between the backward and the optimizer's step, which may read gradients; tripwires.py watches the other hooks."""
    callbacks = users_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
    found = overridden_hooks(trainer.lightning_module, callbacks, GRADIENT_HOOKS)
    return [f"{type(owner).__name__}.{hook}" for owner, hook in found]


def refusal_of_nodes(
    found: Separability, optimizer: Optimizer, trainer: "pl.Trainer", structure: ModuleStructure | None
) -> str:
    """Return why optimizer nodes cannot hold the parameters; empty if they can."""
    refusal = _refusal_of_steps(optimizer) or refusal_of_shards(found, optimizer, trainer, structure)
    scales = getattr(trainer.precision_plugin, "scaler", None) is not None
    if not refusal and scales and any(group.get("fused") for group in optimizer.param_groups):
        return "a step that overflows is left out inside the kernel that fused=True asks for, where nobody sees it"
    if not refusal and torch.is_anomaly_enabled():
        return "detect_anomaly=True looks at reduced gradients, which workers do not have"
    return refusal


def _refusal_of_steps(optimizer: Optimizer) -> str:
    """Return why the step of this object differs from that of its class, which is the only one that nodes can run; empty if it does not."""
    name = type(optimizer).__name__
    if isinstance(optimizer.state, StateOnNodes):
        return f"this {name} was trained with before, when nodes took its parameters and states; make a new one in configure_optimizers"
    hooks = step_hooks(optimizer)
    if hooks:
        hook = getattr(hooks[0], "__qualname__", type(hooks[0]).__qualname__)
        return f"{hook} is called with each step of {name} (register_step_pre_hook or the like), on workers, where it would find no parameters"
    step = inspect.unwrap(vars(optimizer).get("step", type(optimizer).step))  # schedulers wrap the step of the class
    if getattr(step, "__func__", step) is not inspect.unwrap(type(optimizer).step):
        return f"{name}.step was replaced on this optimizer, and nodes know that of its class; override it in a class"
    return ""


def why_deferred(trainer: "pl.Trainer") -> str:
    """Return why optimizer nodes must wait for the optimizer's step before they update anything; empty if they need not, because nothing
    between the beginning of a batch and the step needs gradients, or may change or skip the step."""
    if trainer.gradient_clip_val:
        return f"gradient_clip_val={trainer.gradient_clip_val} needs all gradients first"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "a GradScaler leaves out steps that overflow"
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    found = overridden_hooks(trainer.lightning_module, users_callbacks(callbacks), _BEFORE_STEP)
    return next((f"{type(owner).__name__}.{hook} may change a step or leave it out" for owner, hook in found), "")


def hidden_in_hooks(
    shards: OwnedStates | None,
    *,
    shards_parameters: bool,
    optimizer_nodes: int,
    is_partial: bool,
    runs_ahead: bool,
) -> dict[str, str]:
    """Return which of "value" and "grad" hooks of the user cannot read whole, or only not read ("reads grad"), and why, for Tripwires.

    Args:
        is_partial: whether gradients are this rank's own, since more batches are accumulated before they are summed over ranks.
        runs_ahead: whether the backward of a batch has run that Lightning has yet to ask for.
    """
    if optimizer_nodes:
        why = "optimizer nodes hold it between steps; use optimizer_nodes=0"
        return {"value": why, "grad": why}
    if shards_parameters:
        return {"grad": 'each replica holds a share of it; use sharding="none"'}
    if runs_ahead:
        return {
            "reads grad": "a pipeline has run the backward by then, and those of the batch before are gone: read it in "
            "on_before_optimizer_step or on_train_batch_end"
        }
    if is_partial:
        return {
            "grad": "between accumulated batches it is not summed over ranks yet: read it in on_before_optimizer_step, or use "
            "accumulate_grad_batches=1"
        }
    if shards is None or shards.whole_gradients:
        return {}
    return {
        "grad": "the optimizer is sharded, and each replica has the sums of its own share: read it in "
        'on_before_optimizer_step, for which they are kept whole, or use sharding="none"'
    }


def _free_bytes(connection: Connection) -> int:
    """Return the bytes of memory that this rank may still take; on the CPU an equal share of the host's free memory. All ranks must call."""
    if connection.device.type == "cuda":
        return int(torch.cuda.mem_get_info(connection.device)[0])
    hosts = connection.all_gather(socket.gethostname())
    return int(psutil.virtual_memory().available) // hosts.count(socket.gethostname())
