"""Replacements: replaces attributes of objects of the user's or of other packages for the duration of a run.

with Replacements() as run:
    run.replace(callback, on_train_end=mine)      # callback.on_train_end is mine
...                                               # it is restored here, also after an exception
"""

from contextlib import ExitStack, suppress
from typing import Any


class Replacements(ExitStack):
    """An ExitStack that also replaces attributes, and restores them at its end, the last change first."""

    def replace(self, owner: Any, **values: Any) -> None:
        """Set attributes of an object, a class or a module; inherited attributes are inherited again afterwards."""
        for name, value in values.items():
            if name in vars(owner):
                self.callback(setattr, owner, name, vars(owner)[name])
            else:
                self.callback(_delete, owner, name)
            setattr(owner, name, value)


def _delete(owner: Any, name: str) -> None:
    with suppress(AttributeError):  # the attribute has been deleted meanwhile
        delattr(owner, name)
