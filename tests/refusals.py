"""Refusals: errors whose messages have to name what is wrong and what to do.

with refusal("num_chunks=2", "interleaved_1f1b"):
    make_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=2, num_chunks=2)
"""

import contextlib
from collections.abc import Iterator

import pytest

from lightning_holmes.errors import ConfigurationError


@contextlib.contextmanager
def refusal(
    *words: str, error: type[Exception] = ConfigurationError, start: str = ""
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Assert that the block raises an error whose message begins with ``start`` and contains all ``words``."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert message.startswith(start) and not [word for word in words if word not in message], (words, message)
