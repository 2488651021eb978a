"""Which of Lightning's two packages is used: ``pl`` and ``fabric``, through which all other modules use Lightning.

Lightning is published as ``lightning`` and as ``pytorch_lightning``: the same code under two names, whose classes are unrelated. This
package uses the one that the code which imports it uses, so that either's Trainer, modules and callbacks work::

    import lightning_holmes
    import pytorch_lightning as pl      # this file names pytorch_lightning and not lightning: pytorch_lightning is used

lightning_private.py wraps the private names.
"""

import ast
import linecache
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_holmes.errors import ConfigurationError

_LIGHTNING, _PYTORCH_LIGHTNING = "lightning", "pytorch_lightning"
PACKAGES = (_LIGHTNING, _PYTORCH_LIGHTNING, "lightning_fabric")
"""The first part of the names of Lightning's own modules, whichever package is used."""


def _importing_files() -> Iterator[str]:
    """The files that are being executed, from the one that imports this package to the script; then the scripts that a command was given."""
    for frame, _ in traceback.walk_stack(None):
        yield frame.f_code.co_filename
    yield from (argument for argument in sys.argv if argument.endswith(".py"))


def _imported_by(file: str) -> set[str]:
    """Which of Lightning's packages a file, or a cell of a notebook, imports anywhere."""
    text = "".join(linecache.getlines(file))
    if _PYTORCH_LIGHTNING not in text and f"import {_LIGHTNING}" not in text and f"from {_LIGHTNING}" not in text:
        return set()
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, SystemError, ValueError):  # of Python 3.11, if a thread parses, too
        return set()
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in found} & {_LIGHTNING, _PYTORCH_LIGHTNING}


def _choose() -> str:
    for file in dict.fromkeys(_importing_files()):
        if len(imported := _imported_by(file)) == 1:
            return imported.pop()
    is_only_one = _PYTORCH_LIGHTNING in sys.modules and "lightning.pytorch" not in sys.modules
    return _PYTORCH_LIGHTNING if is_only_one else _LIGHTNING


USED = _choose()
"""The name of the package that is used."""

if TYPE_CHECKING or USED == _LIGHTNING:
    import lightning.fabric as fabric
    import lightning.fabric.plugins.io.torch_io
    import lightning.pytorch as pl
    import lightning.pytorch.cli
    import lightning.pytorch.trainer.connectors.accelerator_connector  # noqa: F401 - these are attributes of pl and fabric
else:
    import lightning_fabric as fabric
    import pytorch_lightning as pl
    import pytorch_lightning.cli
    import pytorch_lightning.trainer.connectors.accelerator_connector

__all__ = ["PACKAGES", "USED", "fabric", "introduce", "pl", "refuse_other_trainer"]

_OTHER = _PYTORCH_LIGHTNING if USED == _LIGHTNING else "lightning.pytorch"


def introduce(strategy: type) -> None:
    """Register ``strategy`` as "holmes" with the package that is used, and with the other if that is imported: its trainers would call the
    strategy an invalid name, and so come to :func:`refuse_other_trainer`, which says what to change."""
    for package in (pl.__name__, _OTHER):
        strategies = sys.modules.get(f"{package}.strategies")
        if strategies is not None and "holmes" not in strategies.StrategyRegistry:
            strategies.Strategy.register(strategy)
            strategies.StrategyRegistry.register(
                "holmes", strategy, description="A pipeline across clusters, data parallelism inside them"
            )


def refuse_other_trainer(accelerator: object) -> None:
    """Refuse a trainer of the package that is not used, by its accelerator.

    Raises:
        ConfigurationError: it is one.
    """
    if any(f"{base.__module__}.".startswith(f"{_OTHER}.") for base in type(accelerator).__mro__):
        raise ConfigurationError(
            f"this Trainer is that of {_OTHER}, but lightning_holmes has been imported for {pl.__name__}: the same code under two names, whose "
            f"classes are unrelated. Import only one of them in all files, or import {_OTHER} in the file that imports lightning_holmes, "
            f"and not the other"
        )
