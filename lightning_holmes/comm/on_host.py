"""OnHost: the parts of a movable group (movable.py) that depend on where its tensors are, for the host; nccl.py has those for a device.

It handles streams and the end of connections, as far as the group needs them; the group itself decides what is
repeated.

    with side.after(operation.mark):                # in another thread than the caller's
        operation.issue(group)
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any


class OnHost:
    """Tensors are on the host: there are no streams, and a connection ends with its sockets."""

    backend_name = "gloo"

    def mark(self) -> Any:
        """Mark the work that the caller's stream has been given until now; None on the host."""

    def after(self, mark: Any, *, waits: bool = False) -> AbstractContextManager[None]:
        """Work that is started inside, in a thread of moves, runs after ``mark``. ``waits``: wait at the end until it is done."""
        return contextlib.nullcontext()

    def has_ended(self, work: Any) -> bool:
        """Whether ``work`` has ended well; gloo does not tell before a wait."""
        return False

    def begin_end(self, connection: Any) -> None:
        """Make waits in ``connection`` return at once from now on."""

    def end(self, connection: Any, works: list[Any]) -> None:
        """Abort the operations of ``connection`` that have not ended; ``works``: the works of these operations."""

    def close(self, connection: Any) -> None:
        """Close ``connection``, when the group is destroyed."""
