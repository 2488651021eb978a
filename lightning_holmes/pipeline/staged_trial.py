"""StagedTrial: a trial of a step whose module is divided: the samples pass through the stages of all ranks, forward only.

Each rank runs a copy of its part of the module, so that nothing of a run stays: no gradient, no log, no metric, no buffer.
The step's output and logs come back to every rank, as those of a step do, so that all ranks find the same.

    trial = StagedTrial(driver, request, replicas)
    findings = find_batch_dependence(module, "training_step", batch, arguments, splitter, trial=trial)   # all ranks must call
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.objects import any_of
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.preserved_trainer import Flags
from lightning_holmes.pipeline.request import StepRequest
from lightning_holmes.pipeline.runner import loss_of
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.steps import StepDriver
from lightning_holmes.pipeline.trial import Kept, Lengths, Outcome, Trial, gradients_of, numbers_of
from lightning_holmes.pipeline.whole_steps import refusing_collectives


class StagedTrial(Trial):
    """Every rank of the job must make one, and call its methods together.

    Args:
        driver: runs the steps of the module itself.
        request: the step; its batch is left out.
        replicas: the group of the replicas of this stage, which run as many steps, since they may bring parameters together; None: only one.
    """

    has_buffers = False  # of which each rank knows only its own
    may_fail = False  # the ranks would part, and a connection may have broken

    def __init__(self, driver: StepDriver, request: StepRequest, replicas: dist.ProcessGroup | None) -> None:
        super().__init__(driver.module, request.step_name, request.arguments, request.context)
        self._driver, self._replicas = driver, replicas
        self._request = replace(request, num_microbatches=1, loss_scales=None, broadcasts=False, may_skip=True)

    def anybody(self, flag: bool) -> bool:
        return flag if self._replicas is None else any_of(flag, self._replicas)

    def lengths(self, batch: Any) -> Lengths:
        """None: the trial of the first batch has told."""
        return {}

    def outcome(self, copy: pl.LightningModule, batches: Sequence[Any], seed: int) -> list[Outcome]:
        """The outcome of steps over ``batches`` in turn; gradients are those of the last stage, and only what it keeps on the module is compared.

        A step that fails after the layers has an infinite loss: only the last stage fails, and all have to go on.
        """
        twin = self._driver.pipeline.twin(copy)
        driver = self._driver.over(twin)
        vars(copy)[self._request.step_name] = self._looked_at(copy, twin)
        is_fp32 = self._computes_in_fp32(copy)
        found = []
        trained = [(parameter, parameter.requires_grad) for parameter in copy.parameters()]
        for batch in batches:
            request = replace(self._request, batch=tree.map_all_tensors(Tensor.clone, batch), seed=seed)
            alone = refusing_collectives(copy, f"{type(copy).__name__}.{request.step_name}")
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), alone:
                result = driver.run(request)
            for parameter, requires_grad in trained:  # the copy shares them
                parameter.requires_grad_(requires_grad)
            output, gradients, left = result.output or (_FAILED, [], {})
            loss = loss_of(output, request.step_name).double()
            found.append(
                Outcome(
                    loss=loss,
                    output=output,
                    gradients=gradients,
                    is_fp32=is_fp32,
                    logged=numbers_of((call.name, call.value, call.arguments) for call in result.calls),
                    kept=left,
                )
            )
        return found

    def _looked_at(self, copy: pl.LightningModule, twin: PipelineModule) -> Callable[..., Any]:
        """The step of ``copy``, which returns its output, the gradients of the last stage, and what the steps so far have left on the module.
        It has an infinite loss instead of failing after the last layer."""
        step = getattr(copy, self._request.step_name)
        kept = Kept(copy)

        def run(*args: Any) -> Any:
            current = twin.current
            assert current is not None
            try:
                with torch.set_grad_enabled(current.stage == twin.num_stages - 1):
                    output = step(*args)
                    if output is None:
                        return None  # which a pipeline refuses
                    current.backward = True  # activation checkpointing runs layers again
                    loss = loss_of(output, self._request.step_name)
                    gradients = gradients_of(twin.parameters_of(current.stage).values(), loss)
            except Exception:
                if not twin.is_past_layers:
                    raise
                return _FAILED, [], {}
            sketches = [_sketch(gradients)] if gradients else []
            left = {
                path: _sketch([value]) if isinstance(value, Tensor) and value.numel() > _SUMS else value
                for path, value in kept.changed().items()
            }
            return tree.map_tensors(Tensor.detach, output), sketches, left

        return run


_FAILED = torch.tensor(torch.inf)
_SUMS = 64


def _sketch(tensors: Sequence[Tensor]) -> Tensor:
    """Sums of all elements with fixed random signs: a linear map that keeps norms up to a fifth or so. The ranks of a pipeline compare these
    sums, where the tensors would cross links between clusters."""
    parts = [dtensor.local_part(tensor).detach() for tensor in tensors]
    real = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    flat = torch.cat([part.reshape(-1).double() for part in real])
    signs = torch.randint(2, flat.shape, generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1).to(flat)
    return nn.functional.pad(flat * signs, (0, -flat.numel() % _SUMS)).view(-1, _SUMS).sum(0).float()


class LaterTrials:
    """When a run asks again whether its batches may be split: at batches 2, 4, 8, ..., where an epoch starts, and where modules change
    their mode."""

    def __init__(self) -> None:
        self._num_batches = 0
        self._modes = b""

    def are_due(self, trainer: "pl.Trainer", flags: Flags) -> bool:
        """Whether to ask at this batch; called once a batch, with the flags of the module. The first has been tried before the module was divided."""
        self._num_batches += 1
        before, self._modes = self._modes, bytes([part.training for part, name in flags if name == "training"])
        if self._num_batches == 1:
            return False
        starts_epoch = trainer.fit_loop.epoch_loop.batch_idx == 0
        return starts_epoch or self._modes != before or self._num_batches & (self._num_batches - 1) == 0
