"""Errors of connections that break or time out during a run, with the group, transport and peer.

    with naming(lambda: "waiting for the activations of stage 0 from rank 3 in the group ..."):
        work.wait()

The libraries say "Connection closed by peer" or "Timed out waiting 1800000ms for recv operation to complete", which
does not tell a person where to look. A user's own code may raise the same words, about a database: so the code that
raised them decides.
"""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_holmes.errors import ConnectionLostError, HolmesError, UnreachableError

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (
    os.path.dirname(dist.__file__) + os.sep,
    *(f"{_PACKAGE}{part}{os.sep}" for part in ("comm", "optim", "pipeline", "checkpoint")),
)
"""The folders whose code waits for connections."""
_WORDS = (
    "Connection",
    "Socket",
    "closed by peer",
    "pair closure",
    "Broken pipe",
    "gloo",
    "NCCL",
    "Timed out",
    "timed out",
)


def is_lost(exception: BaseException) -> bool:
    """Whether an exception means that a connection broke, timed out, or could not be made."""
    if isinstance(exception, (dist.DistError, ConnectionLostError, UnreachableError)):
        return True
    said = isinstance(exception, RuntimeError) and any(word in str(exception) for word in _WORDS)
    return (said or isinstance(exception, ConnectionError)) and _is_of_libraries(exception)


def _is_of_libraries(exception: BaseException) -> bool:
    """Whether an exception was raised in torch.distributed, or in code of this package that waits for it; other frames
    of torch may lie in between."""
    for frame, _ in reversed(list(traceback.walk_tb(exception.__traceback__))):
        file = frame.f_code.co_filename
        if is_of_libraries(file):
            return True
        if not file.startswith(_TORCH):
            return False
    return False


def is_of_libraries(file: str) -> bool:
    """Whether code in ``file`` waits for connections: torch.distributed's, or this package's that uses it."""
    return file.startswith(_LIBRARIES)


@contextlib.contextmanager
def naming(where: Callable[[], str]) -> Iterator[None]:
    """Turn a lost connection inside into a ConnectionLostError that says ``where``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, HolmesError) or not is_lost(error):
            raise
        raise ConnectionLostError(describe_loss(where(), error)) from error


def describe_loss(where: str, error: BaseException) -> str:
    """The message for a connection that was lost ``where``."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "imed out" in said:
        cause = "nothing came within the timeout (HolmesStrategy(timeout=...)): another rank hangs or needs longer, or the network is cut"
    else:
        cause = "the process of another rank has ended, or the network between the hosts was cut"
    return f"connection lost {where}: {cause}. The library says: {said}. The run can go on from its last checkpoint"
