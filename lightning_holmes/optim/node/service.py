"""Service: what an optimizer node does for the workers that hold the same stages: takes gradients, updates, and gives parameters.

Each worker has two connections. On "push" it sends gradients, the end of a window of batches, and a commit for each optimizer step;
nothing comes back. On "pull" it asks and is answered:

    fetch {unit, version, whole}  the parameters, when they are of that version; "whole": only where no step is half done
    keep {unit, values}           parameters from outside: the first ones, or a checkpoint's
    norm {window, names, edits}   the square of their norm, when all workers' gradients have come
    states {names, version}       optimizer states; keys {names, version}: what they consist of; load {states}
    rest                          the run has ended well: from here on a connection may close

An update begins when every worker has committed it, runs in a thread of its own, unit by unit in the order of the next forward, and
whoever waits for a unit's parameters has them as soon as that unit is done. Where workers tell a step's options at its beginning
("begin"), a unit is updated when its last gradient has come, and the commit only confirms these. A worker that is lost ends the
service for all.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_holmes.errors import ConnectionLostError, HolmesError
from lightning_holmes.optim.node.channel import Channel
from lightning_holmes.optim.node.description import UnitLayout, find_class
from lightning_holmes.optim.node.unit import Edit, Unit


class Service:
    """For ``num_workers`` workers, as ``told`` by each of them.

    Args:
        name: of this node and these workers, for messages.
        may_import: the optimizer's class may lie in a module that is not imported yet.
    """

    def __init__(self, told: Mapping[str, Any], *, name: str, may_import: bool) -> None:
        self.told, self.name = told, name
        self.num_workers: int = told["num_workers"]
        kind = find_class(told["optimizer"], may_import=may_import)
        self._units: dict[int, Unit] = {
            index: Unit(UnitLayout.from_plain(unit), kind, told["optimizer"], num_workers=self.num_workers)
            for index, unit in told["units"].items()
        }
        self._changed = threading.Condition()
        self._failure: tuple[str, str] | None = None
        self._resting: set[int] = set()
        self._num_lanes = 0
        self._done = [0] * self.num_workers  # the last window whose gradients have all come
        self._commits: list[dict[str, Any] | None] = [None] * self.num_workers
        self._committed = 0
        self._begun: dict[int, list[dict[str, Any]]] = {}  # by window, of all workers
        self._updates: queue.SimpleQueue[dict[str, Any] | tuple[Unit, int] | None] = queue.SimpleQueue()
        self._num_updates, self._update_s = 0, 0.0
        self._moved = [0, 0]
        threading.Thread(target=self._update_all, name="holmes-node-update", daemon=True).start()
        self._answers: dict[str, Callable[[int, dict[str, Any]], dict[str, Any]]] = {
            "fetch": self._fetch,
            "keep": self._keep,
            "norm": self._norm,
            "states": self._states,
            "keys": self._keys,
            "load": self._load,
            "rest": self._rest,
        }

    def describe(self) -> str:
        """What is held, in a line."""
        elements = sum(unit.layout.numel for unit in self._units.values())
        num_bytes = sum(unit.values.nbytes for unit in self._units.values())
        return (
            f"{self.name}: {elements:,} parameters ({num_bytes / 1e6:.1f} MB) in {len(self._units)} units, "
            f"{self.told['optimizer']['name']}, "
            f"for {self.num_workers} worker{'s' * (self.num_workers > 1)}"
        )

    def summary(self) -> str:
        """What was done, in a line."""
        rate = self._num_updates / self._update_s if self._update_s else 0.0
        elements = sum(unit.layout.numel for unit in self._units.values())
        return (
            f"{self.name}: {self._num_updates} updates at {rate * elements / 1e6:.1f} M parameters/s, "
            f"{self._moved[0] / 1e6:.1f} MB in, {self._moved[1] / 1e6:.1f} MB out"
        )

    # connections, a thread each

    def serve(self, channel: Channel, kind: str, worker: int) -> None:
        """Until the worker at the other end is gone."""
        with self._changed:
            self._num_lanes += 1
        try:
            self._pull(channel, worker) if kind == "pull" else self._push(channel, worker)
        except ConnectionLostError as error:
            if worker not in self._resting:
                self.fail("lost", f"worker {worker} is gone ({error})")
        except Exception as error:
            self._fail_with(error)
        finally:
            channel.close()
            with self._changed:
                self._moved[0] += channel.num_received
                self._moved[1] += channel.num_sent
                self._num_lanes -= 1
            if self.is_over:
                self._updates.put(None)

    @property
    def is_over(self) -> bool:
        """No worker is connected any more."""
        return self._num_lanes == 0

    def _pull(self, channel: Channel, worker: int) -> None:
        while True:
            message = channel.receive()
            try:
                answer = self._answers[message["ask"]](worker, message)
            except ConnectionLostError:
                raise
            except Exception as error:
                self._fail_with(error)
                answer = {}
            if self._failure is not None:
                answer = {"failure": self._failure}
            channel.send(answer)

    def _push(self, channel: Channel, worker: int) -> None:
        while True:
            message = channel.receive()
            if self._failure is not None:
                continue  # the worker learns it by what it asks next
            kind = message["tell"]
            if kind == "gradient":
                unit = self._units[message["unit"]]
                gradient, is_last = message["values"], message["is_last"]
                if unit.arrive(worker, message["window"], message["touched"], gradient, is_last=is_last):
                    self._updates.put((unit, message["window"]))
            elif kind == "begin":
                with self._changed:
                    self._begun.setdefault(message["window"], []).append(message)
            elif kind == "done":
                with self._changed:
                    self._done[worker] = message["window"]
                    self._changed.notify_all()
            else:
                self._commit(worker, message)

    # failures

    def fail(self, kind: str, text: str) -> None:
        """End the service; the first reason stands."""
        with self._changed:
            if self._failure is None:
                self._failure = kind, f"{self.name}: {text}"
                print(f"{self.name} ends, since {text}", flush=True)
            self._changed.notify_all()

    def _fail_with(self, error: Exception) -> None:
        self.fail(
            type(error).__name__, str(error) if isinstance(error, HolmesError) else f"{type(error).__name__}: {error}"
        )

    def _wait(self, until: Callable[[], bool]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or until())
            return self._failure is None

    # what is asked

    def _fetch(self, worker: int, message: dict[str, Any]) -> dict[str, Any]:
        unit, version = self._units[message["unit"]], message["version"]
        if not self._wait(lambda: unit.version >= version):
            return {}
        if message["whole"] and any(other.version > version for other in self._units.values()):
            self.fail("lost", "the run ended while a step was half done: the run can go on from its last checkpoint")
            return {}
        return {"values": unit.values}

    def _keep(self, worker: int, message: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            self._units[message["unit"]].keep(message["values"], message["version"])
            self._changed.notify_all()
        return {}

    def _norm(self, worker: int, message: dict[str, Any]) -> dict[str, Any]:
        window, names = message["window"], set(message["names"])
        if not self._wait(lambda: min(self._done) >= window):
            return {}
        found = [unit.norm_squared(window, names, message["edits"]) for unit in self._units.values()]
        return {"squared": sum(found)}

    def _states(self, worker: int, message: dict[str, Any]) -> dict[str, Any]:
        names, version = set(message["names"]), message["version"]
        if not self._wait(lambda: all(unit.version >= version for unit in self._units.values())):
            return {}
        return {"states": {n: s for unit in self._units.values() for n, s in unit.states(names).items()}}

    def _keys(self, worker: int, message: dict[str, Any]) -> dict[str, Any]:
        return {"keys": {name: list(state) for name, state in self._states(worker, message).get("states", {}).items()}}

    def _load(self, worker: int, message: dict[str, Any]) -> dict[str, Any]:
        for unit in self._units.values():
            unit.load(message["states"])
        return {}

    def _rest(self, worker: int, message: dict[str, Any]) -> dict[str, Any]:
        self._resting.add(worker)
        return {}

    # updates

    def _commit(self, worker: int, message: dict[str, Any]) -> None:
        with self._changed:
            self._commits[worker] = message
            if any(commit is None for commit in self._commits):
                return
            first, *others = [commit for commit in self._commits if commit is not None]
            self._commits = [None] * self.num_workers
        for other, commit in enumerate(others, start=1):
            if commit != first:
                what = next(key for key in first if commit.get(key) != first[key])
                self.fail("lost", f"workers 0 and {other} step with different {what}: {first[what]} and {commit[what]}")
                return
        self._updates.put(first)

    def _update_all(self) -> None:
        while (order := self._updates.get()) is not None:
            try:
                if isinstance(order, tuple):
                    self._update_early(*order)
                else:
                    self._finish_step(order)
            except Exception as error:
                self._fail_with(error)

    def _update_early(self, unit: Unit, window: int) -> None:
        """Update a unit whose last gradient has come, with the options that all workers told at the step's beginning."""
        first, *others = self._begun[window]
        if any(other != first for other in others):
            self.fail("lost", f"workers begin a step with different options: {first} and {others}")
        else:
            self._update(unit, window, (), first["options"])

    def _finish_step(self, commit: dict[str, Any]) -> None:
        """Update what is not updated yet."""
        window, options = commit["window"], commit["options"]
        if window == self._committed:
            raise HolmesError(
                "the optimizer steps twice with the gradients of one batch, which optimizer nodes let go of after the first step; "
                "step once a batch, or use optimizer_nodes=0"
            )
        self._committed = window
        with self._changed:
            begun = self._begun.pop(window, [])
            self._begun = {w: messages for w, messages in self._begun.items() if w > window}
        early = any(unit.updated_window == window for unit in self._units.values())
        if early and begun[0]["options"] != options:
            raise HolmesError(
                f"the optimizer's options were {begun[0]['options']} when a batch began, and {options} at its step, while optimizer "
                f"nodes had updated layers already: change options in on_train_batch_start or before, or override "
                f"on_before_optimizer_step, after which nodes wait for the step"
            )
        for unit in self._units.values():
            if unit.updated_window != window:
                self._update(unit, window, commit["edits"], options)
        self._num_updates += 1

    def _update(self, unit: Unit, window: int, edits: Sequence[Edit], options: Sequence[Mapping[str, Any]]) -> None:
        began = time.perf_counter()
        unit.update(window, edits, options)
        self._update_s += time.perf_counter() - began
        with self._changed:
            self._changed.notify_all()
