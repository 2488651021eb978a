"""Connections that break or time out while a run goes on, told by group, transport and peer.

    with naming(lambda: "waiting for the activations of stage 0 from rank 3 in the group ..."):
        work.wait()

The libraries say "Connection closed by peer" or "Timed out waiting 1800000ms for recv operation to complete", which does
not tell a person where to look.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch.distributed as dist

from lightning_holmes.errors import ConnectionLostError, HolmesError, UnreachableError

_WORDS = ("Connection", "Socket", "closed by peer", "Broken pipe", "gloo", "NCCL", "Timed out", "timed out")


def is_lost(exception: BaseException) -> bool:
    """Whether an exception is that of a connection that broke, timed out, or could not be made."""
    if isinstance(exception, (dist.DistError, ConnectionError, ConnectionLostError, UnreachableError)):
        return True
    return isinstance(exception, RuntimeError) and any(word in str(exception) for word in _WORDS)


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
        cause = "nothing came within the timeout (HolmesStrategy(timeout=...)), so the network between them is cut, or it hangs"
    else:
        cause = "that process has ended, or the network between them was cut"
    return f"connection lost {where}: {cause}. The library says: {said}. The run can go on from its last checkpoint"
