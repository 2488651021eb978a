"""Replacements: attributes of other people's objects, exchanged for as long as a run lasts.

with Replacements() as run:
    run.replace(callback, on_train_end=mine)      # callback.on_train_end is mine
...                                               # and what it was before, also after an exception
"""

from contextlib import ExitStack, suppress
from typing import Any


class Replacements(ExitStack):
    """An ExitStack that also exchanges attributes: its end puts back what stood there, the last change first."""

    def replace(self, owner: Any, **values: Any) -> None:
        """Set attributes of an object, a class or a module; what it only inherits, it inherits again afterwards."""
        for name, value in values.items():
            if name in vars(owner):
                self.callback(setattr, owner, name, vars(owner)[name])
            else:
                self.callback(_delete, owner, name)
            setattr(owner, name, value)


def _delete(owner: Any, name: str) -> None:
    with suppress(AttributeError):  # its owner has deleted it meanwhile
        delattr(owner, name)
