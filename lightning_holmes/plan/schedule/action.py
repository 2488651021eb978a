"""Action: one operation of a pipeline rank in a step. Plain data; the package's docstring describes each.

str(Action(Op.BACKWARD_INPUT, stage=1, microbatch=3))       # "I1.3"
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

WHOLE_BATCH = -1
"""The microbatch of an action that belongs to a whole stage (FETCH, RELEASE, REDUCE_GRADIENTS)."""

_SHOWN = 40  # actions shown before and after the marked one


class Op(enum.Enum):
    """The kinds of action; the value is the short form that str(action) uses."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    FETCH = "FT"
    RELEASE = "RL"
    REDUCE_GRADIENTS = "R"


COMPUTE_OPS = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SEND_OPS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECV_OPS = frozenset({Op.RECV_ACTIVATION, Op.RECV_GRADIENT})
GRADIENT_OPS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})
"""The operations that need the gradient of a stage's output and compute the gradient of its input."""
RELEASING_OPS = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})
"""The operations that end a microbatch's work on a stage, so that its activations are freed."""


@dataclass(frozen=True, slots=True)
class Action:
    """One operation of a rank."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        suffix = "" if self.microbatch == WHOLE_BATCH else f".{self.microbatch}"
        return f"{self.op.value}{self.stage}{suffix}"

    def describe(self) -> str:
        """The action in words: "backward input of stage 1, microbatch 3"."""
        suffix = "" if self.microbatch == WHOLE_BATCH else f", microbatch {self.microbatch}"
        return f"{self.op.name.lower().replace('_', ' ')} of stage {self.stage}{suffix}"


def mark_action(actions: Sequence[Action], place: int) -> str:
    """The actions of a rank in one line, with the one at ``place`` in ">>> <<<"; of a long list those around it."""
    first, end = max(0, place - _SHOWN), place + _SHOWN + 1
    shown = [f">>> {a} <<<" if i == place else str(a) for i, a in enumerate(actions[first:end], start=first)]
    return " ".join([*(["..."] if first else []), *shown, *(["..."] if end < len(actions) else [])])
