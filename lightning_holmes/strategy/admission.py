"""Checks of what the strategy supports: modules, trainers and optimizers that cannot be run exactly are refused with a reason.

Every check here is made before training, on all ranks alike; :func:`note_lost` marks a module for that of its next run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from lightning_holmes.comm import dtensor
from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import is_compiled_module, synchronises_batch_norm
from lightning_holmes.pipeline.object_state import find_below
from lightning_holmes.strategy.compat.averaging import averaging
from lightning_holmes.torch_private import has_accumulation_hook, has_gradient_hook, is_batch_norm, is_dropout

_CURE = "Go on from a checkpoint (ModelCheckpoint, or snapshot_every_n_steps)"
_LOST = "_holmes_lost_values"  # set on a module that has lost values


def check_run(module: "pl.LightningModule", trainer: "pl.Trainer", *, is_pipeline: bool, num_replicas: int) -> None:
    """Refuse settings and callbacks of a fit that a pipeline cannot run exactly.

    Raises:
        ConfigurationError: the trainer synchronises batch normalisation over replicas.
        UnsupportedModuleError: the message names the setting or callback, and the fix.
    """
    name = type(module).__name__
    if trainer.accumulate_grad_batches > 1 and pl.utilities.model_helpers.is_overridden("optimizer_zero_grad", module):
        raise UnsupportedModuleError(
            f"{name} overrides optimizer_zero_grad and accumulate_grad_batches is {trainer.accumulate_grad_batches}: when "
            f"gradients begin anew is then not known; remove one of them"
        )
    norms = [n for n, m in module.named_modules() if is_batch_norm(m)]
    if num_replicas > 1 and norms and synchronises_batch_norm(trainer):
        raise ConfigurationError(
            f"Trainer(sync_batchnorm=True): {name} has batch normalisation ({norms[0]}), whose statistics here are those of each of "
            f"{num_replicas} replicas; leave sync_batchnorm out, or use GroupNorm or LayerNorm"
        )
    for callback in trainer.callbacks if is_pipeline else ():  # type: ignore[attr-defined]
        if isinstance(callback, pl.callbacks.StochasticWeightAveraging) and norms:
            raise UnsupportedModuleError(
                f"the callback {type(callback).__name__} runs an epoch without backward for batch normalisation, which a "
                f"pipeline cannot; use GroupNorm or LayerNorm, or pipeline_parallel_size=1"
            )


def check_tensor_parallel(module: "pl.LightningModule", trainer: "pl.Trainer", tensor_parallel_size: int) -> None:
    """Refuse tensor-parallel groups that shard nothing, and callbacks that do not work with DTensors; warn of dropout.

    Raises:
        ConfigurationError: configure_model has not sharded anything.
        UnsupportedModuleError: a callback averages weights.
    """
    name = type(module).__name__
    if not dtensor.has_dtensor_parameters(module):
        if tensor_parallel_size > 1:
            raise ConfigurationError(
                f"tensor_parallel_size={tensor_parallel_size}, but no parameter of {name} is sharded over it: in "
                f"configure_model call torch.distributed.tensor.parallel.parallelize_module(..., "
                f'self.device_mesh["{dtensor.AXIS}"], ...), or leave tensor_parallel_size out'
            )
        return
    averages = next(averaging(trainer.callbacks), None)  # type: ignore[attr-defined]
    if averages is not None:
        raise UnsupportedModuleError(
            f"the callback {type(averages).__name__} copies weights, which parallelize_module has made DTensors; "
            f"leave it out, or use tensor_parallel_size=1 without parallelize_module"
        )
    drops = [n for n, m in module.named_modules() if is_dropout(m) and getattr(m, "p", 0) > 0]
    if drops and tensor_parallel_size > 1 and trainer.state.fn == pl.trainer.states.TrainerFn.FITTING:
        pl.utilities.rank_zero_warn(
            f"{name}: all ranks of a tensor group draw the same dropout mask ({drops[0]}). That gives the numbers of one process where each "
            f"rank has the whole input; where it has a part (between ColwiseParallel and RowwiseParallel, or under SequenceParallel) all "
            f"parts get one mask: right on average, but not these numbers"
        )


def check_module(module: "pl.LightningModule", *, fitting: bool, is_pipeline: bool = True) -> None:
    """Refuse a LightningModule that a pipeline cannot run as plain Lightning would.

    Raises:
        UnsupportedModuleError: the message names what the module does, and the fix.
    """
    name = type(module).__name__
    if is_compiled_module(module):
        raise UnsupportedModuleError(
            f"{name} was compiled as a whole by torch.compile, which hides its layers; pass the module itself to the "
            f"trainer (parts inside a layer may be compiled)"
        )
    lazy = next((n for n, p in module.named_parameters() if torch.nn.parameter.is_lazy(p)), None)
    if lazy is not None:
        raise UnsupportedModuleError(
            f"{lazy} of {name} has no shape before the first batch (a lazy module), by which layers are dealt to stages: give the layer its "
            f"sizes, or run one batch through the module in __init__ or configure_model"
        )
    if not fitting:
        return
    if not module.automatic_optimization:
        raise UnsupportedModuleError(
            f"{name} uses manual optimization (automatic_optimization=False): its backward calls would run on one stage "
            f"only; use automatic optimization, or another strategy"
        )
    if pl.utilities.model_helpers.is_overridden("backward", module):
        raise UnsupportedModuleError(
            f"{name} overrides backward(), but a pipeline runs the backward itself, stage by stage; scale or combine "
            f"losses in training_step instead"
        )
    if is_pipeline:
        refuse_accumulation_hooks(module)
    if pl.utilities.signature_utils.is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UnsupportedModuleError(
            f"{name}.training_step takes dataloader_iter: batches must come one by one, as training_step(batch, batch_idx)"
        )


def refuse_hidden_metrics(module: "pl.LightningModule") -> None:
    """For a module that runs in stages: refuse metrics in its lists, dicts and objects, whose state would not come to other ranks.

    Raises:
        UnsupportedModuleError: the message names the metric and the fix.
    """
    known = {id(part) for part in module.modules()}
    for path, metric in find_below(module, (Metric, MetricCollection)).items():
        if id(metric) not in known:
            raise UnsupportedModuleError(
                f"{type(module).__name__} keeps a {type(metric).__name__} in {path}, which is no submodule, so that the ranks of other "
                f"stages would not get its state: make it an attribute of the module itself, or keep it in a torch.nn.ModuleDict or "
                f"ModuleList, as torchmetrics asks for"
            )


def refuse_accumulation_hooks(module: "pl.LightningModule") -> None:
    """Refuse post-accumulate-grad hooks, which would run for each microbatch.

    Raises:
        UnsupportedModuleError: the message names the parameter and the fix.
    """
    for name, parameter in module.named_parameters():
        if has_accumulation_hook(parameter):
            raise UnsupportedModuleError(
                f"{type(module).__name__}.{name} has a hook by register_post_accumulate_grad_hook, which would be called for "
                f"each microbatch with a part of the batch's gradient; change or use gradients in on_before_optimizer_step, or "
                f"step by the optimizer that configure_optimizers returns"
            )


def note_gradient_hooks(module: "pl.LightningModule") -> None:
    """Warn of hooks on parameters' gradients, which are called on the rank of a stage, with a part of the batch's gradient."""
    name = next((name for name, parameter in module.named_parameters() if has_gradient_hook(parameter)), None)
    if name is not None:
        pl.utilities.rank_zero_warn(
            f"{type(module).__name__}.{name} has a hook on its gradient (register_hook, or wandb's watch), called on the ranks of its stage, for "
            f"each microbatch, with the share of that and of the replica: scaling and masks are exact; on_before_optimizer_step has the batch's"
        )


@contextmanager
def refusing_several_optimizers(module: "pl.LightningModule") -> Iterator[None]:
    """Inside, replace Lightning's error for several optimizers: it suggests manual optimization, which this strategy refuses."""
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise UnsupportedModuleError(
            f"{type(module).__name__}.configure_optimizers returned several optimizers; return one, with a parameter group "
            f"for each"
        ) from None


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that are known by their class to need the whole model at once.

    Raises:
        UnsupportedModuleError: an optimizer is torch's LBFGS.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedModuleError(
                "LBFGS evaluates its closure as often as its own stage's gradients suggest, so stages would part ways; "
                "use an optimizer that steps once a batch"
            )


def compare_facts(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks whose facts differ.

    Args:
        everyone: for each global rank its facts, by name.

    Raises:
        ConfigurationError: the facts differ; the message names the first differences and the ranks.
    """
    first = everyone[0]
    differences = []
    for rank, facts in enumerate(everyone[1:], start=1):
        for name in dict.fromkeys([*first, *facts]):
            mine, theirs = first.get(name, "missing"), facts.get(name, "missing")
            if mine != theirs:
                differences.append(f"{name}: {mine} on rank 0, {theirs} on rank {rank}")
    if differences:
        more = f" (and {len(differences) - 5} more differences)" if len(differences) > 5 else ""
        raise ConfigurationError(
            f"the ranks do not run the same job: {'; '.join(differences[:5])}{more}. Install the same versions and start "
            f"the same script with the same options everywhere"
        )


def note_lost(module: pl.LightningModule, held: str) -> None:
    """Mark ``module`` as having lost values in a failed run, and warn: each process held a part of them, and no rank sends
    the rest. ``held``: where the values were, in words after "the run has failed while"."""
    vars(module)[_LOST] = True
    pl.utilities.rank_zero_warn(
        f"the run has failed while {held}: parameters that this process did not hold whole are NaN now, where plain Lightning would keep their values. {_CURE}"
    )


def refuse_lost(module: pl.LightningModule) -> None:
    """Refuse to run a module that lost parameter values in an earlier, failed run, whose exception the user has caught.

    Raises:
        UnsupportedModuleError: the module has lost values.
    """
    if _LOST in vars(module):
        raise UnsupportedModuleError(
            f"parameters of {type(module).__name__} have been NaN since a run before has failed, in which each process held a part of them. "
            f"{_CURE}, with a new module, in new processes"
        )
