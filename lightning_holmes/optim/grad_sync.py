"""Gradient synchronisation: sums a rank's accumulated gradients over its replicas, and shared ones over pipeline ranks.

A bucket's reduction starts as soon as the last backward of a window has computed the gradients of all its parameters, and runs in
the queue while the rest of the backward goes on. Buckets are reduced in order, the same on all replicas: a bucket that is ready
waits for those before it. Gradients that pipeline ranks share are summed over these ranks first, and so their buckets come last.
After the buckets the flags of grad_buffer.py (which parameters got a gradient) are summed.

    sync.open(last=True)                # before the backwards of the last batch of a window
    sync.last_backward(stage)           # called by the runner
    ...                                 # the buffer's hooks call sync.passed(name)
    sync.backwards_done(stage)
    sync.start_grad_sync()              # starts the remaining reductions
    sync.finish_grad_sync()

The bucket of a parameter that autograd reaches twice in a backward (a module in two segments of reentrant activation checkpointing)
may be launched too early. Gradients that come later are kept aside and announced to all replicas with the flags, and summed
separately; after that no bucket is launched before the end of the backward.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.collectives import Collective
from lightning_holmes.comm.mesh import SharedGroup
from lightning_holmes.comm.queue import CommQueue, Work
from lightning_holmes.optim.grad_buffer import Bucket, GradBuffer


class GradSync:
    """Sums ``buffer`` over replicas, and gradients of shared parameters over the pipeline ranks that hold them.

    Args:
        buffer: the rank's gradients; they are summed, not averaged, since loss weights already divide by the samples of all
            replicas.
        collective: sums a bucket over the replicas; None if there is one replica.
        flags_group: a host (CPU) group of the replicas, for the flags; None if there is one replica. If ``queue`` is a thread, only
            that thread may use the group.
        queue: runs the collectives.
        shared_groups: the group of each set of ranks of one pipeline that hold copies of the same parameters. Buckets whose ``apart``
            is such a set are summed over its group.
        stages_of: for each parameter, the stages of this rank that read it; without an entry, ``stages``.
        stages: the stages of this rank.
    """

    def __init__(
        self,
        buffer: GradBuffer,
        collective: Collective | None,
        flags_group: dist.ProcessGroup | None,
        queue: CommQueue,
        *,
        shared_groups: Mapping[tuple[int, ...], SharedGroup] | None = None,
        stages_of: Mapping[str, Collection[int]] | None = None,
        stages: Sequence[int] = (0,),
    ) -> None:
        self.collective = collective
        self.overlaps = True
        """Whether reductions may start before the backward has ended."""
        self.shares = False
        """Whether each replica gets the sums of its shard of a bucket only."""
        self._buffer = buffer
        self._group = flags_group
        self._queue = queue
        self._shared = dict(shared_groups or {})
        self._stages_of = dict(stages_of or {})
        self._stages = tuple(stages)
        self._passing: int | None = None
        self._live = False
        self._missing: dict[str, set[int]] = {}
        self._unready: list[int] = []
        self._place: dict[str, int] = {}
        self._next = 0
        self._works: list[Work] = []
        self._flags_work: Work | None = None
        self._shared_works: list[dist.Work] = []
        buffer.on_arrival = self.passed

    def open(self, *, last: bool) -> None:
        """Begin the backwards of a batch; ``last``: the last batch of a window, after which gradients are summed."""
        self._live = last and self.overlaps and self.collective is not None
        self._next = 0
        if self._live:
            buckets = self._buffer.buckets
            self._missing = {n: set(self._stages_of.get(n, self._stages)) for bucket in buckets for n in bucket.names}
            self._unready = [len(bucket.names) for bucket in buckets]
            self._place = {n: index for index, bucket in enumerate(buckets) for n in bucket.names}

    def last_backward(self, stage: int) -> None:
        """Begin the last backward through ``stage``."""
        self._passing = stage

    def passed(self, name: str) -> None:
        """Record that a parameter's gradient was accumulated; in a stage's last backward it is then complete for that stage."""
        if self._live and self._passing is not None:
            self._pass(name, self._passing)

    def backwards_done(self, stage: int) -> None:
        """End the backwards of ``stage``: all its gradients are complete, also of parameters that its last backward did not reach."""
        self._passing = None
        if self._live:
            for name, missing in self._missing.items():
                if stage in missing:
                    self._pass(name, stage)

    def _pass(self, name: str, stage: int) -> None:
        missing = self._missing[name]
        if stage not in missing:
            return
        missing.discard(stage)
        if missing:
            return
        self._unready[self._place[name]] -= 1
        buckets = self._buffer.buckets
        while self._next < len(buckets) and self._unready[self._next] == 0 and buckets[self._next].apart is None:
            self._launch(buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        collective = self.collective
        self._next += 1
        if collective is None:
            return
        self._buffer.launch(bucket)
        of = f"of {bucket.names[0]} to {bucket.names[-1]}"
        sums = _Sum(collective, bucket.buffer, shares=self.shares)
        self._works.append(self._queue.start(sums, "bucket_reduce", of=of))

    def start_grad_sync(self) -> None:
        """Start the reductions that have not started; all ranks of the groups must call, once a window."""
        self._live = False
        self._buffer.seal()
        buckets = self._buffer.buckets
        if not buckets:
            return
        while self._next < len(buckets) and buckets[self._next].apart is None:
            self._launch(buckets[self._next])
        for bucket in buckets:
            shared = self._shared.get(bucket.apart) if isinstance(bucket.apart, tuple) else None
            if shared is not None:
                over = ((bucket.buffer, shared.tensors), (bucket.flags, shared.host))
                works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in over]
                self._shared_works += [work for work in works if work is not None]
        if not self._shared_works:
            self._launch_rest()

    def _launch_rest(self) -> None:
        """Start the reductions of buckets that are ``apart``, and of the flags, over the replicas."""
        buckets, group = self._buffer.buckets, self._group
        while self._next < len(buckets):
            self._launch(buckets[self._next])
        if group is not None and self._flags_work is None:
            self._flags_work = self._queue.start(lambda: dist.all_reduce(self._buffer.flags, group=group))

    def finish_grad_sync(self) -> None:
        """Wait until the gradients are fully reduced."""
        for work in self._shared_works:
            work.wait()
        if self._shared_works:
            self._launch_rest()
            self._shared_works.clear()
        for reduction in self._works:
            reduction.wait()
        if self._flags_work is not None:
            self._flags_work.wait()
            self._flags_work = None
            if self._buffer.is_late:
                self._sum_late()
        self._works.clear()

    def _sum_late(self) -> None:
        """Add the gradients that came too late on any replica. All replicas run this, since all have the summed note."""
        assert self.collective is not None
        self.overlaps = False
        late = self._buffer.late
        for bucket in self._buffer.buckets:
            extra = torch.zeros_like(bucket.buffer)
            for name in bucket.names:
                if name in late:
                    start, gradient = bucket.starts[name], late[name].flatten()
                    extra[start : start + gradient.numel()] = gradient
            self._queue.start(_Sum(self.collective, extra, shares=self.shares)).wait()
            bucket.buffer.add_(extra)
        late.clear()


class _Sum:
    """Runs ``collective.sum(tensor)``, or with ``shares`` ``collective.scatter(tensor)``; to be called once."""

    def __init__(self, collective: Collective, tensor: Tensor, *, shares: bool) -> None:
        self._sum = collective.scatter if shares else collective.sum
        self._tensor = tensor

    def __call__(self) -> None:
        self._sum(self._tensor)
