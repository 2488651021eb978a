"""Updates: schedules the updates of an optimizer node's units, in two threads: one reads what a step needs, one computes.

An update begins when every worker has committed it, and runs unit by unit in the order of the next forward. If workers send a step's
options at its beginning ("begin"), a unit is updated when its last gradient has arrived, and the commit only confirms the options; units
on disk are read ahead in the order of the backward, as far as there is room.

    updates = Updates(units, num_workers=2, changed=..., committed=..., fail=...)
    updates.begin(message)                     # from each worker
    updates.complete(unit, window)             # the unit has all workers' gradients of the window
    updates.commit(0, message)                 # from each worker
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_holmes.errors import ConnectionLostError, HolmesError
from lightning_holmes.optim.node.unit import Edit, Unit


class Updates:
    """Updates the ``units`` of a service.

    Args:
        units: in the order of the forward.
        changed: called after each update.
        committed: called with a window when all of its updates have been made and written.
        fail: called with the exception if an update fails.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        num_workers: int,
        changed: Callable[[], None],
        committed: Callable[[int], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.num_steps, self.seconds = 0, 0.0
        self._units = units
        self._changed, self._committed, self._fail = changed, committed, fail
        self._lock = threading.Lock()
        # by worker, commits that other workers have not sent yet: if updates need no commit, a worker may be a step ahead
        self._commits: list[deque[dict[str, Any]]] = [deque() for _ in range(num_workers)]
        # by worker, messages of added groups that other workers have not sent yet
        self._added: list[deque[dict[str, Any]]] = [deque() for _ in range(num_workers)]
        self._last_window = 0
        self._begun: dict[int, list[dict[str, Any]]] = {}  # by window, the messages of all workers
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ahead: deque[Unit] = deque()
        self._ordered: dict[Unit, int] = {}  # the last window for which a unit's update was ordered
        self._is_over = False
        self._threads = [
            threading.Thread(target=run, name=f"holmes-node-{name}", daemon=True)
            for name, run in (("prepare", self._prepare_all), ("update", self._work_all))
        ]
        for thread in self._threads:
            thread.start()

    # messages of workers

    def begin(self, message: dict[str, Any]) -> None:
        """Handle a worker's message that it begins the last batch of a window, with its options."""
        with self._lock:
            told = self._begun.setdefault(message["window"], [])
            told.append(message)
            is_first = len(told) == 1
        if is_first:
            self._orders.put(self._look_ahead)

    def add_groups(self, worker: int, message: dict[str, Any]) -> None:
        """Handle a worker's message of added parameter groups; once all workers have sent it, the groups are added after the updates
        ordered so far."""
        told = self._told_by_all(self._added, worker, message)
        if told is None:
            return
        first, *others = told
        if any(other != first for other in others):
            raise ConnectionLostError(
                f"workers add different parameter groups to the optimizer, of {first['names']} and of {[other['names'] for other in others]}, or with "
                f"different options: call add_param_group alike on all ranks"
            )
        self._orders.put(lambda: self._add(first))

    def complete(self, unit: Unit, window: int) -> None:
        """Order the update of ``unit``, which has the last gradients of a window."""
        self._orders.put(lambda: self._order(unit, window, (), self._options_begun(window)))

    def commit(self, worker: int, message: dict[str, Any]) -> None:
        """Handle a worker's commit of a step; once all workers have sent it, the remaining units are updated."""
        told = self._told_by_all(self._commits, worker, message)
        if told is None:
            return
        first, *others = told
        for other, commit in enumerate(others, start=1):
            if repr(commit) != repr(first):  # not ``!=``: NaN differs from itself
                what = next(key for key in first if repr(commit.get(key)) != repr(first[key]))
                raise ConnectionLostError(
                    f"workers 0 and {other} step with different {what}: {first[what]} and {commit[what]}; set the optimizer's options, and clip or "
                    f"scale gradients, alike on all ranks"
                )
        self._orders.put(lambda: self._finish_step(first))

    def _told_by_all(
        self, told: list[deque[dict[str, Any]]], worker: int, message: dict[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Queue a worker's message; once all workers have sent their next one, remove and return one message of each."""
        with self._lock:
            told[worker].append(message)
            return [of_worker.popleft() for of_worker in told] if all(told) else None

    def on_room(self) -> None:
        """Try to read more units ahead, after memory has become free."""
        if self._ahead:
            self._orders.put(lambda: None)

    @property
    def num_waiting(self) -> int:
        """The number of queued orders."""
        return self._orders.qsize() + self._work.qsize()

    def finish(self) -> None:
        """Finish the orders that are queued, and end the threads."""
        for orders, thread in zip((self._orders, self._work), self._threads, strict=True):
            orders.put(None)
            thread.join()

    def cancel(self) -> None:
        """End the threads after the orders that are queued, whose errors are ignored; :meth:`finish` waits for them."""
        self._is_over = True
        self._orders.put(None)
        self._work.put(None)

    # the thread that prepares

    def _prepare_all(self) -> None:
        while (act := self._orders.get()) is not None:
            try:
                act()
                while self._ahead and self._is_settled(self._ahead[0]) and self._ahead[0].prepare(ahead=True):
                    self._ahead.popleft()
            except Exception as error:
                if not self._is_over:
                    self._fail(error)

    def _add(self, message: Mapping[str, Any]) -> None:
        """Add groups to the units, after all updates that were ordered before."""
        is_reached = threading.Event()
        self._work.put(is_reached.set)
        while not is_reached.wait(0.1):
            if self._is_over:
                return
        for unit in self._units:
            unit.add_groups(message["options"], message["names"], message["marks"])
        self._changed()

    def _is_settled(self, unit: Unit) -> bool:
        """Whether the last update that was ordered for ``unit`` has been made."""
        return self._ordered.get(unit, 0) <= unit.updated_window

    def _look_ahead(self) -> None:
        self._ahead = deque(reversed(self._units))

    def _options_begun(self, window: int) -> Sequence[Mapping[str, Any]]:
        first, *others = self._begun[window]
        if any(other != first for other in others):
            raise ConnectionLostError(
                f"workers begin a step with different options of the optimizer: {first['options']} and {[other['options'] for other in others]}; set "
                f"learning rates and other options alike on all ranks"
            )
        options: Sequence[Mapping[str, Any]] = first["options"]
        return options

    def _order(self, unit: Unit, window: int, edits: Sequence[Edit], options: Sequence[Mapping[str, Any]]) -> None:
        if unit in self._ahead:
            self._ahead.remove(unit)
        unit.prepare()
        self._ordered[unit] = window
        self._work.put(lambda: self._update(unit, window, edits, options))

    def _finish_step(self, commit: dict[str, Any]) -> None:
        """Update the units that were not updated for the window yet, and end the step."""
        window, options = commit["window"], commit["options"]
        if window == self._last_window:
            raise HolmesError(
                "the optimizer steps twice with the gradients of one batch, which optimizer nodes let go of after the first step; "
                "step once a batch, or use optimizer_nodes=0"
            )
        self._last_window = window
        with self._lock:
            begun = self._begun.pop(window, [])
            self._begun = {w: messages for w, messages in self._begun.items() if w > window}
        if window in self._ordered.values():  # after these updates, whose errors may be more specific
            self._work.put(lambda: self._check_options(begun[0]["options"], options))
        self._ahead.clear()
        for unit in self._units:
            if self._ordered.get(unit) != window:
                self._order(unit, window, commit["edits"], options)
        self._work.put(lambda: self._end_step(window))

    # the thread that updates

    def _work_all(self) -> None:
        while (act := self._work.get()) is not None:
            try:
                act()
            except Exception as error:
                if not self._is_over:
                    self._fail(error)

    def _update(self, unit: Unit, window: int, edits: Sequence[Edit], options: Sequence[Mapping[str, Any]]) -> None:
        began = time.perf_counter()
        unit.update(window, edits, options)
        self.seconds += time.perf_counter() - began
        self._changed()

    def _check_options(self, begun: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
        if begun != options:
            raise HolmesError(
                f"the optimizer's options were {begun} when a batch began, and {options} at its step, while optimizer "
                f"nodes had updated layers already: change options in on_train_batch_start or before, or override "
                f"on_before_optimizer_step, after which nodes wait for the step"
            )

    def _end_step(self, window: int) -> None:
        for unit in self._units:
            unit.wait_for_writes()
        self.num_steps += 1
        self._committed(window)
