"""Session: the optimizer node's side of a fit: performs, with the workers that hold the same stages, the actions that they name.

Two threads send parameters, one receives gradients and performs the other actions, one updates. A unit is updated as soon as its last
gradients have come if the workers have said the options at the batch's beginning (eager), or else at the commit, in the order of the
next forward. Gradients are summed in the order of the workers, whichever comes first, so that runs can be repeated bit for bit.

    session = Session(told, store, number=0, may_import=True, options=NodeOptions())
    session.run()                                       # until the workers are gone; raises why it cannot go on
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from lightning_holmes.errors import ConfigurationError, ConnectionLostError, HolmesError, UnsupportedModuleError
from lightning_holmes.optim.node.description import find_class
from lightning_holmes.optim.node.link import DATA, FETCHED, FETCHES, Action, Link, Order, Transfer
from lightning_holmes.optim.node.node_options import NodeOptions, held_dtype, make_storage
from lightning_holmes.optim.node.unit import HeldUnit
from lightning_holmes.optim.unit import Unit

_TOLD_EVERY_S = 60.0
_IN_FLIGHT = 2  # units that are sent at the same time
_DURING_STEPS = (Action.GRADIENT, Action.BEGIN, Action.COMMIT)


class Session:
    """Serves the workers that hold the same stages, in one fit.

    Args:
        told: what worker 0 wrote into the store: the session's name, this node's address for each worker, and in words whose stages it holds.
        store: the workers and this node meet in it.
        number: this node's number.
        may_import: whether to import the module of an optimizer's class if it is not imported yet.

    Raises:
        ConfigurationError: it cannot serve these workers.
    """

    def __init__(
        self, told: Mapping[str, Any], store: Any, *, number: int, may_import: bool, options: NodeOptions
    ) -> None:
        self.name = f"optimizer node {number}, {told['place']}"
        self.rests = False
        """Whether the run has ended well: from now on the workers may leave."""
        self._links = [
            Link(
                PrefixStore(f"{told['name']}/{worker}", store),
                address,
                is_node=True,
                peer=f"worker {worker}",
                timeout=None,
                explain=functools.partial(_gone, worker),
            )
            for worker, address in enumerate(told["addresses"])
        ]
        given = [link.hear().message for link in self._links]
        about = given[0]
        for worker, other in enumerate(given[1:], start=1):
            different = next((k for k in other if k != "share" and repr(other[k]) != repr(about.get(k))), "")
            if different:
                raise ConfigurationError(
                    f"workers 0 and {worker} do not agree on {different}: start all with the same script, versions and options"
                )
        layouts = {index: Unit(**unit, device=torch.device("cpu")) for index, unit in about["units"].items()}
        kind = find_class(about["optimizer"], may_import=may_import)
        # the part of each unit that a worker sends and gets: part ``place`` of ``size``
        self._shares: list[tuple[int, int]] = [tuple(other["share"]) for other in given]
        self._storage = make_storage(layouts, about, num_workers=len(given), options=options, name=self.name)
        self._storage.fail = self._fail
        self.units = {i: HeldUnit(i, layout, kind, about["optimizer"], self._storage) for i, layout in layouts.items()}
        self._changed, self._hearing = threading.Condition(), threading.Lock()
        self._failure: BaseException | None = None
        self._sending: dict[int, int] = dict.fromkeys(self.units, 0)
        self._updates = ThreadPoolExecutor(1, thread_name_prefix="holmes-node-update")
        self._last_update: Future[None] | None = None
        self._begun: tuple[int, Any] = 0, None
        self._last_window = self._num_steps = 0
        self._told_at, self._told_steps = time.perf_counter(), 0
        where = self._storage.describe()
        num_bytes = sum(unit.numel * held_dtype(unit).itemsize for unit in layouts.values())
        print(
            f"{self.name}: {sum(u.numel for u in layouts.values()):,} parameters ({num_bytes / 1e6:.1f} MB) in {len(layouts)} units, "
            f"{kind.__name__}, for {len(given)} worker{'s' * (len(given) > 1)}{where and f'{chr(10)}{self.name}: {where}'}",
            flush=True,
        )

    def run(self) -> None:
        """Serve until the run has ended well and the workers are gone. Raises what ends it before."""
        self._answer("ready")
        for serve in (*[self._pull] * _IN_FLIGHT, self._push):
            name = f"holmes-node{serve.__name__}"
            threading.Thread(target=self._guarded, args=(serve,), name=name, daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None)
        self._updates.shutdown(wait=False, cancel_futures=True)
        self._storage.close()
        if not (self.rests and isinstance(self._failure, ConnectionLostError)):
            assert self._failure is not None
            raise self._failure

    def _guarded(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or until())
            if self._failure is not None:
                raise self._failure

    def _note(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _share(self, worker: int, flat: Tensor) -> Tensor:
        place, size = self._shares[worker]
        return flat.view(size, -1)[place]

    # parameters

    def _pull(self) -> None:
        """Send parameters, one unit after the other."""
        while True:
            with self._hearing:
                order = self._links[0].hear(FETCHES)
            unit = self.units[order.unit]
            with self._changed:
                self._wait(functools.partial(_has, unit, order.number))
                self._sending[order.unit] += 1
            with unit.values() as flat:
                self._send_all({w: self._share(w, flat) for w in range(len(self._links))}, FETCHED + order.unit)
            with self._changed:
                self._sending[order.unit] -= 1
                self._changed.notify_all()

    def _send_all(self, tensors: Mapping[int, Tensor], tag: int = DATA) -> None:
        for transfer in [self._links[worker].send(tensor, tag) for worker, tensor in tensors.items()]:
            transfer.wait()

    def _wait_until_sent(self, index: int) -> None:
        """Wait until no worker receives the unit's values, before they change."""
        self._wait(lambda: not self._sending[index])

    # gradients and other actions: each action has a method of its name

    def _push(self) -> None:
        while True:
            order = self._links[0].hear()
            if order.action not in _DURING_STEPS:
                self._wait(self._is_settled)
            getattr(self, f"_{order.action.name.lower()}")(order)
            self._note()

    def _gradient(self, order: Order) -> None:
        unit, window = self.units[order.unit], order.number
        names = unit.layout.names
        if not unit.layout.is_trained and self._storage.on_disk:
            raise UnsupportedModuleError(
                f"{names[0]} is trained from now on, but was frozen when its place on disk was taken, without room for states: "
                f'let it be trained in the first batch, or use optimizer_states="memory"'
            )
        flags = [torch.empty(len(names), dtype=torch.uint8) for _ in self._links]
        for transfer in [link.receive(f) for link, f in zip(self._links, flags, strict=True)]:
            transfer.wait()
        reached = [name for place, name in enumerate(names) if any(f[place] for f in flags)]
        senders = [w for w, f in enumerate(flags) if self._shares[w][1] > 1 or f.any()]
        self._wait(lambda: unit.updated_window == unit.ordered_window)
        if senders:
            with unit.summing(window, reached) as (flat, is_new):
                self._sum(flat, senders, is_new=is_new)
        if order.flag:
            begun, options = self._begun
            assert begun == window
            self._order_update(unit, window, (), options)

    def _sum(self, flat: Tensor, senders: Sequence[int], *, is_new: bool) -> None:
        """Receive the gradients of ``senders`` and add them, in this order. The first of a new sum go where the sum is."""
        waiting: deque[tuple[Transfer, Tensor, Tensor]] = deque()
        num_scratch = 2 if self._storage.on_disk else len(senders)
        lacks = {self._shares[worker] for worker in senders} if is_new else set()
        for worker in senders:
            target = self._share(worker, flat)
            into = target if self._shares[worker] in lacks else torch.empty_like(target)
            lacks.discard(self._shares[worker])
            waiting.append((self._links[worker].receive(into), target, into))
            while len(waiting) > num_scratch:
                _add(*waiting.popleft())
        while waiting:
            _add(*waiting.popleft())

    def _told_alike(self, order: Order) -> Any:
        """Return the message of an order that every worker sends; refuse it if they differ."""
        for worker, link in enumerate(self._links[1:], start=1):
            other = link.hear()
            if repr((other.action, other.number, other.message)) != repr((order.action, order.number, order.message)):
                raise ConnectionLostError(
                    f"workers 0 and {worker} differ at {order.action.name.lower()} {order.number} and {other.action.name.lower()} {other.number}: "
                    f"{order.message} and {other.message}; set the optimizer's options, and clip or scale gradients, alike on all ranks"
                )
        return order.message

    def _begin(self, order: Order) -> None:
        self._begun = order.number, self._told_alike(order)["options"]
        for unit in list(self.units.values())[-1:]:
            unit.prefetch()

    def _commit(self, order: Order) -> None:
        message, window = self._told_alike(order), order.number
        if window == self._last_window:
            raise HolmesError(
                "the optimizer steps twice with the gradients of one batch, which optimizer nodes let go of after the first step; "
                "step once a batch, or use optimizer_nodes=0"
            )
        self._last_window = window
        begun, options = self._begun
        if begun == window and repr(options) != repr(message["options"]):
            self._wait(self._is_settled)  # whose errors may be more specific
            raise HolmesError(
                f"the optimizer's options were {options} when a batch began, and {message['options']} at its step, while optimizer "
                f"nodes had updated layers already: change options in on_train_batch_start or before, or override "
                f"on_before_optimizer_step, after which nodes wait for the step"
            )
        for unit in self.units.values():
            if unit.ordered_window != window:
                self._order_update(unit, window, message["edits"], message["options"])
        self._queue(self._end_step)

    # updates

    def _order_update(self, unit: HeldUnit, window: int, edits: Any, options: Any) -> None:
        unit.ordered_window = window
        self._queue(lambda: self._step(unit, window, edits, options))

    def _queue(self, act: Callable[[], None]) -> None:
        self._last_update = self._updates.submit(self._guarded, act)
        self._last_update.add_done_callback(lambda _: self._note())

    def _is_settled(self) -> bool:
        return self._last_update is None or self._last_update.done()

    def _step(self, unit: HeldUnit, window: int, edits: Any, options: Any) -> None:
        order = list(self.units)
        place = order.index(unit.index) + (-1 if self._begun[0] == window else 1)
        if 0 <= place < len(order):
            self.units[order[place]].prefetch()
        self._wait_until_sent(unit.index)
        unit.update(window, edits, options)
        self._note()

    def _end_step(self) -> None:
        self._num_steps += 1
        steps, passed = self._num_steps - self._told_steps, time.perf_counter() - self._told_at
        if passed > _TOLD_EVERY_S:
            self._told_at, self._told_steps = time.perf_counter(), self._num_steps
            memory = f"{psutil.Process().memory_info().rss / 1e6:.0f} MB of memory"
            print(f"{self.name}: step {self._num_steps}, {passed / steps:.3g} s each, {memory}", flush=True)

    # what is asked between steps

    def _answer(self, message: Any) -> None:
        for link in self._links:
            link.answer(message)

    def _norm(self, order: Order) -> None:
        names = set(order.message["names"])
        found = (unit.norm_squared(order.number, names, order.message["edits"]) for unit in self.units.values())
        self._answer(sum(found))

    def _finite(self, order: Order) -> None:
        self._answer(all(unit.is_finite(order.number) for unit in self.units.values()))

    def _load(self, order: Order) -> None:
        self.units[order.unit].load(order.message)

    def _keep(self, order: Order) -> None:
        self._wait_until_sent(order.unit)
        with self.units[order.unit].keeping(order.number) as flat:
            self._links[0].receive(flat).wait()

    def _values(self, order: Order) -> None:
        if any(unit.version > order.number for unit in self.units.values()):
            raise ConnectionLostError("the run ended while a step was half done: it can go on from its last checkpoint")
        with self.units[order.unit].values() as flat:
            self._send_all(dict.fromkeys(order.message, flat))

    def _states(self, order: Order) -> None:
        with self.units[order.unit].states() as found:
            for worker, names in order.message.items():
                self._links[worker].answer({name: dict(found[name]) for name in names if name in found})

    def _settle(self, order: Order) -> None:
        if order.flag:
            self._told_alike(order)
            self.rests = True
            self._storage.rest()
        self._answer(None)


def _has(unit: HeldUnit, version: int) -> bool:
    return unit.version >= version


def _gone(worker: int, said: str) -> Exception:
    return ConnectionLostError(f"worker {worker} is gone ({said})")


def _add(transfer: Transfer, target: Tensor, memory: Tensor) -> None:
    transfer.wait()
    if memory is not target:
        target.add_(memory)
