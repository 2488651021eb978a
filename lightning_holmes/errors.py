"""The exceptions that users see. Every module may import this one; it imports nothing from the package.

Each message names the value that is wrong, the place where it is set and what to write instead:

    raise ConfigurationError("pipeline_parallel_size=3 does not divide the world size 8; use 1, 2, 4 or 8")

Bugs in this package itself are caught by plain assertions, not by these exceptions.
"""

import contextlib
from collections.abc import Iterator


class HolmesError(Exception):
    """The base class of all exceptions of this package."""


class ConfigurationError(HolmesError, ValueError):
    """An option or a file is wrong. The message names the value, the place and the fix."""


class UnsupportedModuleError(HolmesError, RuntimeError):
    """The LightningModule cannot be run as a pipeline with the same numbers as plain Lightning. The message says why.

    It is not a TypeError: torch takes one in an operator for "not implemented", so that ``parameter == 1.0`` would be False and
    ``tensor - parameter`` an error of Python's own."""


class AbsentValueError(HolmesError, RuntimeError):
    """A step reads or changes a value that this rank does not hold at that moment, and that was not read at this place when the step was
    traced on the first batch."""


class RemoteError(HolmesError, RuntimeError):
    """Another rank failed first. The message names that rank and carries its error."""


class ConnectionLostError(HolmesError, RuntimeError):
    """A peer rank, or the network connection to it, is lost. The message names the group, the transport and the peer."""


class UnevenDataError(HolmesError, RuntimeError):
    """Ranks that train together reach the end of their data, or the end of their run, at different points."""


class CheckpointError(HolmesError, RuntimeError):
    """A checkpoint could not be written, is damaged, or belongs to another model. The message names the file."""


class CheckpointDamagedError(CheckpointError):
    """The bytes of a checkpoint differ from those that were written. The message names the file."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the given path. The message names the path."""


class AnomalyError(HolmesError, RuntimeError):
    """Summed gradients are infinite under ``detect_anomaly``. The message names their parameters."""


class UnreachableError(HolmesError):
    """Ranks that must communicate cannot connect. The message names both ends, their interfaces and the port."""


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Wrap the import of an optional package that ``what`` needs: if it is missing, raise ConfigurationError with the pip command."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"{what} needs {error.name or error}, which is not installed: pip install 'lightning-holmes[{extra}]'"
        ) from error


@contextlib.contextmanager
def read_by_transformers(what: str) -> Iterator[None]:
    """Wrap a call of transformers with the user's settings or folder: any exception becomes a ConfigurationError that begins with ``what``.

    The model code of transformers raises all kinds of exceptions: KeyError, ZeroDivisionError, errors of other packages.
    """
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if "trust_remote_code" in str(error):
            why = (
                "its config.json asks for Python code of its own (auto_map), which is never run; give a model that transformers "
                "has itself"
            )
        raise ConfigurationError(f"{what}: {why}") from error
