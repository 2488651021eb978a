"""LayeredReducer: gradients of sharded parameters; each stage's gradients are reduce-scattered once a batch.

A stage's gradients accumulate in one of two buffers over all its microbatches, and are reduced while the backward of the previous stage
runs: each replica keeps the sum of its shard, and adds the sums of later batches of the accumulation window to it. The gradients of
parameters that several stages read are reduced last. stage_shards.py gathers and frees the parameters.

After ``finish``, ``unit.gradient`` is this replica's shard of the sum over replicas.

Source: arXiv 2106.02679, section 4. A single replica accumulates the gradients of its microbatches in the same way, without a reduction.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.comm.queue import CommQueue, Work, use_here
from lightning_holmes.errors import AbsentValueError
from lightning_holmes.optim.reducer import UnitReducer
from lightning_holmes.optim.stage_buffers import NUM_BUFFERS, StageBuffers, allocate
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.optim.unit import Unit, sum_dtype
from lightning_holmes.plan.placement import Placement


class LayeredReducer(UnitReducer):
    """See UnitReducer. Create it after ``shards.lay_out``.

    Args:
        shards: holds the parameters, whose units are this reducer's.
        queue: runs the collectives; None: that of the shards.
    """

    def __init__(
        self, shards: StageShards, groups: ProcessGroups, placement: Placement, *, queue: CommQueue | None = None
    ) -> None:
        super().__init__(
            shards.parameters,
            groups,
            placement,
            stages=shards.stages,
            shared=shards.shared,
            queue=queue or shards.queue,
            collective=shards.collective,
        )
        self.shards = shards
        self._device = groups.builder.device
        self._open: dict[int | None, list[Tensor]] = {}
        self._busy: list[Work | None] = [None] * NUM_BUFFERS
        self._take_trained()

    def _take_trained(self) -> None:
        """Make buffers for the gradients of all units that are trained now."""
        self.units = [unit for unit in self.shards.units if unit.is_trained]
        self._trained = {stage: [u for u in self.units if u.stage == stage] for stage in (*self._stages, None)}
        self._buffers = StageBuffers({stage: self._sizes(stage) for stage in self._stages}, self._device)

    def _sizes(self, stage: int | None) -> list[tuple[int, torch.dtype]]:
        return [(unit.numel, sum_dtype(unit.dtype)) for unit in self._trained[stage]]

    # a batch

    def begin(self, *, last: bool) -> None:
        """Begin a batch: its backwards add to the gradients accumulated so far; ``last``: the last batch of a window.

        Parameters that were frozen when the shards were laid out may be trained now.
        """
        thawed = [
            unit
            for unit in self.shards.units
            if not unit.is_trained and any(self.parameters[name].requires_grad for name in unit.names)
        ]
        for unit in thawed:
            self.shards.thaw(unit)
        if thawed:
            for work in self._works:  # of an earlier batch of the window; its buffers are about to be replaced
                work.wait()
            self._take_trained()
        self._hook_parameters(name for unit in self.units for name in unit.names)
        self.on_laid_out()
        if self._is_new:
            self._touched.clear()
            for unit in self.shards.units:
                unit.gradient = None
        self._unreduced = set(self._stages)
        self._is_new, self._in_batch = False, True

    def unshard(self, stage: int) -> Work:
        """Gather the parameters of ``stage``; all replicas must call."""
        return self.shards.unshard(stage)

    def reshard(self, stage: int) -> None:
        """Free the parameters of ``stage``."""
        self.shards.reshard(stage)

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Prepare for a backward of ``stage``: its gradients accumulate in a buffer that is zeroed before the ``first`` one."""
        if not first:
            return
        if None not in self._open and self._trained[None]:
            self._gather_in(None, allocate(self._sizes(None), self._device))
        place = self._buffers.places[stage]
        busy, self._busy[place] = self._busy[place], None
        if busy is not None:
            busy.wait()
        self._gather_in(stage, self._buffers.of(stage))

    def _gather_in(self, stage: int | None, buffers: list[Tensor]) -> None:
        self._open[stage] = buffers
        for unit, buffer in zip(self._trained[stage], buffers, strict=True):
            self._attach(unit.views(buffer.zero_()))

    def _place_of_late(self, name: str) -> Tensor:
        raise AbsentValueError(
            f"{name} is given a gradient while its own stage is not computed: another stage reads it, which did not when the step "
            f"was learnt from its first batch, or the step calls backward itself. Let the first batch read it there, too (times "
            f"0, if need be), return one loss, or use {self.shards.cure}"
        )

    def reduce(self, stage: int) -> None:
        """Start to reduce-scatter the gradients of ``stage`` over the replicas; all its backwards of the batch are done."""
        self._busy[self._buffers.places[stage]] = self._start(stage)
        self._unreduced.discard(stage)
        if not self._unreduced and None in self._open and not any(unit.ranks for unit in self._trained[None]):
            self._start(None)

    def _start(self, stage: int | None) -> Work | None:
        units, buffers = self._trained[stage], self._open.pop(stage, [])
        for unit in units:
            self._detach(unit)
        if not buffers:
            return None
        label = "of shared parameters" if stage is None else f"of stage {stage}"
        work = self._start_reduction(units, buffers, label)
        self._works.append(work)
        return work

    def _start_reduction(self, units: Sequence[Unit], buffers: Sequence[Tensor], label: str) -> Work:
        """Start to reduce these gradients; the work that is returned is done when their buffers may be used again."""
        return self.queue.start(lambda: self._sum(units, buffers), "bucket_reduce", of=label)

    def _sum(self, units: Sequence[Unit], buffers: Sequence[Tensor]) -> None:
        for unit, buffer in zip(units, buffers, strict=True):
            use_here(buffer)  # nothing else keeps the gradients that several stages share
            if self.collective is not None:
                self.collective.scatter(buffer)
            share = buffer.view(self.shards.size, -1)[self.shards.rank]
            if unit.gradient is None:
                unit.gradient = share.clone()
            else:
                unit.gradient.add_(share)

    def end(self) -> None:
        """End a batch: sum gradients of parameters that other pipeline ranks hold, too, over these ranks, then over the replicas."""
        self._refuse_thawed()
        self._in_batch = False
        if None in self._open:
            for unit, buffer in zip(self._trained[None], self._open[None], strict=True):
                if unit.ranks:
                    dist.all_reduce(buffer, group=self._shared[unit.ranks].tensors)
            self._start(None)

    def finish(self, *, last: bool) -> None:
        """After the ``last`` batch of a window: wait until its gradients are fully reduced. All ranks call."""
        if not last:
            return
        self._sum_flags()
        for work in self._works:
            work.wait()
        self._works.clear()
        self._busy = [None] * NUM_BUFFERS
        self._is_new = True

    def show(self, names: Collection[str]) -> None:
        """Do nothing: ``p.grad`` stays empty, and pieces get their gradients from ``unit.gradient``."""

    def close(self) -> None:
        super().close()
        self._trained.clear()
        self._buffers = StageBuffers({}, self._device)  # a host outlives the run, for its states
