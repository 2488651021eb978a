"""BucketReducer: gradients of parameters that stay on every replica; a unit is a bucket, whose memory stays, too.

Autograd adds gradients into the buckets directly if the dtypes match; others (bf16, fp16) are added in fp32 after each backward. A
bucket's reduction starts as soon as the last backward of a window has computed the gradients of all its parameters, and runs in the queue
while the rest of the backward goes on. Gradients that pipeline ranks share are summed over these ranks first, and so their buckets come last.

[Note: order] Communicators of NCCL may wait for each other for ever unless all ranks use them in one order that some schedule without
communicators could have. Therefore a bucket that is ready waits for those before it, and all buckets of a stage are launched within the action of
its last backward, also those that this replica's batch does not fill: before what the stage sends next. Sums over pipeline ranks are launched at
REDUCE_GRADIENTS, after the sends that the other stages need to come to it.

The bucket of a parameter that autograd reaches twice in a backward (a module in two segments of reentrant activation checkpointing)
may be launched too early. Gradients that come later are kept aside and announced to all replicas with the flags of what was reached, and
summed separately; after that no bucket is launched before the end of the backward.

Nothing is fetched or released: what a sharded optimizer has updated is gathered bucket by bucket, and a read waits for its bucket
(shard_memory.py). A fetch that waited for a whole stage would overlap less.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.comm.queue import Work
from lightning_holmes.optim.reducer import UnitReducer, thawed_late
from lightning_holmes.optim.replicated import check_replicated
from lightning_holmes.optim.unit import Unit, side_by_side, sum_dtype
from lightning_holmes.plan.placement import Placement

LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 2**20, 25 * 2**20
"""Below the first, the latency of a reduction counts for more than its bytes; the second is DistributedDataParallel's size
(``bucket_cap_mb=25``, torch 2.13)."""
_BUCKETS = 8  # so that no more than about an eighth of the reduction is left after the backward


class BucketReducer(UnitReducer):
    """See UnitReducer.

    Args:
        parameters: in the order in which the backward finishes them.
        stages_of: for each parameter, the stages of this rank that read it; without an entry, all of them. No bucket contains parameters of
            two stages.
        shared: parameters that several pipeline ranks hold: for each set of ranks, the names, in the same order on all ranks. They have
            buckets of their own, whose size does not depend on ``bucket_bytes``, since ranks with other gradients must cut them in the same way.
        bucket_bytes: the size at which a bucket is full; a larger parameter has a bucket for itself. None: an eighth of all gradients, from
            LEAST_BUCKET_BYTES to MOST_BUCKET_BYTES.

    Attributes:
        generation: how often the buckets have been laid out.
        sums_shares: whether each replica gets the sums of its share of a bucket only, for a sharded optimizer.
        keeps_sums: whether the sums of gradients stay in their own type once they are shown in that of the parameters.
        overlaps: whether reductions may start before the backward has ended.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: ProcessGroups,
        placement: Placement,
        *,
        stages_of: Mapping[str, Collection[int]],
        shared: Mapping[tuple[int, ...], Sequence[str]],
        bucket_bytes: int | None = None,
        **of_unit_reducer: Any,
    ) -> None:
        super().__init__(parameters, groups, placement, shared=shared, **of_unit_reducer)
        self.generation = 0
        self.sums_shares = self.keeps_sums = False
        self.overlaps = True
        self._num_replicas = placement.data_parallel_size
        self._bucket_bytes = bucket_bytes
        self._stages_of = stages_of
        self._ranks_of = {name: ranks for ranks, names in shared.items() for name in names}
        self._copies_checked = groups.tensor_parallel is None
        self._sums: list[Tensor] = []  # the gradients of each unit, not rounded
        self._gradients: dict[str, Tensor] = {}  # views of them
        self._trained: tuple[str, ...] = ()
        self._late: dict[str, Tensor] = {}  # gradients that came after the reduction of their bucket had begun
        self._is_last = False
        # readiness
        self._live = False
        self._passing: int | None = None
        self._missing: dict[str, set[int]] = {}
        self._unready: list[int] = []
        self._place: dict[str, int] = {}
        self._next = 0
        self._shared_works: list[dist.Work] = []

    # a batch

    def begin(self, *, last: bool) -> None:
        """Begin a batch: its backwards add to the gradients accumulated so far; ``last``: the last batch of a window."""
        if self._is_new:
            self._touched.clear()
        if tuple(n for n, p in self.parameters.items() if p.requires_grad) != self._trained:
            self.lay_out()
        elif self._is_new:
            for unit, sums in zip(self.units, self._sums, strict=True):
                unit.gradient = sums.zero_()
        self._is_new, self._in_batch, self._is_last = False, True, last
        for name in self.parameters.keys() - self._gradients.keys():
            self.parameters[name].grad = None
        self._attach(self._gradients)
        self.on_laid_out()
        self._unreduced = set(self._stages)
        self._next = 0
        self._live = last and self.overlaps and self.collective is not None and self._copies_checked
        if self._live:
            self._missing = {n: set(self._stages_of.get(n, self._stages)) for n in self._gradients}
            self._unready = [len(unit.names) for unit in self.units]
            self._place = {n: index for index, unit in enumerate(self.units) for n in unit.names}

    def backward(self, stage: int, *, first: bool, last: bool) -> None:
        """Begin a backward through ``stage``: buckets that the ``last`` one of the batch fills are reduced while it still runs."""
        if last:
            self._passing = stage

    def backward_ended(self, stage: int) -> None:
        """Launch the buckets of ``stage`` that its last backward has not filled: all its gradients are complete, also of parameters that the
        backward did not reach."""
        self._passing = None
        if self._live:
            for name in self._missing:
                self._pass(name, stage)

    def add(self, name: str, gradient: Tensor) -> None:
        """Accumulate a gradient that ``torch.autograd.grad`` has returned, and count it for the readiness of its bucket."""
        self._accumulate(name, gradient)
        self._touched.add(name)
        self._passed(name)

    def reduce(self, stage: int) -> None:
        """After the last of this rank's stages, start the reductions that have not started. All replicas must call."""
        self._unreduced.discard(stage)
        if not self._unreduced and self._is_last and self._copies_checked:
            self._start_rest()

    def end(self) -> None:
        """End a batch: move the gradients out of ``p.grad``."""
        self._in_batch = False
        self._refuse_thawed()
        self._views.clear()
        self.show(())

    def finish(self, *, last: bool) -> None:
        """After the ``last`` batch of a window: wait until its gradients are fully reduced. All ranks call."""
        if not self._copies_checked:
            self._copies_checked = True
            check_replicated(self.parameters, self._gradients, self.groups.tensor_parallel, self.groups.builder.device)
            if last:
                self._start_rest()
        if not last:
            self._reached = frozenset(self._touched)
            return
        for work in self._shared_works:
            work.wait()
        if self._shared_works:
            self._launch_rest()
            self._shared_works.clear()
        for reduction in self._works:
            reduction.wait()
        self._works.clear()
        if self._sum_flags(late=bool(self._late)):
            self._sum_late()
        self._is_new = True

    def show(self, names: Collection[str]) -> None:
        """Set ``p.grad`` of the parameters ``names`` to their gradients, and of the others to None.

        At the end of a window the gradients are rounded in place to the parameters' type, unless ``keeps_sums`` is set."""
        views = self._gradients
        if names and self._is_new and not self.keeps_sums:
            views = {}
            for unit in self.units:
                unit.round_gradient()
                views |= unit.views(_gradient_of(unit))
        for name, parameter in self.parameters.items():
            view = views.get(name) if name in names else None
            parameter.grad = None if view is None else dtensor.like(view.to(parameter.dtype), parameter)

    def close(self) -> None:
        for unit in self.units:  # which the memory of a sharded optimizer keeps
            unit.gradient = None
        super().close()
        self._sums.clear()
        self._gradients.clear()
        self._late.clear()

    # buckets

    def lay_out(self) -> None:
        """Lay out buckets for the parameters that are trained now; keeps the gradients accumulated so far. All replicas must call."""
        before = {} if self._is_new else self._gradients
        self._trained = tuple(n for n, p in self.parameters.items() if p.requires_grad)
        self.units, self._gradients = [self._make_bucket(names) for names in self._fill_buckets(self._trained)], {}
        self._sums = [_gradient_of(unit) for unit in self.units]
        for unit, sums in zip(self.units, self._sums, strict=True):
            self._gradients |= unit.views(sums)
        for name in self._gradients.keys() & before.keys():
            self._gradients[name].copy_(before[name])
        self._hook_parameters(self._trained)
        self.generation += 1

    def _fill_buckets(self, trained: Collection[str]) -> list[list[str]]:
        """Return the names of each bucket, in the order in which buckets become ready; those of shared parameters come last."""
        done: list[list[str]] = []
        filling: dict[Hashable, tuple[list[str], int]] = {}
        sizes = {n: dtensor.local_part(p).numel() * sum_dtype(p.dtype).itemsize for n, p in self.parameters.items()}
        eighth = sum(sizes[name] for name in trained) // _BUCKETS
        most = self._bucket_bytes or max(LEAST_BUCKET_BYTES, min(eighth, MOST_BUCKET_BYTES))
        ordered = sorted(trained, key=lambda n: n in self._ranks_of)  # stable
        for name in ordered:
            parameter = self.parameters[name]
            kind = (
                parameter.device,
                parameter.dtype,
                tuple(parameter.placements) if dtensor.is_dtensor(parameter) else (),
                self._ranks_of.get(name) or min(self._stages_of.get(name) or (-1,)),
            )
            names, total = filling.get(kind, ([], 0))
            full = MOST_BUCKET_BYTES if name in self._ranks_of else most
            if not names or total + sizes[name] > full:
                names, total = [], 0
                done.append(names)
            names.append(name)
            filling[kind] = names, total + sizes[name]
        places = {name: place for place, name in enumerate(ordered)}
        return sorted(done, key=lambda names: places[names[-1]])

    def _make_bucket(self, names: Sequence[str]) -> Unit:
        unit = side_by_side(
            {name: self.parameters[name] for name in names},
            multiple_of=self._num_replicas,
            ranks=self._ranks_of.get(names[0], ()),
        )
        unit.gradient = torch.zeros(unit.numel, dtype=sum_dtype(unit.dtype), device=unit.device)
        return unit

    def _place_of_late(self, name: str) -> Tensor:
        if name not in self._gradients:
            raise thawed_late(name)
        return self._late.setdefault(name, torch.zeros_like(self._gradients[name]))

    # reductions

    def _passed(self, name: str) -> None:
        if self._live and self._passing is not None:
            self._pass(name, self._passing)

    def _pass(self, name: str, stage: int) -> None:
        """Note that ``stage`` has finished a parameter's gradient; launch the buckets that are ready."""
        missing = self._missing[name]
        if stage not in missing:
            return
        missing.discard(stage)
        if missing:
            return
        self._unready[self._place[name]] -= 1
        while self._next < len(self.units) and not self._unready[self._next] and not self.units[self._next].ranks:
            self._launch(self.units[self._next])

    def _launch(self, unit: Unit) -> None:
        self._next += 1
        if self.collective is not None:
            self._detach(unit)
            self._works.append(self._start_sum(_gradient_of(unit), f"of {unit}"))

    def _start_sum(self, flat: Tensor, of: str) -> Work:
        collective = self.collective
        assert collective is not None
        sums = collective.scatter if self.sums_shares else collective.sum
        return self.queue.start(lambda: sums(flat), "bucket_reduce", of=of)

    def _start_rest(self) -> None:
        """Start the reductions that have not started; all ranks of the groups must call, once a window."""
        self._live = False
        while self._next < len(self.units) and not self.units[self._next].ranks:
            self._launch(self.units[self._next])
        for unit in self.units:
            if unit.ranks:
                work = dist.all_reduce(_gradient_of(unit), group=self._shared[unit.ranks].tensors, async_op=True)
                self._shared_works += [] if work is None else [work]
        if not self._shared_works:
            self._launch_rest()

    def _launch_rest(self) -> None:
        """Start the reductions of what pipeline ranks share over the replicas."""
        while self._next < len(self.units):
            self._launch(self.units[self._next])

    def _sum_late(self) -> None:
        """Add the gradients that came too late on any replica. All replicas run this, since all have the summed flag."""
        self.overlaps = False
        for unit in self.units:
            extra = torch.zeros_like(_gradient_of(unit))
            for name, view in unit.views(extra).items():
                if name in self._late:
                    view.copy_(self._late[name])
            self._start_sum(extra, f"of {unit}").wait()
            _gradient_of(unit).add_(extra)
        self._late.clear()


def _gradient_of(unit: Unit) -> Tensor:
    assert unit.gradient is not None
    return unit.gradient
