"""Membership: this rank's place among all ranks, and the messages that they exchange about a checkpoint.

member = Membership(rank=0, size=4, ...)
member.all_gather("here")                    # in WORLD, from the main thread
replace(member, group=group).broadcast(1)    # in a group of all ranks that one thread alone uses
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_holmes.comm.objects import all_gather_values, broadcast_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """This rank's position in the job: among all ranks, its replica among the replicas, and its rank in its tensor group.

    Attributes:
        make_group: makes a gloo group of all ranks, with the given name; all ranks must call.
        group: the group of the messages; None: WORLD.
    """

    rank: int = 0
    size: int = 1
    replica: int = 0
    num_replicas: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    make_group: Callable[[str], Any] = lambda name: None
    group: Any = None

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on all ranks; all ranks must call."""
        return [value] if self.size == 1 else all_gather_values(value, self.group)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, on all ranks; all ranks must call."""
        return value if self.size == 1 else broadcast_value(value, group=self.group)
