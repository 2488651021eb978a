"""Gradient accumulation: flat ``main_grad`` buckets of a rank, in the order in which its backward finishes them.

Lightning clears ``p.grad`` between a training step and the backward that it expects after the step; here the
backward is part of the step, so gradients stay in separate buffers until :meth:`GradBuffer.assign_grads`.

Gradients of the buffer's type accumulate directly into views of it; a hook adds the others (of bf16
parameters, of DTensors) after each accumulation. For a parameter that is sharded over a tensor group, a
bucket holds this rank's part; its gradients are redistributed to the placement of the parameter before they
are added. Beside the buckets there is one flag for each parameter: whether it got a gradient. The flags are
summed over the replicas, too, so that a parameter which no replica used keeps ``grad = None`` as in plain
Lightning (AdamW would decay it otherwise).

    buffer = GradBuffer(parameters, flat=True, data_parallel_size=4)
    buffer.begin()
    ...                                   # backwards
    buffer.end()
    for bucket in buffer.buckets:         # reduce bucket.buffer, (n,), n a multiple of 4
        ...
    buffer.assign_grads(last=True)              # p.grad
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_holmes.comm import dtensor

LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 2**20, 25 * 2**20
"""Below the first, the latency of a reduction counts for more than its bytes; the second is DistributedDataParallel's size
(``bucket_cap_mb=25``, torch 2.13)."""
_BUCKETS = 8  # so that no more than about an eighth of the reduction is left after the backward


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """Gradients that lie side by side and are reduced together.

    Attributes:
        names: the parameters, in the order of their places.
        buffer: 1-D; its length is a multiple of the data-parallel size. Elements that no view covers are zero.
        views: by name, this rank's part of a gradient in the parameter's shape; in the memory of ``buffer``.
        starts: by name, the first element of the view.
        flags: (len(names),) fp32, in the order of ``names``: after :meth:`GradBuffer.seal` and a sum over the
            replicas, above zero for parameters that got a gradient.
        apart: None, or the key that separates its parameters from others (the pipeline ranks that share them).
        launched: whether its reduction has begun; ``buffer`` must not be changed then.
    """

    names: tuple[str, ...]
    buffer: Tensor
    views: dict[str, Tensor]
    starts: dict[str, int]
    flags: Tensor
    apart: Hashable = None
    launched: bool = False


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of ``dtype`` accumulate and are summed: fp32; double precision and complex types stay."""
    return dtype if dtype.itemsize > 4 or dtype.is_complex else torch.float32


class GradBuffer:
    """Accumulates gradients of ``parameters`` (name -> parameter of this rank) over one accumulation window.

    Args:
        parameters: in the order in which the backward finishes them.
        flat: keep flat buckets for reductions. Without them (a single rank, no sharded parameters), gradients
            stay the tensors that autograd made, which costs neither memory nor time.
        data_parallel_size: the length of each bucket is a multiple of it.
        bucket_bytes: the size at which a bucket is full; a larger parameter has a bucket for itself. None: an eighth of all
            gradients, from LEAST_BUCKET_BYTES to MOST_BUCKET_BYTES.
        stage_of: by name, the stage whose last backward finishes the gradient; no bucket contains parameters of two stages.
        apart: by name, a key; parameters with different keys share no bucket, and buckets with a key come last. Their size does not
            depend on ``bucket_bytes``, since other pipeline ranks, with other gradients, must cut them in the same way.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        flat: bool,
        data_parallel_size: int = 1,
        bucket_bytes: int | None = None,
        stage_of: Mapping[str, int] | None = None,
        apart: Mapping[str, Hashable] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.flat = flat
        self.data_parallel_size = data_parallel_size
        self._bucket_bytes = bucket_bytes
        self.buckets: list[Bucket] = []
        self.flags = torch.zeros(0)
        """(parameters + 1,) fp32, on the host, so that reading them waits for no device: the flags of all buckets, and one
        that is set if gradients came late."""
        self.late: dict[str, Tensor] = {}
        """Gradients that arrived after the reduction of their bucket had begun, by name; not yet summed over replicas."""
        self.generation = 0
        """How often the buckets have been laid out."""
        self.on_arrival: Callable[[str], None] | None = None
        """Called with a parameter's name after each of its accumulations."""
        self._stage_of = dict(stage_of or {})
        self._apart = dict(apart or {})
        self._bucket_of: dict[str, Bucket] = {}
        self._kept: dict[str, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._trainable: tuple[str, ...] = ()
        self._touched: set[str] = set()
        self._open = False
        self._gathering = False

    @property
    def is_open(self) -> bool:
        """Whether a window has begun that :meth:`assign_grads` has not closed yet."""
        return self._open

    def begin(self) -> None:
        """Start a batch: zero the buckets if a new window begins, and let autograd accumulate into them."""
        self._gathering = True
        if not self.flat:
            for name in self.parameters:
                self.parameters[name].grad = self._kept.get(name) if self._open else None
            self._open = True
            return
        trainable = tuple(n for n, p in self.parameters.items() if p.requires_grad)
        if not self._open:
            self._touched.clear()
        if trainable != self._trainable:
            self._build(trainable)
        elif not self._open:
            for bucket in self.buckets:
                bucket.buffer.zero_()
        self._open = True
        for bucket in self.buckets:
            bucket.launched = False
            for name, view in bucket.views.items():
                parameter = self.parameters[name]
                parameter.grad = view if _accumulates_in(view, parameter) else None

    def end(self) -> None:
        """Finish a batch: set ``p.grad`` to None, so that ``zero_grad`` cannot clear the gradients."""
        self._gathering = False
        for name, parameter in self.parameters.items():
            if not self.flat:
                if parameter.grad is not None:
                    self._kept[name] = parameter.grad
                else:
                    self._kept.pop(name, None)
            parameter.grad = None

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient that autograd did not accumulate (``torch.autograd.grad``); a DTensor may have any placement."""
        parameter = self.parameters[name]
        if not self.flat:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            return
        self._take(name, gradient)
        if self.on_arrival is not None:
            self.on_arrival(name)

    def launch(self, bucket: Bucket) -> None:
        """Reserve ``bucket`` for its reduction until the end of the batch; gradients that still arrive go to ``late``."""
        bucket.launched = True
        for name in bucket.names:
            self.parameters[name].grad = None

    def seal(self) -> None:
        """Set the flags of the parameters that got a gradient, and the one of late gradients, before the flags are summed."""
        if self.buckets:
            reached = [float(n in self._touched) for bucket in self.buckets for n in bucket.names]
            self.flags.copy_(torch.tensor([*reached, float(bool(self.late))]))

    @property
    def is_late(self) -> bool:
        """Whether gradients came late on some replica; after :meth:`seal` and the reduction of the flags."""
        return bool(self.flags[-1])

    def reached(self) -> frozenset[str]:
        """Return the parameters that have a gradient on some replica; after :meth:`seal` and the reduction of the flags."""
        names = [n for bucket in self.buckets for n in bucket.names]
        return frozenset(n for n, flag in zip(names, self.flags[:-1].tolist(), strict=True) if flag)

    def assign_grads(self, *, last: bool, shown: bool = True) -> None:
        """Set ``p.grad`` to the accumulated gradients; ``last`` closes the window, after :meth:`seal` and reductions.

        Args:
            shown: if False, ``p.grad`` stays None, for buckets of which this rank has only a shard.
        """
        for name, gradient in self._kept.items():
            self.parameters[name].grad = gradient
        reached: Collection[str] = self._touched
        if not shown:
            reached = ()
        elif last and self.buckets:
            reached = self.reached()
        for name, bucket in self._bucket_of.items():
            parameter = self.parameters[name]
            if name in reached:
                view = bucket.views[name]
                gradient = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
                parameter.grad = dtensor.like(gradient, parameter)
            else:
                parameter.grad = None
        if last:
            self._open = False
            self._kept = {}

    def gradient(self, name: str) -> Tensor | None:
        """Return the accumulated gradient of ``name``, or None if it has none."""
        if not self.flat:
            return self._kept.get(name)
        bucket = self._bucket_of.get(name)
        return None if bucket is None else bucket.views[name]

    def close(self) -> None:
        """Free buffers and remove hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.buckets.clear()
        self._bucket_of.clear()
        self._kept.clear()
        self.late.clear()
        self.on_arrival = None
        self._open = False

    def _build(self, trainable: tuple[str, ...]) -> None:
        """Lay out the buckets for the parameters that are trained now; keeps the gradients accumulated so far."""
        gathered = {n: b.views[n] for n, b in self._bucket_of.items() if self._open}
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._trainable = trainable
        self.generation += 1
        parts = self._fill_buckets(trainable)
        self.flags = torch.zeros(len(trainable) + 1)
        self.buckets, self._bucket_of, first = [], {}, 0
        for names in parts:
            bucket = self._make_bucket(names, self.flags[first : first + len(names)])
            first += len(names)
            self.buckets.append(bucket)
            for name in names:
                self._bucket_of[name] = bucket
                if name in gathered:
                    bucket.views[name].copy_(gathered[name])
                parameter = self.parameters[name]
                hook = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _fill_buckets(self, trainable: Collection[str]) -> list[list[str]]:
        """Return the names of each bucket, in the order in which buckets become ready; those with an ``apart`` key come last."""
        done: list[list[str]] = []
        filling: dict[Hashable, tuple[list[str], int]] = {}
        sizes = {n: dtensor.local_part(p).numel() * sum_dtype(p.dtype).itemsize for n, p in self.parameters.items()}
        eighth = sum(sizes[name] for name in trainable) // _BUCKETS
        most = self._bucket_bytes or max(LEAST_BUCKET_BYTES, min(eighth, MOST_BUCKET_BYTES))
        ordered = sorted(trainable, key=lambda n: self._apart.get(n) is not None)  # stable
        for name in ordered:
            parameter = self.parameters[name]
            kind = (
                parameter.device,
                parameter.dtype,
                tuple(parameter.placements) if dtensor.is_dtensor(parameter) else (),
                self._apart.get(name, self._stage_of.get(name)),
            )
            size = sizes[name]
            names, total = filling.get(kind, ([], 0))
            full = most if self._apart.get(name) is None else MOST_BUCKET_BYTES
            if not names or total + size > full:
                names, total = [], 0
                done.append(names)
            names.append(name)
            filling[kind] = names, total + size
        places = {name: place for place, name in enumerate(ordered)}
        return sorted(done, key=lambda names: places[names[-1]])

    def _make_bucket(self, names: list[str], flags: Tensor) -> Bucket:
        first = self.parameters[names[0]]
        locals_ = {name: dtensor.local_part(self.parameters[name]) for name in names}
        total = sum(local.numel() for local in locals_.values())
        padded = -(-total // self.data_parallel_size) * self.data_parallel_size
        buffer = torch.zeros(padded, dtype=sum_dtype(first.dtype), device=first.device)
        views, starts, start = {}, {}, 0
        for name, local in locals_.items():
            starts[name] = start
            views[name] = buffer[start : start + local.numel()].view(local.shape)
            start += local.numel()
        return Bucket(
            names=tuple(names),
            buffer=buffer,
            views=views,
            starts=starts,
            flags=flags,
            apart=self._apart.get(names[0]),
        )

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        bucket = self._bucket_of[name]
        view = bucket.views[name]

        def arrived(parameter: Tensor) -> None:
            if not self._gathering:
                return  # the user's own backward, between batches
            if bucket.launched or not _accumulates_in(view, parameter):
                assert parameter.grad is not None
                self._take(name, parameter.grad)
                parameter.grad = None
            else:
                self._touched.add(name)
            if self.on_arrival is not None:
                self.on_arrival(name)

        return arrived

    def _take(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to its bucket, or to ``late`` if the bucket's reduction has begun."""
        self._touched.add(name)
        bucket = self._bucket_of[name]
        part = dtensor.gradient_part(gradient, self.parameters[name])
        target = bucket.views[name]
        if bucket.launched:
            target = self.late.setdefault(name, torch.zeros_like(target))
        target.add_(part)


def _accumulates_in(view: Tensor, parameter: Tensor) -> bool:
    """Whether autograd can accumulate a parameter's gradients directly into its view."""
    return view.dtype == parameter.dtype and not dtensor.is_dtensor(parameter)
