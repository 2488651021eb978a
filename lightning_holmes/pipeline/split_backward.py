"""A stage's backward over one microbatch in two parts: the gradients that the previous stage waits for, and the rest.

    parts = SplitBackward(roots, gradients, received, parameters, names)
    parts.input(accumulate)           # sets received[i].grad; the previous stage can go on
    parts.weight(accumulate)          # accumulate(name, gradient) for each parameter that was reached

The graph is walked once. The nodes that lead to the input are the trunk. The gradient of a matrix that is read at
only one node of the trunk is put off: the gradients that arrive at that node are kept, and the second part goes on
from there to the matrix, as zero-bubble schedules require (arXiv 2401.10241). All other parameters get their
gradients in the first part: those that are read at several nodes, by roots that do not depend on the input, or by an
autograd.Function of the user, whose backward may not run twice, and those too small to be worth a second visit. The
gradients are kept as they arrive, before hooks on that tensor: the hooks run in both parts, and see the gradient once
in each.

torch.distributed.pipelining has similar functions. Those of torch 2.13 go through a graph twice, and fail if a
parameter is read at nodes that read others as well (a time embedding that conditions every layer); they lose
gradients from roots that do not depend on the input; and they detach roots in place, which views refuse.

``torch.autograd.grad`` runs no post-accumulate hooks, so gradients are passed to ``accumulate``.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from lightning_holmes.errors import UnsupportedModuleError

Accumulate = Callable[[str, Tensor], None]


class SplitBackward:
    """The backward from ``roots``, whose gradients are ``gradients``, to the leaves ``received`` and ``parameters``, those of the stage.
    ``names``: of all parameters of the module, by id; one that is reached and is none of the stage's is refused."""

    def __init__(
        self,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor],
        received: Sequence[Tensor],
        parameters: Mapping[str, nn.Parameter],
        names: Mapping[int, str],
    ) -> None:
        self._names = names
        self._roots, self._gradients = list(roots), list(gradients)
        self._received = [tensor for tensor in received if tensor.requires_grad]
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._kept: dict[Node, dict[GradientEdge, Tensor]] = defaultdict(dict)
        self._put_off: dict[Node, list[str]] = {}

    def input(self, accumulate: Accumulate) -> None:
        """Set the ``grad`` of the received tensors, and pass the gradients that are not put off to ``accumulate``.

        Raises:
            UnsupportedModuleError: the graph has code compiled by torch.compile that does not allow a backward in two
                parts, or the step reads a parameter of another stage, which it did not read when it was traced.
        """
        if not self._roots:
            return
        at_once, self._put_off, entries = _sort(self._roots, self._received, self._parameters, self._names)
        kept = [GradientEdge(node, index) for node in self._put_off for index in sorted(entries[node])]
        targets: list[Any] = [*self._received, *(self._parameters[name] for name in at_once), *kept]
        try:
            found = torch.autograd.grad(
                self._roots, targets, self._gradients, retain_graph=bool(self._put_off), allow_unused=True
            )
        except RuntimeError as error:
            if "donated buffer" not in str(error):
                raise
            raise UnsupportedModuleError(
                "zero-bubble schedules go through a backward in two parts, which code compiled by torch.compile does not allow; "
                "use another schedule, such as 1f1b, or leave what is compiled uncompiled"
            ) from error
        self._roots, self._gradients = [], []  # frees the graph between the roots and the nodes that are kept
        for tensor, gradient in zip(self._received, found, strict=False):
            tensor.grad = gradient
        rest = found[len(self._received) :]
        for edge, gradient in zip(kept, rest[len(at_once) :], strict=True):
            if gradient is not None:
                self._kept[edge.node][edge] = gradient
        for name, gradient in zip(at_once, rest, strict=False):
            if gradient is not None:
                accumulate(name, gradient)

    def weight(self, accumulate: Accumulate) -> None:
        """Pass the gradients that were put off to ``accumulate``, by the names of their parameters."""
        put_off, self._put_off = self._put_off, {}
        for node, names in put_off.items():
            arrived = self._kept.pop(node, None)
            if arrived is None:
                continue
            parameters = [self._parameters[name] for name in names]
            found = torch.autograd.grad(list(arrived), parameters, list(arrived.values()), allow_unused=True)
            for name, gradient in zip(names, found, strict=True):
                if gradient is not None:
                    accumulate(name, gradient)


def _sort(
    roots: Sequence[Tensor],
    received: Sequence[Tensor],
    parameters: Mapping[str, nn.Parameter],
    names: Mapping[int, str],
) -> tuple[list[str], dict[Node, list[str]], dict[Node, set[int]]]:
    """Return the parameters whose gradients are computed at once; those that are put off, by the node of the trunk
    that reads them; and for each node, at which of its outputs gradients arrive."""
    inputs = {id(tensor) for tensor in received}
    trunk: set[Node] = set()
    reads: dict[Node, frozenset[str]] = {}  # of nodes off the trunk: the parameters behind them
    places: dict[str, list[Node]] = defaultdict(list)
    several: set[str] = set()
    starts = [root.grad_fn for root in roots if root.grad_fn is not None]
    entries: dict[Node, set[int]] = defaultdict(set)
    for root in roots:
        if root.grad_fn is not None:
            entries[root.grad_fn].add(root.output_nr)
    for node in _behind_first(starts):
        for f, index in node.next_functions:
            if f is not None:
                entries[f].add(index)
        following = [f for f, _ in node.next_functions if f is not None]
        variable = getattr(node, "variable", None)
        if (variable is not None and id(variable) in inputs) or any(f in trunk for f in following):
            trunk.add(node)
            for name in frozenset().union(*(reads.get(f, frozenset()) for f in following)):
                places[name].append(node)
        elif variable is not None:
            own = names.get(id(variable))
            if own is not None and own not in parameters:
                raise UnsupportedModuleError(
                    f"{own} is read where it was not when the step was traced on its first batch, and a backward in two parts "
                    f"would lose its gradient: let the first batch read it there, too (times 0, if need be), or use pipeline_parallel_size=1"
                )
            reads[node] = frozenset(() if own is None else (own,))
        else:
            reads[node] = frozenset().union(*(reads[f] for f in following))
    for start in starts:
        several |= reads.get(start, frozenset())
    put_off: dict[Node, list[str]] = defaultdict(list)
    at_once = [name for name in parameters if name in several and name not in places]
    for name, nodes in places.items():
        if len(nodes) > 1 or name in several or _is_users_own(nodes[0]):
            at_once.append(name)
        else:
            put_off[nodes[0]].append(name)
    for node in [n for n, read in put_off.items() if all(parameters[name].ndim < 2 for name in read)]:
        at_once += put_off.pop(node)
    return at_once, dict(put_off), entries


def _is_users_own(node: Node) -> bool:
    """Whether a node is of a user's autograd.Function; not one of compiled code, which itself raises an error if it
    is run twice."""
    return isinstance(node, BackwardCFunction) and "CompiledFunction" not in type(node).__name__


def _behind_first(starts: Sequence[Node]) -> list[Node]:
    """All nodes of a graph, each after the nodes to which it passes gradients."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [(node, False) for node in starts]
    while waiting:
        node, followed = waiting.pop()
        if followed:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(f, False) for f, _ in node.next_functions if f is not None and f not in seen]
    return order


def check_splittable(stage: int, schedule: str, received: Sequence[Tensor]) -> None:
    """Refuse to split a stage's backward if there is no gradient to send to the previous stage.

    Raises:
        UnsupportedModuleError: nothing before ``stage`` is trained.
    """
    if not any(tensor.requires_grad for tensor in received):
        raise UnsupportedModuleError(
            f"schedule={schedule!r} splits the backward of stage {stage} into that of its input and that of its weights, "
            f"but its input needs no gradient: everything before it is frozen, so there is nothing to split and nothing "
            f'to win; use schedule="1f1b"'
        )


def checkpointing_refused(schedule: str, place: str) -> UnsupportedModuleError:
    """The error for activation checkpointing under a split backward."""
    return UnsupportedModuleError(
        f"schedule={schedule!r} splits backwards into that of the input and that of the weights, but {place} there is "
        f"activation checkpointing, which would run its forward again for each part of the backward and each group of "
        f'weights (about four backwards in one); use schedule="1f1b", or switch checkpointing off'
    )
