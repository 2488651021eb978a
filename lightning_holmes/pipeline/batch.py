"""Batches: split one into microbatches, describe their shapes, and merge the outputs of microbatches.

This module decides what a sample is: which dimension or list of a batch counts samples. Lightning moves batches to
devices, and the user's module decides what a step does with them.

    >>> [m["x"].shape[0] for m in BatchSplitter().split({"x": torch.ones(7, 2)}, 4)]
    [2, 2, 2, 1]
"""

import enum
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.pipeline import tree

ONE_MICROBATCH = "num_microbatches=1 (eval_num_microbatches=1 in evaluation)"
_CURE = (
    "define `split_batch(self, batch, num_microbatches) -> list` on the LightningModule (and `microbatch_weight(self, batch)`, "
    f"the number of samples, where it cannot be told), or use {ONE_MICROBATCH}"
)
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum)


class BatchSplitter:
    """Splits batches into microbatches whose sizes differ by at most one sample.

    Every tensor with dimensions is split along its first one, which must have the same length everywhere; tensors
    without dimensions and constants go to each microbatch. Lists with one entry per sample (images of different
    sizes, strings) are split as lists. If the entries of a list could be samples or fields, an earlier batch of the
    same structure decides; without one the batch is refused.
    """

    def __init__(self) -> None:
        self._list_means_samples: dict[Hashable, bool] = {}

    def batch_size(self, batch: Any) -> int:
        """The number of samples in ``batch``.

        Raises:
            UnsupportedModuleError: the batch's tensors disagree on it, or the batch can be read in two ways.
        """
        return self._read(batch)[0]

    def split(self, batch: Any, num_microbatches: int, module: Any = None) -> list[Any]:
        """Split ``batch`` into ``num_microbatches`` parts, in order, by ``split_batch`` of ``module`` if it has that; else they hold views of
        its tensors, not copies.

        Raises:
            ConfigurationError: the batch has fewer samples than ``num_microbatches``, or ``split_batch`` makes another number of parts.
            UnsupportedModuleError: its number of samples cannot be told, or a part of it cannot be split.
        """
        if num_microbatches == 1:
            return [batch]
        if splits_itself(module):
            parts = list(module.split_batch(batch, num_microbatches))
            if len(parts) != num_microbatches:
                raise ConfigurationError(
                    f"{type(module).__name__}.split_batch returned {len(parts)} parts of a batch, not {num_microbatches}"
                )
            return parts
        size, per_sample = self._read(batch)
        if size == 0:
            raise ConfigurationError(
                f"a batch without samples cannot be split into num_microbatches={num_microbatches}; let the loader leave it "
                f"out, or use {ONE_MICROBATCH}"
            )
        if size < num_microbatches:
            raise ConfigurationError(
                f"a batch of {size} samples cannot be split into num_microbatches={num_microbatches}; "
                f"use a batch size of at least {num_microbatches} or num_microbatches={size} (in evaluation eval_num_microbatches)"
            )
        bounds = microbatch_bounds(size, num_microbatches)
        return [_take(batch, slice(*each), size, per_sample, depth=0, path="batch") for each in bounds]

    def weights(self, parts: Sequence[Any], module: Any, sizes: Sequence[int] | None = None) -> list[float]:
        """The weights of the losses of ``parts``: by ``microbatch_weight`` of ``module`` if it has that, else their numbers of samples, ``sizes``.

        Raises:
            ConfigurationError: a weight is negative or not finite.
            UnsupportedModuleError: as by :meth:`batch_size`.
        """
        own = getattr(module, "microbatch_weight", None)
        if not callable(own):
            return [float(size) for size in (sizes or map(self.batch_size, parts))]
        weights = [float(own(part)) for part in parts]
        for index, weight in enumerate(weights):
            if not 0 <= weight < float("inf"):
                raise ConfigurationError(
                    f"{type(module).__name__}.microbatch_weight gave {weight} for microbatch {index}; it must be "
                    f"a finite number, at least 0"
                )
        return weights

    def spread(self, batch: Any, count: int) -> Any:
        """A batch of ``count`` samples, at least 2, evenly spaced from the first to the last: neighbours may be alike, as where
        samples are sorted. The batch itself if it has no more.

        Raises:
            UnsupportedModuleError: as by :meth:`split`.
        """
        size, per_sample = self._read(batch)
        if size <= count:
            return batch
        rows = [index * (size - 1) // (count - 1) for index in range(count)]
        return _take(batch, rows, size, per_sample, depth=0, path="batch")

    def _read(self, batch: Any) -> tuple[int, bool]:
        """The batch size, and whether lists hold one entry per sample."""
        firsts = {path: t.shape[0] for path, t in _named_tensors(batch) if t.ndim > 0}
        if not firsts:
            lengths = {len(v) for v in _sample_lists(batch)}
            if len(lengths) == 1:
                return lengths.pop(), True
            raise UnsupportedModuleError(
                f"cannot tell how many samples a batch of type {type(batch).__name__} has: "
                f"it holds no tensor with dimensions; {_CURE}"
            )
        structured = len(set(firsts.values())) == 1
        size = next(iter(firsts.values()))
        nested = _sample_lists(batch)
        if not nested:
            if structured:
                return size, False
            shown = ", ".join(f"{path}: {length}" for path, length in list(firsts.items())[:6])
            raise UnsupportedModuleError(
                f"the tensors of a batch disagree on the number of samples (their first dimensions: {shown}); {_CURE}"
            )
        lengths = {len(v) for v in nested}
        outside = {t.shape[0] for _, t in _named_tensors(batch, leaving_out=nested) if t.ndim > 0}
        per_sample = len(lengths) == 1 and outside <= lengths
        key = _structure_key(batch)
        if structured and per_sample:
            known = self._list_means_samples.get(key)
            if known is None:
                raise UnsupportedModuleError(
                    f"a batch holds lists of {next(iter(lengths))} entries that could be one a sample or one a "
                    f"field ({', '.join(list(firsts)[:4])}); {_CURE}"
                )
            return (next(iter(lengths)), True) if known else (size, False)
        if not structured and not per_sample:
            shown = ", ".join(f"{path}: {length}" for path, length in list(firsts.items())[:6])
            raise UnsupportedModuleError(
                f"cannot tell the number of samples of a batch: first dimensions {shown}, "
                f"list lengths {sorted(lengths)}; {_CURE}"
            )
        self._list_means_samples[key] = per_sample
        return (next(iter(lengths)), True) if per_sample else (size, False)


def splits_itself(module: Any) -> bool:
    """Whether a module splits its batches by a method ``split_batch`` of its own."""
    return callable(getattr(module, "split_batch", None))


def microbatch_bounds(batch_size: int, num_microbatches: int) -> list[tuple[int, int]]:
    """The range (start, stop) of samples of each microbatch; earlier ones take the remainder."""
    base, remainder = divmod(batch_size, num_microbatches)
    bounds, start = [], 0
    for index in range(num_microbatches):
        stop = start + base + (index < remainder)
        bounds.append((start, stop))
        start = stop
    return bounds


def signature(batch: Any) -> Hashable:
    """A key that decides the shapes of a step's activations: paths, shapes and dtypes of the batch's tensors."""
    return tuple((path, tuple(t.shape), str(t.dtype)) for path, t in tree.named_tensors(batch, "batch"))


def microbatches_argument(step_name: str) -> str:
    """The name of HolmesStrategy's argument for the number of microbatches of a step."""
    return "num_microbatches" if step_name == "training_step" else "eval_num_microbatches"


def merge_outputs(outputs: list[Any], sizes: list[int], weights: list[float], name: str) -> Any:
    """Merge the outputs of a step over the microbatches into its output over the whole batch.

    Tensors and lists with one entry per sample are concatenated; numbers are averaged with ``weights``; equal
    constants are kept.

    Raises:
        UnsupportedModuleError: an output is none of these; the message has ``name`` and its path.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        if all(o.ndim > 0 and o.shape[0] == size for o, size in zip(outputs, sizes, strict=True)):
            return torch.cat(outputs)
        if all(o.ndim == 0 or o.numel() == 1 for o in outputs):
            return weighted_mean(outputs, weights)
    elif isinstance(first, float) and not isinstance(first, bool):
        return float(weighted_mean([torch.tensor(o, dtype=torch.float64) for o in outputs], weights))
    elif isinstance(first, list) and all(
        isinstance(o, list) and len(o) == size for o, size in zip(outputs, sizes, strict=True)
    ):
        return [entry for output in outputs for entry in output]
    elif tree.is_container(first):
        children = [dict(tree.children_of(output)) for output in outputs]
        return tree.map_children(
            lambda key, _: merge_outputs([c[key] for c in children], sizes, weights, f"{name}[{key!r}]"), first
        )
    elif all(_equal(o, first) for o in outputs):
        return first
    raise UnsupportedModuleError(
        f"{name} cannot be put together from {len(outputs)} microbatches (a {type(first).__name__}): return "
        f"tensors with one entry a sample, numbers, or set the number of microbatches of this step to 1"
    )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """``sum(w * v) / sum(w)`` over scalar tensors, without zero weights; equal values are returned without rounding.
    Floating-point tensors are not synchronised with the host."""
    kept = [(v.detach(), w) for v, w in zip(values, weights, strict=True) if w != 0]
    if not kept:
        return values[0].detach()
    first = kept[0][0]
    floating = first.is_floating_point()
    if not floating and all(bool(torch.equal(v, first)) for v, _ in kept):
        return first
    total = sum(w for _, w in kept)
    mean = torch.stack([v.double() * (w / total) for v, w in kept]).sum(0)
    if not floating:
        return mean.to(torch.get_default_dtype())
    alike = (torch.stack([v for v, _ in kept]) == first).all()
    return torch.where(alike, first, mean.to(first.dtype))


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except Exception:
        return False


def _named_tensors(value: Any, path: str = "batch", leaving_out: Sequence[Any] = ()) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif tree.is_container(value) and not any(value is other for other in leaving_out):
        for key, child in tree.children_of(value):
            yield from _named_tensors(child, f"{path}[{key!r}]", leaving_out)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not tree.is_named_tuple(value)


def _sample_lists(batch: Any, depth: int = 0) -> list[Any]:
    """Lists that may hold one entry per sample: nested lists with tensors whose entries have the same structure, and
    a top-level list of containers of the same structure."""
    if _is_plain_list(batch) and tree.tensors_of(batch):
        alike = len({_structure_key(entry) for entry in batch}) == 1
        if alike and (depth > 0 or (type(batch) is list and tree.is_container(batch[0]))):
            return [batch]
    if not tree.is_container(batch):
        return []
    return [found for _, child in tree.children_of(batch) for found in _sample_lists(child, depth + 1)]


def _structure_key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return "tensor", value.ndim
    if _is_plain_list(value):
        return type(value).__name__, tuple(sorted({str(_structure_key(v)) for v in value}))
    if tree.is_container(value):
        return type(value).__name__, tuple((str(key), _structure_key(child)) for key, child in tree.children_of(value))
    return type(value).__name__


def _take(value: Any, rows: slice | list[int], size: int, per_sample: bool, depth: int, path: str) -> Any:
    """The samples ``rows`` of ``value``: views of its tensors for a slice, copies for a list."""
    if isinstance(value, Tensor):
        return value[rows] if value.ndim > 0 else value
    if _is_plain_list(value):
        strings = bool(value) and not tree.tensors_of(value)
        whole_list = (
            type(value) is list
            and per_sample
            and depth == 0
            and bool(_sample_lists(value))
            and (len(value) == size and all(tree.is_container(v) for v in value))
        )
        if len(value) == size and (whole_list or (depth > 0 and per_sample) or (strings and depth > 0)):
            return value[rows] if isinstance(rows, slice) else type(value)(value[row] for row in rows)
    if tree.is_container(value):
        return tree.map_children(
            lambda key, child: _take(child, rows, size, per_sample, depth + 1, f"{path}[{key!r}]"), value
        )
    if hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0 and len(value) == size:
        return value[rows]
    if isinstance(value, CONSTANTS):
        return value
    raise UnsupportedModuleError(f"cannot split {path}, a {type(value).__name__}, into microbatches; {_CURE}")
