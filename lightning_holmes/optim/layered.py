"""LayeredReducer: gradients of sharded parameters; each stage's gradients are reduce-scattered once a batch.

A stage's gradients accumulate in one of two buffers over all its microbatches, and are reduced while the backward of the previous stage
runs: each replica keeps the sum of its shard, and adds the sums of later batches of the accumulation window to it. The gradients of
parameters that several stages read are reduced last. stage_shards.py gathers and frees the parameters. It is an exchange
(comm/parameter_exchange.py) for schedules that run all microbatches through a stage before the next.

    reducer.begin(last=True)
    reducer.fetch(2).wait()
    reducer.backward(2, first=True, last=False)     # before a stage's backwards
    reducer.reduce(2)                               # after them
    reducer.release(2)
    reducer.end()
    reducer.finish(last=True)                       # part.gradient is this replica's shard of the sum over replicas

Source: arXiv 2106.02679, section 4. A single replica accumulates the gradients of its microbatches in the same way, without a reduction.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_holmes.comm.collectives import Collective
from lightning_holmes.comm.mesh import ProcessGroups, join_shared
from lightning_holmes.comm.queue import CommQueue, OnRun, Work
from lightning_holmes.errors import AbsentValueError, UnsupportedModuleError
from lightning_holmes.optim.grad_buffer import sum_dtype
from lightning_holmes.optim.loss_weights import start_loss_scales
from lightning_holmes.optim.part import Part
from lightning_holmes.optim.stage_buffers import NUM_BUFFERS, StageBuffers, allocate
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.plan.placement import Placement


class LayeredReducer:
    """Accumulates and reduces the gradients of one rank's parameters.

    All ranks must create one, since it creates process groups; create it after ``shards.lay_out``.

    Args:
        stages: the stages of this rank, ascending.
        shared: the sets of pipeline ranks that hold the same parameters; the same on all ranks.
        collective: reduces a stage's gradients over the replicas; None if there is one replica.
    """

    def __init__(
        self,
        shards: StageShards,
        groups: ProcessGroups,
        placement: Placement,
        device: torch.device,
        *,
        stages: Sequence[int],
        shared: Sequence[tuple[int, ...]],
        queue: CommQueue,
        collective: Collective | None,
    ) -> None:
        self.shards, self.groups, self.queue = shards, groups, queue
        self.on_laid_out: Callable[[], None] = lambda: None
        """Called when a batch begins: the sharded or remote optimizer checks for new parameter groups."""
        self._device = device
        self._collective = collective
        self._stages = tuple(stages)
        self._shared = join_shared(groups, placement, shared)
        self._views: dict[str, Tensor] = {}
        self._open: dict[int | None, list[Tensor]] = {}
        self._busy: list[Work | None] = [None] * NUM_BUFFERS
        self._works: list[Work] = []
        self._touched: set[str] = set()
        self._reached: frozenset[str] = frozenset()
        self._unreduced: set[int] = set()
        self._is_new = True  # no batch of the window has accumulated anything yet
        self._in_batch = False
        self._hooks: dict[str, RemovableHandle] = {}
        self._take_trained()

    def _take_trained(self) -> None:
        """Make buffers for the gradients of all parts that are trained now."""
        parts = [part for part in self.shards.parts if part.is_trained]
        self._trained = {stage: [p for p in parts if p.stage == stage] for stage in (*self._stages, None)}
        self._names = [name for part in parts for name in part.names]
        self._buffers = StageBuffers({stage: self._sizes(stage) for stage in self._stages}, self._device)

    def _hook_parameters(self) -> None:
        """Hook the parameters that are trained now; some parameters of a trained part may still be frozen."""
        for name in self._names:
            parameter = self.parameters[name]
            if name not in self._hooks and parameter.requires_grad:
                self._hooks[name] = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]

    def _sizes(self, stage: int | None) -> list[tuple[int, torch.dtype]]:
        return [(part.numel, sum_dtype(part.dtype)) for part in self._trained[stage]]

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """This rank's parameters, by name."""
        return self.shards.parameters

    # a batch

    def begin(self, *, last: bool) -> None:
        """Begin a batch: its backwards add to the gradients accumulated so far; ``last``: the last batch of a window.

        Parameters that were frozen when the shards were laid out may be trained now.
        """
        thawed = [
            part
            for part in self.shards.parts
            if not part.is_trained and any(self.parameters[name].requires_grad for name in part.names)
        ]
        for part in thawed:
            self.shards.thaw(part)
        if thawed:
            for work in self._works:  # of an earlier batch of the window; its buffers are about to be replaced
                work.wait()
            self._take_trained()
        self._hook_parameters()
        self.on_laid_out()
        if self._is_new:
            self._touched.clear()
            for part in self.shards.parts:
                part.gradient = None
        self._unreduced = set(self._stages)
        self._in_batch = True

    def fetch(self, stage: int) -> Work:
        """Gather the parameters of ``stage``; all replicas must call."""
        return self.shards.fetch(stage)

    def release(self, stage: int) -> None:
        """Free the parameters of ``stage``."""
        self.shards.release(stage)

    def add(self, name: str, gradient: Tensor) -> None:
        """Refuse: no schedule that frees stages splits its backwards."""
        self.shards.add(name, gradient)

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Prepare for a backward of ``stage``: its gradients accumulate in a buffer that is zeroed before the ``first`` one."""
        if not first:
            return
        if None not in self._open and self._trained[None]:
            self._gather_in(None, allocate(self._sizes(None), self._device))
        place = self._buffers.place(stage)
        busy, self._busy[place] = self._busy[place], None
        if busy is not None:
            busy.wait()
        self._gather_in(stage, self._buffers.of(stage))

    def _gather_in(self, stage: int | None, buffers: list[Tensor]) -> None:
        self._open[stage] = buffers
        for part, buffer in zip(self._trained[stage], buffers, strict=True):
            for name, view in part.views(buffer.zero_()).items():
                self._views[name] = view
                self.parameters[name].grad = view if buffer.dtype == part.dtype else None

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            view = self._views.get(name)
            if view is None and self._in_batch:
                raise AbsentValueError(
                    f"{name} is given a gradient while its own stage is not computed: another stage reads it, which did not when the step "
                    f"was learnt from its first batch, or the step calls backward itself. Let the first batch read it there, too (times "
                    f"0, if need be), return one loss, or use {self.shards.cure}"
                )
            if view is None:
                return  # the user's own backward, between batches
            self._touched.add(name)
            if parameter.grad is not None and view.dtype != parameter.dtype:
                view.add_(parameter.grad)
                parameter.grad = None

        return arrived

    def reduce(self, stage: int) -> None:
        """Start to reduce-scatter the gradients of ``stage`` over the replicas; all its backwards of the batch are done."""
        self._busy[self._buffers.place(stage)] = self._start(stage)
        self._unreduced.discard(stage)
        if not self._unreduced and None in self._open and not any(part.ranks for part in self._trained[None]):
            self._start(None)

    def _start(self, stage: int | None) -> Work | None:
        parts, buffers = self._trained[stage], self._open.pop(stage, [])
        for part in parts:
            for name in part.names:
                self._views.pop(name, None)
                self.parameters[name].grad = None
        if not buffers:
            return None
        label = "of shared parameters" if stage is None else f"of stage {stage}"
        work = self._start_reduction(parts, buffers, label)
        self._works.append(work)
        return work

    def _start_reduction(self, parts: Sequence[Part], buffers: Sequence[Tensor], label: str) -> Work:
        """Start to reduce these gradients; the work that is returned is done when their buffers may be used again."""
        return self.queue.start(lambda: self._sum(parts, buffers), "bucket_reduce", of=label)

    def _sum(self, parts: Sequence[Part], buffers: Sequence[Tensor]) -> None:
        for part, buffer in zip(parts, buffers, strict=True):
            # nothing else keeps the memory of gradients that several stages share until the queue's stream is done with it
            if buffer.is_cuda:
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
            if self._collective is not None:
                self._collective.scatter(buffer)
            share = buffer.view(self.shards.size, -1)[self.shards.rank]
            if part.gradient is None:
                part.gradient = share.clone()
            else:
                part.gradient.add_(share)

    def end(self) -> None:
        """End a batch: sum gradients of parameters that other pipeline ranks hold, too, over these ranks, then over the replicas.

        Raises:
            UnsupportedModuleError: a parameter is trained now that was frozen when the batch began, and so has no buffer.
        """
        late = [n for n, p in self.parameters.items() if p.requires_grad and n not in self._hooks]
        if late:
            raise UnsupportedModuleError(
                f"{late[0]} was frozen when the batch began, and is trained in it: its gradient would be lost. Set requires_grad in "
                f"on_train_batch_start or before, or use {self.shards.cure}"
            )
        self._is_new = self._in_batch = False
        if None in self._open:
            for part, buffer in zip(self._trained[None], self._open[None], strict=True):
                if part.ranks:
                    dist.all_reduce(buffer, group=self._shared[part.ranks].tensors)
            self._start(None)

    def start_loss_scales(
        self, weights: Sequence[float], accumulated: int, factor: Callable[[], float | Tensor]
    ) -> Callable[[], list[float | Tensor]]:
        """See loss_weights.py."""
        return start_loss_scales(weights, self.groups.replicas_on_host, accumulated=accumulated, factor=factor)

    def finish(self, *, last: bool) -> None:
        """After the ``last`` batch of a window: wait until its gradients are fully reduced. All ranks call."""
        if not last:
            return
        flags = torch.tensor([float(name in self._touched) for name in self._names])
        place = {name: index for index, name in enumerate(self._names)}
        for part in self._trained[None]:
            if part.ranks:
                own = flags[[place[name] for name in part.names]]
                dist.all_reduce(own, group=self._shared[part.ranks].host)
                flags[[place[name] for name in part.names]] = own
        sync = self.groups.gradients
        if sync is not None and self._names:
            self.queue.start(lambda: dist.all_reduce(flags, group=sync.host)).wait()
        for work in self._works:
            work.wait()
        self._works.clear()
        self._busy = [None] * NUM_BUFFERS
        self._reached = frozenset(name for name, flag in zip(self._names, flags.tolist(), strict=True) if flag)
        self._is_new = True

    # for the OptimizerHost

    def reached(self) -> frozenset[str]:
        """Return the names of the parameters that have a gradient on some replica."""
        return self._reached

    def assign_grads(self, *, last: bool, shown: bool = True) -> None:
        """Do nothing: ``p.grad`` stays empty, and pieces get their gradients from ``part.gradient``."""

    # reports

    def watch(self, on_run: OnRun | None) -> None:
        """Report when each stage's gradients were reduced, and its parameters gathered; see CommQueue.on_run."""
        self.queue.on_run = on_run

    def close(self) -> None:
        """Free buffers, remove hooks and close the queue."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._views.clear()
        self.queue.close()
