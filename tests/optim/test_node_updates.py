"""The order of an optimizer node's updates, step by step."""

import queue
from typing import Any

from lightning_holmes.optim.node.updates import Updates


def test_a_worker_may_be_a_step_ahead_of_another() -> None:
    """If nodes update before the commit, a worker may get its parameters and go on before other workers have got
    theirs."""
    told: queue.Queue[Any] = queue.Queue()
    updates = Updates([], num_workers=2, changed=lambda: None, committed=told.put, fail=told.put)
    try:
        for worker, window in ((0, 1), (0, 2), (1, 1), (1, 2)):
            updates.commit(worker, {"window": window, "options": [], "edits": []})
        assert [told.get(timeout=30) for _ in range(2)] == [1, 2]
    finally:
        updates.cancel()
