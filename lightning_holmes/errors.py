"""The exceptions that users meet. Every module may import them; they import nothing of the package.

Each message names the value that is wrong, the place where it stands and what to write instead:

    raise ConfigurationError("pipeline_parallel_size=3 does not divide the world size 8; use 1, 2, 4 or 8")

Mistakes in our own code are plain assertions, not these.
"""

import contextlib
from collections.abc import Iterator


class HolmesError(Exception):
    """What all exceptions of this package have in common."""


class ConfigurationError(HolmesError, ValueError):
    """An option or a file is wrong. The message names the value, the place and the fix."""


class UnsupportedModuleError(HolmesError, TypeError):
    """The LightningModule cannot give the numbers of plain Lightning as a pipeline. The message says why."""


class AbsentValueError(HolmesError, RuntimeError):
    """A step reads or changes a value that this rank does not hold at that moment, and which the first batch, on which the step was traced,
    did not read there. No TypeError, of which Python's operators make one of their own."""


class RemoteError(HolmesError, RuntimeError):
    """Another rank failed first. The message names that rank and carries its error."""


class ConnectionLostError(HolmesError, RuntimeError):
    """A rank that this one was talking to is gone, or the way to it; the message names group, transport and peer."""


class UnevenDataError(HolmesError, RuntimeError):
    """Ranks that train together come to the end of their data, or to that of their run, at different places."""


class CheckpointError(HolmesError, RuntimeError):
    """A checkpoint could not be written, or is damaged or another model's. The message names the file."""


class CheckpointDamagedError(CheckpointError):
    """The bytes of a checkpoint are others than were written. The message names the file."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was asked for. The message names the path."""


class AnomalyError(HolmesError, RuntimeError):
    """A backward gave NaN, or an infinity, under ``detect_anomaly``. The message names the parameters whose gradients it reaches."""


class TestbedError(HolmesError, RuntimeError):
    """Something on a testbed went wrong: a host that is not there, or a command that failed."""

    __test__ = False  # not a test, whatever pytest thinks of its name


class TestbedUnavailable(TestbedError):
    """This machine cannot carry a testbed. The message says which capability is missing."""


class UnreachableError(HolmesError):
    """Ranks that must talk cannot connect; the message names both ends, their interfaces and the port."""


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Around an import of an optional package: ConfigurationError says how to install what ``what`` needs."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"{what} needs {error.name or error}, which is not installed: pip install 'lightning-holmes[{extra}]'"
        ) from error


@contextlib.contextmanager
def read_by_transformers(what: str) -> Iterator[None]:
    """Around a call of transformers with somebody's settings or folder: ConfigurationError says ``what`` is wrong with which.

    Its code for a model raises whatever it comes across: KeyError, ZeroDivisionError, errors of other packages.
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
