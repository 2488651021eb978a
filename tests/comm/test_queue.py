"""ThreadQueue: order, failures, and its calls of CUDA, with a recorder in place of a device."""

import pytest

from lightning_holmes.comm.queue import ThreadQueue


def test_after_a_failure_everything_fails_with_its_cause() -> None:
    queue, ran = ThreadQueue(), []
    queue.start(lambda: ran.append(1)).wait()
    bad = queue.start(lambda: [][0])
    after = queue.start(lambda: ran.append(2))
    for work in (bad, after):
        with pytest.raises(IndexError):
            work.wait()
    queue.close()
    assert ran == [1]
