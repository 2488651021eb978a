"""OnHost: what a movable group (movable.py) does by where its tensors are; nccl.py has that for tensors on a device.

Owns streams and the end of connections, as far as the group has to know of them; what is repeated is the group's.

    with side.after(operation.mark):                # in another thread than the caller's
        operation.issue(group)
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any


class OnHost:
    """Tensors are on the host: there are no streams, and connections are ended by their sockets."""

    backend_name = "gloo"

    def mark(self) -> Any:
        """What the caller's stream has been given until now."""

    def after(self, mark: Any, *, waits: bool = False) -> AbstractContextManager[None]:
        """What is started inside, in a thread of moves, comes after ``mark``. ``waits``: until it has been done."""
        return contextlib.nullcontext()

    def has_ended(self, work: Any) -> bool:
        """Whether it has ended well; gloo does not tell before somebody has waited."""
        return False

    def begin_end(self, connection: Any) -> None:
        """From now on whoever waits in a connection comes back at once."""

    def end(self, connection: Any, works: list[Any]) -> None:
        """End what has not ended in it, of which are ``works``."""

    def close(self, connection: Any) -> None:
        """The group is destroyed."""
