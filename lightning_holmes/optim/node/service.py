"""Service: serves the workers that hold the same stages: receives gradients, updates parameters, and sends parameters.

Each worker has at least two connections. On "push" it sends gradients (or, if another worker speaks for it, a message that its gradient
is included in that worker's), the end of a window of batches, and a commit for each optimizer step; the node does not answer. "pull" is
for requests, which the node answers:

    fetch {unit, version, whole}  returns the parameters, when they have that version; "whole": fails if a step is half done
    keep {unit, values, version}  stores parameters of a worker: the initial ones, or a checkpoint's
    norm {window, names, edits}   returns the squared norm of the gradients of names, when all workers' gradients have arrived
    finite {window}               returns whether these gradients are finite
    states {unit, names, version} returns optimizer states
    keys {unit, names, version}   returns their keys, with the bytes of each
    load {unit, states}           stores optimizer states
    groups {count}                waits until all units have so many parameter groups
    settle {window}               waits until the commits up to a window have been checked and their steps are complete
    sees {folder, name}           returns whether the node sees a file, and can write beside it
    rest                          the run has ended well: from now on a connection may close
    try {num_bytes}               returns so many bytes, to measure a link

(Before a service exists, a worker can ask the node for everything that it has kept, on a connection "kept"; see kept.py.)

For each part of a checkpoint that the node writes there is one more connection, "save". The worker sends {path, version, units}, and the
node answers twice: when later updates can no longer change the values to be written, and when they are written.

updates.py decides when units are updated, and store.py where they are stored. A lost worker ends the service for all workers.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from lightning_holmes.errors import ConnectionLostError, HolmesError, UnsupportedModuleError
from lightning_holmes.optim.node.channel import Channel
from lightning_holmes.optim.node.description import UnitLayout, check_module, find_class
from lightning_holmes.optim.node.kept import Kept
from lightning_holmes.optim.node.node_options import NodeOptions
from lightning_holmes.optim.node.part_file import PartFile, Wanted, can_write_beside
from lightning_holmes.optim.node.storing import make_units
from lightning_holmes.optim.node.unit import Unit
from lightning_holmes.optim.node.updates import Updates

_TOLD_AFTER = 4  # steps before their time is reported; the first one is slow
_TOLD_EVERY_S = 60.0

Answer = Callable[[int, dict[str, Any], ExitStack], dict[str, Any]]
"""Answers a request: takes the worker, the message, and a stack that is closed when the answer has been sent."""


class Progress(NamedTuple):
    """A reading at time ``at``: the steps since the beginning, the seconds of their updates, and the bytes of tensors in and out."""

    at: float
    num_steps: int
    update_s: float
    num_received: int
    num_sent: int


class Service:
    """Serves the workers that hold the same stages.

    Args:
        told: the description that each worker sends, the same for all: the optimizer, the units, the number of workers and others.
        name: the name of this node and these workers, for messages.
        may_import: whether to import the module of the optimizer's class if it is not imported yet.
        expected: the result of ``describe_module`` for the module of this node; None if the node has no module.
        kept: the units that an earlier service has left, if the workers continue from them.

    Raises:
        ConfigurationError: it cannot serve these workers.
        CheckpointDamagedError: ``kept`` does not have the values from which the workers continue.
    """

    def __init__(
        self,
        told: Mapping[str, Any],
        *,
        name: str,
        may_import: bool,
        options: NodeOptions,
        expected: Mapping[str, Any] | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.told, self.name = told, name
        self.num_workers: int = told["num_workers"]
        kind = find_class(told["optimizer"], may_import=may_import)
        layouts = {index: UnitLayout.from_plain(unit) for index, unit in told["units"].items()}
        if expected is not None:
            check_module(expected, told["module"], told["precision"], layouts.values())
        self._elements = sum(layout.numel for layout in layouts.values())
        self._changed = threading.Condition()
        self._failure: tuple[str, str] | None = None
        self._may_be_kept = False
        """Whether only workers have failed, whose run can be started again, and nothing on this node."""
        self._resting: set[int] = set()
        self._last_window = 0  # the last window whose commit is complete
        self._done = [0] * self.num_workers  # for each worker, the last window whose gradients have all arrived
        self._channels: set[Channel] = set()
        self._moved = [0, 0]  # bytes received and sent by channels that are closed
        self._told = Progress(time.perf_counter(), 0, 0.0, 0, 0)
        self._ends: list[float] = []  # when each step ended
        if kept is None:
            self._units, self._store = make_units(kind, told, layouts, name=name, options=options)
        else:
            kept.check(told)
            self._units, self._store = kept.hand_over(self.num_workers)
        self._updates = Updates(
            list(self._units.values()),
            num_workers=self.num_workers,
            changed=self._tell_waiting,
            committed=self._committed,
            fail=self._fail_with,
        )
        if self._store is not None:
            self._store.fail, self._store.on_room = self._fail_with, self._updates.on_room
        self._answers: dict[str, Answer] = {
            "fetch": self._fetch,
            "keep": self._keep,
            "norm": self._norm,
            "finite": self._finite,
            "states": self._states,
            "keys": self._keys,
            "load": self._load,
            "settle": self._settle,
            "groups": self._groups,
            "sees": self._sees,
            "rest": self._rest,
            "try": self._try,
        }

    def describe(self) -> str:
        """Describe the units in one line, and their storage, if not in memory, in another."""
        num_bytes = sum(unit.layout.numel * unit.layout.dtype.itemsize for unit in self._units.values())
        where = "" if self._store is None else f"\n{self.name}: {self._store.describe()}"
        return (
            f"{self.name}: {self._elements:,} parameters ({num_bytes / 1e6:.1f} MB) in {len(self._units)} units, "
            f"{self.told['optimizer']['name']}, "
            f"for {self.num_workers} worker{'s' * (self.num_workers > 1)}{where}"
        )

    def summary(self) -> str:
        """Summarise the updates and the traffic in one line."""
        now = self._progress
        rate = now.num_steps / now.update_s if now.update_s else 0.0
        return (
            f"{self.name}: {now.num_steps} updates at {rate * self._elements / 1e6:.1f} M parameters/s, "
            f"{now.num_received / 1e6:.1f} MB in, {now.num_sent / 1e6:.1f} MB out"
        )

    @property
    def _progress(self) -> "Progress":
        with self._changed:
            num_received = self._moved[0] + sum(channel.num_received for channel in self._channels)
            num_sent = self._moved[1] + sum(channel.num_sent for channel in self._channels)
        return Progress(time.perf_counter(), self._updates.num_steps, self._updates.seconds, num_received, num_sent)

    def _tell_progress(self) -> None:
        """Print the progress since the last report in one line, at most every _TOLD_EVERY_S seconds."""
        now, before = self._progress, self._told
        passed, steps, update_s = now.at - before.at, now.num_steps - before.num_steps, now.update_s - before.update_s
        if passed < _TOLD_EVERY_S or not steps or not update_s:
            return
        self._told = now
        disk = (
            "" if self._store is None else f", disk {self._store.moved_bytes * steps / passed / 1e6:.3g} MB/s each way"
        )
        print(
            f"{self.name}: step {now.num_steps}, {passed / steps:.3g} s each; updates at {steps * self._elements / update_s / 1e6:.3g} M parameters/s, "
            f"{update_s / passed:.0%} of the time, {self._updates.num_waiting} waiting; network {(now.num_received - before.num_received) / passed / 1e6:.3g} "
            f"MB/s in, {(now.num_sent - before.num_sent) / passed / 1e6:.3g} out{disk}; {psutil.Process().memory_info().rss / 1e6:.0f} MB of memory",
            flush=True,
        )

    def leave(self) -> Kept | None:
        """End the service after all workers are gone.

        Returns:
            The units from which the run can continue when it is started again, after all committed steps have been made; None if the run
            has ended well, or units have the values of different steps: then nothing is kept.
        """
        if self._may_be_kept:
            self._updates.finish()
            versions = {unit.version for unit in self._units.values()}
            version = versions.pop() if len(versions) == 1 else 0
            if self._may_be_kept and version:  # 0: not all have been given values
                kept = f"{self.name}: keeps its {len(self._units)} units as they are after {version - 1} steps"
                print(f"{kept}, for when the run is started again", flush=True)
                optimizer = next((unit.told for unit in self._units.values()), self.told["optimizer"])
                told = {**self.told, "optimizer": optimizer}  # with groups that were added
                return Kept(told=told, version=version, units=self._units, store=self._store)
        self.close()
        return None

    def close(self) -> None:
        """Stop the updates and free everything, after all workers are gone."""
        self._updates.cancel()
        if self._store is not None:
            self._store.stop()
        self._updates.finish()
        if self._store is not None:
            self._store.close()

    # connections, a thread each

    def serve(self, channel: Channel, kind: str, worker: int) -> None:
        """Serve one connection until it is closed."""
        with self._changed:
            self._channels.add(channel)
        try:
            {"pull": self._pull, "push": self._push, "save": self._save}[kind](channel, worker)
        except ConnectionLostError as error:
            if (
                kind != "save" and worker not in self._resting
            ):  # a worker may give up a save, for example if its own part fails
                self.fail("lost", f"worker {worker} is gone ({error})", keeps=bool(self.told["run"]))
        except Exception as error:
            self._fail_with(error)
        finally:
            channel.close()
            with self._changed:
                self._channels.remove(channel)
                self._moved[0] += channel.num_received
                self._moved[1] += channel.num_sent

    @property
    def is_over(self) -> bool:
        """Whether no worker is connected any more."""
        return not self._channels

    def _pull(self, channel: Channel, worker: int) -> None:
        while True:
            message = channel.receive()
            with ExitStack() as held:
                try:
                    answer = self._answers[message["ask"]](worker, message, held)
                except ConnectionLostError as error:
                    self.fail("lost", str(error))
                except Exception as error:
                    self._fail_with(error)
                channel.send(answer if self._failure is None else {"failure": self._failure})

    def _save(self, channel: Channel, worker: int) -> None:
        message = channel.receive()
        units = {self._units[index]: Wanted(**wanted) for index, wanted in message["units"].items()}
        version = message["version"]
        if not self._wait(lambda: all(unit.version >= version for unit in units)):
            channel.send({"failure": self._failure})
            return
        assert all(unit.version == version for unit in units), "a worker saves in the midst of a step"
        try:
            file = PartFile(Path(message["path"]), units)
        except OSError as error:
            channel.send({})
            channel.send({"error": f"{type(error).__name__}: {error}"})
            return
        if self._store is None:
            channel.send({})
            channel.send(file.run())
        else:  # a store has no memory for a save and an update at the same time
            written = file.run()
            channel.send({})
            channel.send(written)

    def _push(self, channel: Channel, worker: int) -> None:
        allocate = functools.partial(self._allocate, worker)
        while True:
            message = channel.receive(allocate=allocate)
            if self._failure is not None and not self._may_be_kept:
                continue  # the next request tells the worker; if only workers are gone, steps that were committed are still made
            kind = message["tell"]
            if kind == "gradient":
                self._arrive(worker, self._units[message["unit"]], message)
            elif kind == "begin":
                self._updates.begin(message)
            elif kind == "groups":
                self._updates.add_groups(worker, message)
            elif kind == "done":
                with self._changed:
                    self._done[worker] = message["window"]
                    self._changed.notify_all()
            else:
                self._updates.commit(worker, message)

    def _allocate(self, worker: int, message: Any, num_bytes: int) -> Tensor | None:
        if self._store is None or self._failure:
            return None
        layout = self._units[message["unit"]].layout
        if not layout.is_trained:
            self._fail_with(
                UnsupportedModuleError(
                    f"{layout.names[0]} is trained from now on, but was frozen when its place on disk was taken, without room for states: "
                    f'let it be trained in the first batch, or use optimizer_states="memory"'
                )
            )
            return None
        try:
            return self._store.take_gradient(worker, num_bytes)
        except ConnectionLostError:  # the service has failed meanwhile; the next request tells the worker why
            return None

    def _arrive(self, worker: int, unit: Unit, message: dict[str, Any]) -> None:
        window, is_last = message["window"], message["is_last"]
        if unit.arrive(worker, window, message.get("touched", ()), message.get("values"), is_last=is_last):
            self._updates.complete(unit, window)
        if self._store is not None:
            self._store.arrived(worker, unit)

    # failures

    def fail(self, kind: str, text: str, *, keeps: bool = False) -> None:
        """End the service; workers are told the first failure only.

        Args:
            kind: "lost", or the name of an exception type; see link.py.
            keeps: whether the units are intact, and may be kept.
        """
        with self._changed:
            is_first = self._failure is None
            self._may_be_kept = keeps and (is_first or self._may_be_kept)
            if self._failure is None:
                self._failure = kind, f"{self.name}: {text}"
            self._changed.notify_all()
        if self._store is not None:
            if self._may_be_kept:
                self._store.stop_gradients()
            else:
                self._store.stop()
        if is_first:
            with contextlib.suppress(OSError):  # the disk of its log may be full; the workers are told in any case
                print(f"{self.name} ends, since {text}", flush=True)

    def _fail_with(self, error: Exception) -> None:
        self.fail(
            "lost" if isinstance(error, ConnectionLostError) else type(error).__name__,
            str(error) if isinstance(error, HolmesError) else f"{type(error).__name__}: {error}",
        )

    def _wait(self, until: Callable[[], bool]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or until())
            return self._failure is None

    def _committed(self, window: int) -> None:
        if self._store is not None:
            self._store.commit(window)
        self._tell_progress()
        self._last_window = window
        self._tell_waiting()
        if self._store is None:
            return
        self._ends.append(time.perf_counter())
        if len(self._ends) == _TOLD_AFTER:
            print(
                f"{self.name}: {self._store.compare((self._ends[-1] - self._ends[0]) / (_TOLD_AFTER - 1))}", flush=True
            )

    def _tell_waiting(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # requests

    def _fetch(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        unit, version = self._units[message["unit"]], message["version"]
        if not self._wait(lambda: unit.version >= version):
            return {}
        if message["whole"] and any(other.version > version for other in self._units.values()):
            self.fail("lost", "the run ended while a step was half done: the run can go on from its last checkpoint")
            return {}
        return {"values": held.enter_context(unit.values())}

    def _keep(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        self._units[message["unit"]].keep(message["values"], message["version"])
        self._tell_waiting()
        return {}

    def _norm(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        window, names = message["window"], set(message["names"])
        if not self._wait(lambda: min(self._done) >= window):
            return {}
        found = [unit.norm_squared(window, names, message["edits"]) for unit in self._units.values()]
        return {"squared": sum(found)}

    def _finite(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        window = message["window"]
        if not self._wait(lambda: min(self._done) >= window):
            return {}
        return {"finite": all(unit.is_finite(window) for unit in self._units.values())}

    def _states(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        unit, version = self._units[message["unit"]], message["version"]
        if not self._wait(lambda: unit.version >= version):
            return {}
        return {"states": held.enter_context(unit.states(set(message["names"])))}

    def _keys(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        unit, version = self._units[message["unit"]], message["version"]
        if not self._wait(lambda: unit.version >= version):
            return {}
        return {"keys": unit.state_keys(set(message["names"]))}

    def _load(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        self._units[message["unit"]].load(message["states"])
        return {}

    def _settle(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        self._wait(lambda: self._last_window >= message["window"])
        return {}

    def _groups(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        self._wait(lambda: all(len(unit.told["groups"]) >= message["count"] for unit in self._units.values()))
        return {}

    def _sees(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        return {"sees": can_write_beside(message["folder"], message["name"])}

    def _rest(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        self._resting.add(worker)
        if self._store is not None and len(self._resting) == self.num_workers:
            self._store.rest_from_now_on()
        return {}

    def _try(self, worker: int, message: dict[str, Any], held: ExitStack) -> dict[str, Any]:
        return {"values": torch.zeros(message["num_bytes"], dtype=torch.uint8)}
