"""Compression of gradients between clusters: rounding to 16 bits, or products of thin matrices (PowerSGD).

Neither is exact, so neither is on by default. torch's hooks for DistributedDataParallel (ddp_comm_hooks, 2.13) do not
fit: they average DDP's own buckets, and torch's PowerSGD draws from the process's random generator, which the user's
dropout uses. PowerSGD is implemented from its paper.

    compressor = make_compressor("powersgd", rank=2)
    compressor.lay_out([(bucket.buffer, shapes)])
    compressor.sum(bucket.buffer, all_reduce)
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_holmes.plan.training import thin_columns

COMPRESSIONS = ("bf16", "fp16", "powersgd")
_SEED = 1912_06845  # any number that is the same on all ranks


class Compressor(Protocol):
    """Sums tensors over a group by sending fewer bytes; approximate."""

    def lay_out(self, buckets: Iterable[tuple[Tensor, Sequence[tuple[int, torch.Size]]]]) -> None:
        """Prepare for these buckets, each with the start and shape of every gradient in it; forget earlier buckets."""

    def sum(self, tensor: Tensor, all_reduce: Callable[[Tensor], None]) -> None:
        """Sum ``tensor`` in place, approximately; ``all_reduce`` sums exactly."""

    def rehearsal(self) -> "Compressor":
        """A compressor for measurements: it does the same work, and leaves the state of this one unchanged."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounds to ``dtype`` and sums in it: half of fp32's bytes."""

    dtype: torch.dtype

    def lay_out(self, buckets: Iterable[tuple[Tensor, Sequence[tuple[int, torch.Size]]]]) -> None:
        """Do nothing: shapes do not matter."""

    def sum(self, tensor: Tensor, all_reduce: Callable[[Tensor], None]) -> None:
        if tensor.dtype.itemsize <= self.dtype.itemsize:
            all_reduce(tensor)
            return
        rounded = tensor.to(self.dtype)
        all_reduce(rounded)
        tensor.copy_(rounded)

    def rehearsal(self) -> "Rounding":
        return self


class PowerSGD:
    """Approximates the sum M of matrices M_w by a rank-r product (Vogels et al. 2019, arXiv 1905.13727, algorithms 1, 2).

    P = sum of M_w Q, made orthogonal; Q = sum of M_w^T P; the sum is taken to be P Q^T. Each rank keeps the error of
    its own part, M_w - P Q_w^T, and adds it to its next gradient (error feedback); the next step begins with Q. Columns
    of Q that have become zero, with the gradients of a step, are reset to their first random values, since a zero
    column stays zero. Vectors, and matrices that are too small to gain, are summed exactly, together with P. If any
    value is not finite, the sum is NaN everywhere, and the kept errors are reset to zero.

    Not handled: ranks whose hardware rounds differently get sums that differ by as much.

    Args:
        rank: r.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._buckets: dict[int, _Factors] = {}

    def lay_out(self, buckets: Iterable[tuple[Tensor, Sequence[tuple[int, torch.Size]]]]) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        self._buckets = {b.data_ptr(): _Factors(b, shapes, self.rank, generator) for b, shapes in buckets}

    def sum(self, tensor: Tensor, all_reduce: Callable[[Tensor], None]) -> None:
        factors = self._buckets.get(tensor.data_ptr())
        if factors is None or factors.error.numel() != tensor.numel():
            all_reduce(tensor)
        else:
            factors.sum(tensor, all_reduce)

    def rehearsal(self) -> "PowerSGD":
        other = PowerSGD(self.rank)
        other._buckets = {start: factors.copied() for start, factors in self._buckets.items()}
        return other


class _Factors:
    """The thin matrices of one bucket."""

    def __init__(
        self, bucket: Tensor, shapes: Sequence[tuple[int, torch.Size]], rank: int, generator: torch.Generator
    ) -> None:
        self.error = torch.zeros(bucket.shape, device=bucket.device)
        self.matrices: list[tuple[int, int, int]] = []  # start, rows, columns
        self.q: list[Tensor] = []  # (columns, r)
        exact = torch.ones(bucket.numel(), dtype=torch.bool)
        for start, shape in shapes:
            rows = shape[0] if shape else 1
            columns = shape.numel() // max(1, rows)
            thin = thin_columns(rows, columns, rank) if len(shape) > 1 else 0
            if thin:
                self.matrices.append((start, rows, columns))
                self.q.append(torch.randn(columns, thin, generator=generator).to(bucket.device))
                exact[start : start + rows * columns] = False
        self.exact = exact.nonzero().flatten().to(bucket.device)
        self.drawn = self.q

    def copied(self) -> "_Factors":
        """A copy with an error of its own, which is zero, so that zeros are summed to zeros. All other attributes are
        shared: :meth:`sum` replaces them, and never writes to them."""
        other = copy.copy(self)
        other.error = torch.zeros_like(self.error)
        return other

    def sum(self, tensor: Tensor, all_reduce: Callable[[Tensor], None]) -> None:
        whole = tensor.float().add_(self.error)
        parts = [whole[start : start + n * m].view(n, m) for start, n, m in self.matrices]
        exact = whole[self.exact]
        message = torch.cat([*((part @ q).flatten() for part, q in zip(parts, self.q, strict=True)), exact])
        all_reduce(message)
        if not bool(message.isfinite().all()):
            tensor.fill_(float("nan"))
            self.error.zero_()
            return
        sizes = [part.shape[0] * q.shape[1] for part, q in zip(parts, self.q, strict=True)]
        *thin, exact = torch.split(message, [*sizes, exact.numel()])
        left = [torch.linalg.qr(p.view(len(part), -1)).Q for p, part in zip(thin, parts, strict=True)]
        right = [part.t() @ p for part, p in zip(parts, left, strict=True)]
        for part, p, q in zip(parts, left, right, strict=True):
            part.addmm_(p, q.t(), alpha=-1.0)
        self.error.copy_(whole)
        self.error[self.exact] = 0.0
        message = torch.cat([q.flatten() for q in right]) if right else whole.new_zeros(0)
        if right:
            all_reduce(message)
        summed = torch.split(message, [q.numel() for q in right]) if right else ()
        found = [s.view(q.shape) for s, q in zip(summed, right, strict=True)]
        for part, p, q in zip(parts, left, found, strict=True):
            torch.mm(p, q.t(), out=part)
        self.q = [torch.where((q == 0).all(0), drawn, q) for q, drawn in zip(found, self.drawn, strict=True)]
        whole[self.exact] = exact
        tensor.copy_(whole)


def make_compressor(name: str, *, rank: int) -> Compressor:
    """The compressor of that name, one of ``COMPRESSIONS``; ``rank`` is PowerSGD's."""
    if name == "powersgd":
        return PowerSGD(rank)
    return Rounding({"bf16": torch.bfloat16, "fp16": torch.float16}[name])
