"""A rank's gradients during a fit: gathered over microbatches, reduced, scaled, clipped; the pieces are optim's.

gradients.begin()                          # before a batch's microbatches
... backwards, with gradients.loss_scales(weights, accumulate) ...
gradients.end()                            # behind them; p.grad is empty now
gradients.hand_over(last=True)             # inside Strategy.backward: p.grad is what the optimizer shall see
"""

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.comm import sharded
from lightning_holmes.comm.mesh import ProcessGroups, join_shared
from lightning_holmes.optim.clip import clip_by_norm, clip_by_value, global_grad_norm
from lightning_holmes.optim.grad_buffer import GradBuffer
from lightning_holmes.optim.grad_sync import GradSync
from lightning_holmes.optim.loss_scale import LossScale
from lightning_holmes.optim.replicated import check_replicated
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.structure import BEFORE
from lightning_holmes.plan.plan import Plan


class Gradients:
    """The gradients of ``pipeline``'s parameters on this rank. All ranks make one, since it makes groups.

    Args:
        scaler: of ``precision="16-mixed"``, or None.
    """

    def __init__(
        self, pipeline: PipelineModule, groups: ProcessGroups, plan: Plan, device: torch.device, *, scaler: Any
    ) -> None:
        self._pipeline = pipeline
        self._groups = groups
        self._device = device
        parameters = _in_backward_order(pipeline, plan)
        shared = _shared_between_stages(pipeline, plan)
        # what is neither reduced nor gathered in another type may stay the tensors that autograd makes
        low = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters.values())
        reduced = plan.data_parallel_size > 1 or bool(shared)
        split = any(map(sharded.is_sharded, parameters.values()))
        self._buffer = GradBuffer(
            parameters,
            flat=reduced or split or (low and plan.placement.world_size > 1),
            data_parallel_size=plan.data_parallel_size,
            apart={name: ranks for ranks, names in shared.items() for name in names},
        )
        self._sync = GradSync(
            self._buffer,
            groups.data_parallel,
            {group: shared[ranks] for ranks, group in join_shared(groups, plan.placement, list(shared)).items()},
        )
        self._scale = None if scaler is None else LossScale(scaler, groups.pipeline, device)
        self._copies_checked = False

    def begin(self) -> None:
        """Let the backwards of a batch add to what has been gathered."""
        self._buffer.begin()

    def end(self) -> None:
        """Take the gradients out of reach of ``zero_grad``, which Lightning calls between a step and its backward."""
        self._buffer.end()

    def loss_scales(self, weights: Sequence[float], accumulated: int) -> list[float]:
        """Each microbatch's share of the mean over all samples of a batch, all replicas and ``accumulated`` batches.

        The ranks of the last stage call, all together.
        """
        total = self._sync.sum_over_replicas(sum(weights), self._device)
        if total == 0:
            return [0.0 for _ in weights]
        factor = 1.0 if self._scale is None else self._scale.factor()
        return [weight / total / accumulated * factor for weight in weights]

    def hand_over(self, *, last: bool) -> None:
        """Make what was gathered ``p.grad``; behind the ``last`` batch of a window it is reduced first. All ranks call."""
        if not self._copies_checked:
            self._copies_checked = True
            check_replicated(self._buffer, self._groups.tensor_parallel, self._device)
        if last:
            self._sync.start_grad_sync()
            self._sync.finish_grad_sync()
        self._buffer.expose(last=last)
        if last and self._scale is not None:
            self._scale.agree(self._buffer.parameters.values())

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm over all stages of the gradients of ``parameters`` (this rank's), whole or sharded; all ranks must
        call."""
        owned = {id(p) for n, p in self._pipeline.module.named_parameters() if self._pipeline.is_owner(n)}
        return global_grad_norm(
            parameters,
            counts=lambda p: id(p) in owned,
            pipeline_group=self._groups.pipeline,
            tensor_group=self._groups.tensor_parallel,
            device=self._device,
        )

    def take_over_clipping(self, plugin: "pl.plugins.Precision") -> None:
        """Make Lightning's clipping by norm use the norm over all stages, and know of sharded gradients."""

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
            parameters = [p for p in plugin.main_params(optimizer) if p.grad is not None]
            clip_by_norm(parameters, clip_val, self.norm(plugin.main_params(optimizer)))

        plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
        if sharded.has_sharded_parameters(self._pipeline.module):
            plugin.clip_grad_by_value = lambda optimizer, clip_val: clip_by_value(  # type: ignore[method-assign]
                list(plugin.main_params(optimizer)), clip_val
            )

    def close(self) -> None:
        """Let go of buffers and hooks."""
        self._buffer.close()


def _in_backward_order(pipeline: PipelineModule, plan: Plan) -> dict[str, nn.Parameter]:
    """This rank's parameters in the order in which its backward finishes them: the last layers' first.

    With several stages on a rank, a parameter is finished with the first stage that reads it; at a place, and where no
    place is known, those that are defined last come first.
    """
    local = pipeline.local_parameters
    parameters = [(n, p) for n, p in pipeline.module.named_parameters() if n in local][::-1]
    structure = pipeline.structure
    if structure is not None:
        readers = structure.readers
        parameters.sort(key=lambda named: -min(readers.get(named[0]) or (BEFORE,)))
    return dict(parameters)


def _shared_between_stages(pipeline: PipelineModule, plan: Plan) -> dict[tuple[int, ...], list[str]]:
    """Parameters that several pipeline ranks hold: the ranks, and the names in the same order on all."""
    shared: dict[tuple[int, ...], list[str]] = {}
    if pipeline.structure is not None:
        for name in pipeline.structure.readers:
            stages = pipeline.structure.stages_of(plan.partition, name)
            ranks = tuple(sorted({stage % plan.pipeline_parallel_size for stage in stages}))
            if len(ranks) > 1:
                shared.setdefault(ranks, []).append(name)
    return shared
