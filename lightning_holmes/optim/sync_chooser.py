"""SyncChooser: chooses, with the other members of a data-parallel group, the collective that sums its gradients, and the
bucket size.

It measures the candidates in the first window, again when the reduction time of some member has drifted (GradSync reports this
to all members at the same step), and when replicas begin to reduce their shards only. Buckets hold zeros then, which sums do not change.

    chooser = SyncChooser(buffer, sync, groups, queue, stages=(0,), collective="auto")
    chooser.before_window()
    buffer.begin()
    choice = chooser.in_empty_window(step)          # a SyncChoice if there is a new one
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_holmes.comm.collective_timing import BUDGET_S, make_collectives, measure, time_sum
from lightning_holmes.comm.collectives import COMPRESSIONS, AllReduce, SyncGroups
from lightning_holmes.comm.queue import CommQueue
from lightning_holmes.optim.grad_buffer import GradBuffer
from lightning_holmes.optim.grad_sync import GradSync
from lightning_holmes.plan.sync_choice import SyncChoice, bucket_bytes, choose

_SMALL, _LARGE = 4 * 2**10, 2**20  # bytes
_LINK_BUDGET_S = 0.4  # for each size; if the trials would take longer, there is one only
_TRIALS = {_SMALL: 12, _LARGE: 3}  # a host with a share of a core may pause for longer than a small reduction takes


class SyncChooser:
    """Chooses the collective of a group. Every member of the group must create one, with the same arguments.

    Args:
        stages: the stages whose gradients the group sums.
        collective: "auto", or the name of the collective to use if this group can.
        compression: the compression for groups that cross clusters, or None.
        sizes_buckets: choose the bucket size before buckets are laid out.
    """

    def __init__(
        self,
        buffer: GradBuffer,
        sync: GradSync,
        groups: SyncGroups,
        queue: CommQueue,
        *,
        stages: Sequence[int],
        collective: str = "auto",
        compression: str | None = None,
        sizes_buckets: bool = False,
    ) -> None:
        self._buffer = buffer
        self._sync = sync
        self._groups = groups
        self._queue = queue
        self._stages = tuple(stages)
        self._compression = compression if groups.crosses else None
        self._candidates = make_collectives(
            groups, None if self._compression is None else COMPRESSIONS[self._compression]
        )
        self._wanted = collective if collective in self._candidates else "auto"
        self._sizes_buckets = sizes_buckets
        self._generation = 0
        self._chosen = self._divided = False

    def before_window(self) -> None:
        """Choose the bucket size, before buckets are laid out. All members must call."""
        if self._sizes_buckets:
            self._sizes_buckets = False
            trained = [p for p in self._buffer.parameters.values() if p.requires_grad]
            if trained:
                total = sum(p.numel() * p.itemsize for p in trained)
                if total > _LARGE:
                    latency_s, s_per_byte = self._measure_link(trained[0].device)
                    self._buffer.bucket_bytes = bucket_bytes(total, latency_s=latency_s, s_per_byte=s_per_byte)

    def _measure_link(self, device: torch.device) -> tuple[float, float]:
        """Return the latency of a reduction in seconds, and its seconds per byte; the same on all members."""
        small, large = (self._time(torch.zeros(size // 4, device=device), trials) for size, trials in _TRIALS.items())
        return small, max(large - small, 0.0) / (_LARGE - _SMALL)

    def _time(self, tensor: torch.Tensor, trials: int) -> float:
        """Return the seconds of an all-reduce of ``tensor``, of the slowest member: the best of ``trials``, or the first one if all
        trials would take more than _LINK_BUDGET_S."""
        group, best = self._groups.whole, torch.full((1,), float("inf"), device=tensor.device)

        def largest() -> float:
            agreed = best.clone()
            self._queue.start(lambda: dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)).wait()
            return float(agreed)

        for trial in range(trials):
            best.clamp_(max=time_sum(AllReduce(group), tensor, self._queue))
            if trial == 0 and (slow := largest()) * trials > _LINK_BUDGET_S:
                return slow
        return largest()

    def in_empty_window(self, step: int) -> SyncChoice | None:
        """Choose a collective if one is due. A new window has begun, and the buckets hold zeros. All members must call."""
        buckets = self._buffer.buckets
        if not buckets:
            return None
        if self._generation != self._buffer.generation:
            self._generation = self._buffer.generation
            self._sync.watch.reset()
        shares = self._sync.shares
        divided, self._divided = shares and not self._divided, shares
        if self._chosen and not (self._sync.drifted or divided):
            return None
        first, self._chosen = not self._chosen, True
        if self._wanted != "auto":
            if not first:
                self._sync.watch.reset()
                self._sync.drifted = False
                return None
            return self._use(self._wanted, {}, 0, "asked for", step)
        buffers = [b.buffer for b in buckets]
        budget_s = BUDGET_S / 2 if divided and not first else BUDGET_S
        found = measure(self._candidates, buffers, self._groups.whole, self._queue, shares=shares, budget_s=budget_s)
        if first:
            reason = "the fastest"
        elif divided:
            reason = "measured again, as each replica needs the sums of its share, and gathers the parameters"
        else:
            reason = "measured again, since it took twice or half its usual time for 20 steps"
        return self._use(choose(found.seconds), dict(found.seconds), found.num_bytes, reason, step)

    def _use(self, name: str, seconds: dict[str, float], num_bytes: int, reason: str, step: int) -> SyncChoice:
        before = self._sync.collective
        if before is not None and before.name != name:
            reason += f"; instead of {before.name}"
        self._sync.chosen(self._candidates[name])
        if self._compression is not None:
            reason += f"; with compression={self._compression!r} between clusters"
        return SyncChoice(
            stages=self._stages,
            ranks=self._groups.ranks,
            collective=name,
            seconds=seconds,
            num_bytes=num_bytes,
            reason=reason,
            step=step,
        )
