"""GradientReducer: accumulates a rank's gradients over the microbatches and batches of a window, and reduces them.

It owns the buckets, and the collective that sums them. It is the exchange (comm/parameter_exchange.py) of a step in which every
replica holds whole parameters: the schedule decides when a stage is reduced, and host.py uses the reduced gradients.

    reducer.begin(last=True)                # before a batch's microbatches; last: the last batch of an accumulation window
    ...                                     # backwards; backward(stage, ...) before each, reduce(stage) after them
    reducer.end()                           # after them; p.grad is empty now
    reducer.finish(last=True)               # gradients are fully reduced
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.collectives import COMPRESSIONS, make_collective
from lightning_holmes.comm.mesh import ProcessGroups, join_shared
from lightning_holmes.comm.queue import OnRun, make_comm_queue
from lightning_holmes.optim.grad_buffer import GradBuffer
from lightning_holmes.optim.grad_sync import GradSync
from lightning_holmes.optim.gradient_options import GradientOptions
from lightning_holmes.optim.loss_weights import start_loss_scales
from lightning_holmes.optim.replicated import check_replicated
from lightning_holmes.plan.placement import Placement


class GradientReducer:
    """Accumulates and reduces the gradients of one rank's parameters. All ranks must create one, since it creates process groups.

    Args:
        parameters: by name, in the order in which the backward finishes them.
        stages: the stages of this rank.
        stages_of: for each parameter, the stages of this rank that read it; without an entry, all of them.
        shared: parameters that several pipeline ranks hold: for each set of ranks, the names, in the same order on all ranks.
        collective: the name of the collective that sums the gradients over the replicas, if there are several.
        flat: keep flat buffers even if nothing is reduced.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: ProcessGroups,
        placement: Placement,
        device: torch.device,
        *,
        stages: Sequence[int],
        stages_of: Mapping[str, Collection[int]],
        shared: Mapping[tuple[int, ...], Sequence[str]],
        collective: str = "all_reduce",
        options: GradientOptions | None = None,
        flat: bool = False,
    ) -> None:
        options = options or GradientOptions()
        self.groups = groups
        self._device = device
        self._stages = tuple(stages)
        # gradients that are neither reduced nor accumulated in another type may stay the tensors that autograd makes
        low = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters.values())
        reduced = placement.data_parallel_size > 1 or bool(shared)
        split = any(map(dtensor.is_dtensor, parameters.values()))
        self.buffer = GradBuffer(
            parameters,
            flat=flat or reduced or split or (low and placement.world_size > 1),
            data_parallel_size=placement.data_parallel_size,
            apart={name: ranks for ranks, names in shared.items() for name in names},
            stage_of={name: min(reading) for name, reading in stages_of.items() if reading},
        )
        self.queue = make_comm_queue(device)
        sync_groups = groups.gradients
        rounded = None if options.compression is None else COMPRESSIONS[options.compression]
        self._sync = GradSync(
            self.buffer,
            None if sync_groups is None else make_collective(collective, sync_groups, rounded),
            None if sync_groups is None else sync_groups.host,
            self.queue,
            shared_groups=join_shared(groups, placement, list(shared)),
            stages_of=stages_of,
            stages=self._stages,
        )
        self._copies_checked = groups.tensor_parallel is None
        self._unreduced: set[int] = set()  # stages of this batch whose gradients may still grow
        self.is_last = False
        """Whether the batch that was begun last ends a window."""
        self.on_laid_out: Callable[[], None] | None = None
        """Called in each :meth:`begin`, when the buckets are what they will be in this batch."""

    # a batch

    def begin(self, *, last: bool) -> None:
        """Begin a batch: its backwards add to the gradients accumulated so far; ``last``: the last batch of a window."""
        self.buffer.begin()
        if self.on_laid_out is not None:
            self.on_laid_out()
        self.is_last = last
        self._unreduced = set(self._stages)
        self._sync.open(last=last and self._copies_checked)

    def end(self) -> None:
        """Move the gradients out of ``p.grad``: Lightning calls ``zero_grad`` between a training step and its backward."""
        self.buffer.end()

    def fetch(self, stage: int) -> None:
        """Do nothing: every replica holds the parameters. Those that a sharded optimizer has updated are gathered bucket by bucket, and a
        read waits for its bucket (shard_memory.py); a fetch that waited for a whole stage would overlap less."""

    def release(self, stage: int) -> None:
        """Do nothing: the parameters stay."""

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Begin a backward through ``stage``: buckets that the ``last`` one of the batch fills are reduced while it still runs."""
        if last:
            self._sync.last_backward(stage)

    def reduce(self, stage: int) -> None:
        """End the backwards of ``stage``. After the last of this rank's stages all remaining buckets are reduced. All replicas must call."""
        self._sync.backwards_done(stage)
        self._unreduced.discard(stage)
        if not self._unreduced and self.is_last and self._copies_checked:
            self._sync.start_grad_sync()

    def add(self, name: str, gradient: Tensor) -> None:
        """Accumulate a gradient that ``torch.autograd.grad`` has returned, and count it for the readiness of its bucket."""
        self.buffer.add(name, gradient)

    def start_loss_scales(
        self, weights: Sequence[float], accumulated: int, factor: Callable[[], float | Tensor]
    ) -> Callable[[], list[float | Tensor]]:
        """Start to compute the factor of each microbatch's loss: its share of the mean over all samples of a batch, all replicas and
        ``accumulated`` batches, times ``factor()``.

        All ranks of the last stage must call; the returned function waits for the other replicas.
        """
        return start_loss_scales(weights, self.groups.replicas_on_host, accumulated=accumulated, factor=factor)

    def finish(self, *, last: bool) -> None:
        """After the ``last`` batch of a window: wait until its gradients are fully reduced. All ranks call."""
        if not self._copies_checked:
            self._copies_checked = True
            check_replicated(self.buffer, self.groups.tensor_parallel, self._device)
            if last:
                self._sync.start_grad_sync()
        if last:
            self._sync.finish_grad_sync()

    # for a sharded optimizer

    def lay_out(self) -> None:
        """Lay the buckets out now, before the first batch; all ranks must call."""
        self.begin(last=False)
        self.end()
        self.buffer.seal()
        self.buffer.assign_grads(last=True)

    def reduce_shares(self) -> None:
        """Reduce-scatter instead of all-reduce from now on: each replica gets the sums of its shard of a bucket only."""
        self._sync.shares = self.groups.gradients is not None

    def gather(self, tensor: Tensor) -> None:
        """All-gather a flat tensor of which each replica holds its shard. Runs in the queue; all replicas must call."""
        assert self._sync.collective is not None
        self._sync.collective.gather(tensor)

    def watch(self, on_run: OnRun | None) -> None:
        """Report when each bucket's gradients were summed, and its parameters gathered; see CommQueue.on_run."""
        self.queue.on_run = on_run

    def close(self) -> None:
        """Free buffers, remove hooks and close the queue."""
        self.buffer.close()
        self.queue.close()
