"""Tests how an optimizer can be sharded over ranks: by elements, by whole parameters, or not at all.

There is no list of optimizers: a copy of the user's optimizer (same class, same options) steps a small tensor whole, and
other copies step parts of it separately. If the results are equal, the parts may be on different ranks.

    found = find_separability(optimizer, torch.device("cpu"))
    found.level                 # "elements": SGD, Adam, RMSprop ...; "parameters": Muon, Adafactor, LAMB; "none"
"""

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.torch_private import holds_hooks

Level = Literal["elements", "parameters", "none"]

_SHAPES: dict[int, tuple[int, ...]] = {1: (17160,), 2: (132, 130), 3: (26, 22, 30), 4: (13, 12, 11, 10)}
"""Shapes of test tensors by number of dimensions: more than 4096 elements, below which 8-bit optimizers keep 32-bit states; and
matrices of more than 128 rows and columns, below which some optimizers do not factor their second moments."""
_CUTS = (0, 997, 1003, 17160)
"""Elements at which a test tensor is cut: no multiples of a row, a vector register or a block."""
_SCALES = (1.0, 1e3, 1e-4)
"""Scales of the gradients of successive steps: with one of them, clipping inside the optimizer changes the result."""
_LEARNING_RATE = 0.01  # in place of the optimizer's: schedules often begin at zero, and no step would change anything
_STEPS = 2  # for each scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Separability:
    """The result of :func:`find_separability`.

    Attributes:
        level: the finest parts that may be on different ranks.
        reason: why finer parts are not possible, for messages.
        element_keys: for each group, the keys of its parameters' states that have a value for each element.
        state_bytes: bytes of state for each element of a parameter, the maximum over the groups.
    """

    level: Level
    reason: str
    element_keys: tuple[frozenset[str], ...]
    state_bytes: float
    couples: bool = False
    """Whether a parameter's step depends on other parameters, such as by a norm over all of them."""


def find_separability(
    optimizer: Optimizer, device: torch.device, groups: Sequence[Mapping[str, Any]] | None = None
) -> Separability:
    """Test how ``optimizer`` can be sharded; its parameters and states are not changed.

    Args:
        device: the device on which its parameters will be; they may be on the meta device now.
        groups: the parameter groups to test; None: all groups of the optimizer.
    """
    holder = _holds_parameters(optimizer)
    if holder:
        return _none(holder)
    found: dict[str, Separability] = {}
    known = []
    for group in optimizer.param_groups if groups is None else groups:
        cases = sorted({(max(1, p.ndim), p.dtype) for p in group["params"]}, key=str)
        options = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr", "name")}
        known.append(repr((cases, options)))
        if known[-1] not in found:
            found[known[-1]] = _test_group(optimizer, group, cases, device)
    of_groups = [found[of_group] for of_group in known]
    worst = coarsest(of_groups)
    return Separability(
        level=worst.level,
        reason=worst.reason,
        element_keys=tuple(keys for result in of_groups for keys in result.element_keys),
        state_bytes=max((result.state_bytes for result in of_groups), default=0.0),
        couples=any(result.couples for result in of_groups),
    )


def coarsest(found: Iterable[Separability]) -> Separability:
    """Return the one of the coarsest level, the first of several; if there is none, all may be sharded by elements."""
    order = ("elements", "parameters", "none")
    anything = Separability(level="elements", reason="", element_keys=(), state_bytes=0.0)
    return max(found, key=lambda each: order.index(each.level), default=anything)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A parameter and its state after some steps."""

    value: Tensor
    state: Mapping[str, Any]


def marks_of(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes that were set on a parameter, which optimizers may read."""
    return {name: value for name, value in vars(parameter).items() if not name.startswith("_holmes_")}


def _test_group(
    optimizer: Optimizer, group: Mapping[str, Any], cases: Sequence[tuple[int, torch.dtype]], device: torch.device
) -> Separability:
    """Return the result for one group, with one entry of ``element_keys``."""
    name = type(optimizer).__name__
    level: Level = "elements"
    reason, keys, num_bytes = "", frozenset[str](), 0.0
    for ndim, dtype in cases:
        shape = _SHAPES.get(ndim, (4620,) + (1,) * (ndim - 1))
        steps = list(_gradients(shape, dtype, device))
        start = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        try:
            (whole,) = _run(optimizer, group, [start], [[g] for g in steps])
        except Exception as error:
            return _none(f"{name} cannot step a tensor of shape {shape} by itself ({type(error).__name__}: {error})")
        if torch.allclose(whole.value, start, rtol=1e-4, atol=0.0):
            return _none(f"{name} did not change a parameter in a trial step, so that it cannot be tested")
        keys |= {k for k, v in whole.state.items() if isinstance(v, Tensor) and v.shape == whole.value.shape}
        held = sum(v.numel() * v.element_size() for v in whole.state.values() if isinstance(v, Tensor))
        num_bytes = max(num_bytes, held / start.numel())
        difference = _differs_by_elements(optimizer, group, start, steps, whole)
        if difference and level == "elements":
            level = "parameters"
            reason = f"what {name} makes of an element depends on the rest of its parameter ({difference})"
        if (difference or level == "elements") and _differs_by_parameters(optimizer, group, start, steps, whole):
            why = f"what {name} makes of a parameter depends on the other parameters of its group"
            return _none(why, state_bytes=num_bytes, couples=True)
    return Separability(level=level, reason=reason, element_keys=(keys,), state_bytes=num_bytes)


def _none(reason: str, *, state_bytes: float = 0.0, couples: bool = False) -> Separability:
    return Separability(
        level="none", reason=reason, element_keys=(frozenset(),), state_bytes=state_bytes, couples=couples
    )


def _differs_by_elements(
    optimizer: Optimizer, group: Mapping[str, Any], start: Tensor, steps: Sequence[Tensor], whole: _Outcome
) -> str:
    """Return what differs when the parts of a tensor are stepped separately; empty if nothing does."""
    parts = []
    for first, last in itertools.pairwise(_CUTS):
        own = [[gradient.flatten()[first:last].clone()] for gradient in steps]
        try:
            parts += _run(optimizer, group, [start.flatten()[first:last].clone()], own)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    if not _close(torch.cat([p.value for p in parts]), whole.value.flatten()):
        return "other values"
    for key, value in whole.state.items():
        theirs = [part.state.get(key) for part in parts]
        if isinstance(value, Tensor) and value.shape == whole.value.shape:
            if any(
                not isinstance(t, Tensor) or t.numel() != p.value.numel() for t, p in zip(theirs, parts, strict=True)
            ):
                return f"its state {key!r} has another shape"
            if not _close(torch.cat([t.flatten() for t in theirs if isinstance(t, Tensor)]), value.flatten()):
                return f"other values of its state {key!r}"
        elif any(not _same(value, t) for t in theirs):
            return f"its state {key!r} is one for a whole tensor"
    return ""


def _differs_by_parameters(
    optimizer: Optimizer, group: Mapping[str, Any], start: Tensor, steps: Sequence[Tensor], whole: _Outcome
) -> bool:
    """Whether the step of a tensor changes when its group has a second tensor with larger gradients."""
    pairs = [[gradient, 30.0 * gradient.flip(0)] for gradient in steps]
    try:
        beside = _run(optimizer, group, [start, 3.0 * start], pairs)
    except Exception:
        return True
    return not _close(beside[0].value, whole.value)


def _run(
    optimizer: Optimizer, group: Mapping[str, Any], values: Sequence[Tensor], steps: Sequence[Sequence[Tensor]]
) -> list[_Outcome]:
    """Step ``values`` with a copy of ``optimizer``; ``steps`` has one gradient for each value, for each step."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    for parameter in parameters:
        vars(parameter).update(marks_of(group["params"][0]))
    twin = _twin(optimizer, group, parameters)
    device = values[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # for tensors on the host: torch.manual_seed keeps a stack trace for each device type that is not initialised
        (torch.default_generator if device.type == "cpu" else torch).manual_seed(0)
        for gradients in steps:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            type(optimizer).step(twin)  # not the instance's step, which schedulers wrap
    return [_Outcome(p.detach(), dict(twin.state.get(p, {}))) for p in parameters]


def _twin(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Make an optimizer of the same class with the options of ``group`` for other parameters. Its ``__init__`` is not called,
    since the arguments of a user's class are unknown here."""
    twin: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "step"):
            continue
        if holds_hooks(name) and isinstance(value, dict):
            value = OrderedDict()
        else:
            try:
                value = copy.deepcopy(value)
            except Exception:
                value = copy.copy(value)
        vars(twin)[name] = value
    options = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
    for name in ("lr", "initial_lr"):
        if isinstance(options.get(name), Tensor):
            options[name] = torch.full_like(options[name], _LEARNING_RATE)
        elif name in options:
            options[name] = _LEARNING_RATE
    twin.state = defaultdict(dict)
    twin.param_groups = [{**options, "params": parameters}]
    return twin


def _gradients(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(2)
    for scale in _SCALES:
        for _ in range(_STEPS):
            yield (scale * torch.randn(shape, generator=generator)).to(device, dtype)


def _close(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal up to rounding: vectorised code may fuse operations that scalar code does not."""
    rtol = 1e-5 if left.dtype.itemsize >= 4 else 2e-2
    scale = float(right.float().abs().mean())
    return torch.allclose(left.float(), right.float(), rtol=rtol, atol=rtol * scale, equal_nan=True)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.shape == right.shape and bool(torch.equal(left, right))
    return bool(left == right)


def _holds_parameters(optimizer: Optimizer) -> str:
    """Return why the optimizer's groups alone do not determine what it steps; empty if they do."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    name = type(optimizer).__name__
    for key, value in vars(optimizer).items():
        if key in ("state", "param_groups") or holds_hooks(key):
            continue
        for found in flattened(value, depth=3):
            if id(found) in own:
                return f"{name} keeps parameters in its attribute {key!r}, beside its groups"
            if isinstance(found, (Optimizer, nn.Module)):
                return f"{name} keeps a {type(found).__name__} in its attribute {key!r}"
    return ""


def flattened(value: Any, depth: int) -> Iterator[Any]:
    """Yield ``value`` itself, or the entries of its containers, nested up to ``depth`` deep."""
    if depth and isinstance(value, Mapping):
        for entry in [*value.keys(), *value.values()]:
            yield from flattened(entry, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for entry in value:
            yield from flattened(entry, depth - 1)
    else:
        yield value
