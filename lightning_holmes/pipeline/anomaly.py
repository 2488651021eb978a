"""Whose gradient an anomaly would reach: torch names the operator that gave NaN, not the parameters behind it.

For ``Trainer(detect_anomaly=True)``. Without that nothing is done.

    with naming_parameters(module, roots, "stage 1, microbatch 3"):
        torch.autograd.backward(roots, gradients)
"""

import collections
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_holmes.errors import AnomalyError
from lightning_holmes.torch_private import backward_has_run, forward_number

_OPERATOR = re.compile(r"Function '(\w+)' returned nan values")
_SHOWN = 5


@contextmanager
def naming_parameters(module: nn.Module, roots: Sequence[Tensor | Node], place: str) -> Iterator[None]:
    """Around a backward from ``roots``, tensors or nodes of the graph: let torch's error of anomaly mode name parameters, too, and ``place``.

    Raises:
        AnomalyError: in place of torch's RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        found = _OPERATOR.search(str(error)) if torch.is_anomaly_enabled() else None
        if found is None:
            raise
        named = parameters_behind(module, roots, found[1])
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        reached = (
            f"the gradients of {', '.join(named[:_SHOWN])}{more}" if named else "no parameter of this stage itself"
        )
        raise AnomalyError(
            f"{str(error).rstrip('.')} ({place}); from there NaN reaches {reached}. The traceback of the operator's forward, "
            f"printed above on this rank, shows the line"
        ) from error


def parameters_behind(module: nn.Module, roots: Sequence[Tensor | Node], operator: str) -> list[str]:
    """The names of the parameters that the failed ``operator`` hands gradients to, the nearest first.

    Of several operators of that name it is the last that the backward has run; those have let go of what they saved.
    """
    nodes = [
        node
        for node in _reachable([r.grad_fn if isinstance(r, Tensor) else r for r in roots])
        if node.name() == operator
    ]
    ran = [node for node in nodes if backward_has_run(node)]
    if ran:
        nodes = [min(ran, key=forward_number)]
    names = {id(p): n for n, p in module.named_parameters()}
    found: dict[str, None] = {}
    for node in _reachable(nodes):
        variable = getattr(node, "variable", None)  # of AccumulateGrad
        if variable is not None and id(variable) in names:
            found[names[id(variable)]] = None
    return list(found)


def _reachable(starts: Sequence[Any]) -> Iterator[Any]:
    """The nodes of autograd's graph from ``starts`` on, nearest first."""
    waiting = collections.deque(node for node in starts if node is not None)
    seen = set(waiting)
    while waiting:
        node = waiting.popleft()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
