"""Name the parameters whose gradients an anomaly reaches: torch names only the operator that returned NaN.

For ``Trainer(detect_anomaly=True)``; otherwise nothing is done.

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
    """Context around a backward from ``roots`` (tensors or graph nodes): adds parameter names and ``place`` to
    torch's anomaly error.

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
    """The names of the parameters that the failed ``operator`` passes gradients to, the nearest first.

    If several nodes have that operator's name, it is the one that the backward ran last; a node that has run has
    freed its saved tensors.
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
        variable = getattr(node, "variable", None)  # only AccumulateGrad nodes have one
        if variable is not None and id(variable) in names:
            found[names[id(variable)]] = None
    return list(found)


def _reachable(starts: Sequence[Any]) -> Iterator[Any]:
    """The nodes of autograd's graph that are reachable from ``starts``, nearest first."""
    waiting = collections.deque(node for node in starts if node is not None)
    seen = set(waiting)
    while waiting:
        node = waiting.popleft()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
