"""Labels: what a part of a step is called in a profile.

    with labelled(lambda: "holmes: forward of stage 1, microbatch 3 (layers.4 to layers.7)"):
        ...

torch's profilers show a label around everything that runs inside, on the host and on the device. While no profiler runs, a label costs one
function call, and its text is not made. torch labels its own collectives ("gloo:all_reduce") and ``optimizer.step``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function

from lightning_holmes.torch_private import is_profiling

_UNLABELLED = nullcontext()


def labelled(text: Callable[[], str]) -> AbstractContextManager[Any]:
    """A context whose content has the label ``text()`` in profiles."""
    return record_function(text()) if is_profiling() else _UNLABELLED
