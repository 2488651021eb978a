"""A session of an optimizer node and its workers, as threads of one process: workers fetch, send gradients and commit.

driver = Driver(told_of("adamw", num_layers=8, shape=(64, 96), states="memory"), num_workers=2, memory=None)
driver.run(num_windows=3, is_eager=True)
values, states = driver.read(0, version=4)              # of a unit
driver.close()
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from lightning_holmes.optim.elementwise import find_separability as separability_of
from lightning_holmes.optim.node.description import describe_optimizer
from lightning_holmes.optim.node.link import FETCHED, Action, Link
from lightning_holmes.optim.node.node_options import NodeOptions
from lightning_holmes.optim.node.session import Session
from lightning_holmes.optim.unit import Unit

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}


NEEDED = {"values": 3, "gradient": 2, "states": 1}
"""The sections for which there must be memory at the same time; see Disk."""


def told_of(
    optimizer: str, *, num_layers: int, shape: tuple[int, int], states: str, sent_dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return the message in which workers describe themselves: layers of a matrix and a bias; without the biases for
    Muon, which does not train them."""
    names = [f"{kind}{i}" for i in range(num_layers) for kind in ("weight", "bias")]
    names = [name for name in names if optimizer != "muon" or "weight" in name]
    blank = {name: nn.Parameter(torch.zeros(shape if "weight" in name else shape[0])) for name in names}
    twin = OPTIMIZERS[optimizer](list(blank.values()))
    size = shape[0] * shape[1]
    units = {
        i: {
            "names": (f"weight{i}", f"bias{i}"),
            "shapes": (torch.Size(shape), torch.Size((shape[0],))),
            "starts": (0, size),
            "numel": size + shape[0],
            "dtype": sent_dtype,
            "has_masters": sent_dtype != torch.float32,
        }
        for i in range(num_layers)
    }
    return {
        "units": units,
        "optimizer": describe_optimizer(twin, [names], {})
        | {"state_bytes": separability_of(twin, torch.device("cpu")).state_bytes},
        "states": states,
        "num_places": 1,
    }


class Driver:
    """Drives a session, whose units get random values.

    Args:
        memory: bytes that the node may use beyond the process's present memory; None: no limit.
        room: bytes for sections on a disk beyond the least that works; None: as the limit gives.
        shares: for each worker, what it sends of each unit; see Session.
    """

    def __init__(
        self,
        told: dict[str, Any],
        *,
        num_workers: int = 1,
        memory: int | None = None,
        room: int | None = None,
        shares: list[tuple[int, int]] | None = None,
    ) -> None:
        limit = None if memory is None else psutil.Process().memory_info().rss + memory
        self.units = {i: Unit(**unit, device=torch.device("cpu")) for i, unit in told["units"].items()}
        self._told, self._options = told, told["optimizer"]["groups"]
        self._shares = shares or [(0, 1)] * num_workers
        self._store = HashStore()
        self.error: BaseException | None = None
        about = {"name": "fit", "place": "pipeline rank 0", "addresses": ["127.0.0.1"] * num_workers}

        def serve() -> None:
            try:
                self.session = Session(
                    about, self._store, number=0, may_import=False, options=NodeOptions(memory_bytes=limit)
                )
                self.session.run()
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        with ThreadPoolExecutor(num_workers) as pool:
            self.links = list(pool.map(self._connect, range(num_workers)))
        told = threading.Thread(target=lambda: [link.hear() for link in self.links], daemon=True)
        told.start()
        while told.is_alive():
            told.join(0.01)
            if self.error is not None:
                raise self.error
        if room is not None:
            storage: Any = self.session._storage
            sizes = {s: max(unit[s] for unit in storage._needs.values()) for s in NEEDED}
            storage._limit = sum(times * sizes[section] for section, times in NEEDED.items()) + room
        random = torch.Generator().manual_seed(1)
        for i, unit in self.units.items():
            values = torch.randn(unit.numel, generator=random).to(unit.dtype)
            for transfer in (self.first.order(Action.KEEP, unit=i, number=1), self.first.send(values)):
                transfer.wait()

    @property
    def first(self) -> Link:
        return self.links[0]

    def _connect(self, worker: int) -> Link:
        link = Link(
            PrefixStore(f"fit/{worker}", self._store),
            "127.0.0.1",
            is_node=False,
            peer="the node",
            timeout=timedelta(seconds=60),
            explain=lambda said: self.error or RuntimeError(said),
        )
        link.answer({**self._told, "share": self._shares[worker]})
        return link

    def ask(self, action: Action, **arguments: Any) -> Any:
        """Let the node perform an action between steps; returns its answer to the first worker."""
        order = self.first.order(action, **arguments)
        answer = self.first.hear().message
        for link in self.links[1:] if action != Action.STATES else ():
            link.hear()
        order.wait()
        return answer

    def run(self, *, num_windows: int, gradient: Tensor | None = None, **kinds: Any) -> None:
        """Run all workers to the end."""
        with ThreadPoolExecutor(len(self.links)) as pool:
            for work in [
                pool.submit(self._work, worker, num_windows, gradient, **kinds) for worker in range(len(self.links))
            ]:
                work.result(300)

    def fetch(self, worker: int, unit: int, version: int) -> Tensor:
        """Fetch a worker's share of a unit."""
        layout, link, (_, size) = self.units[unit], self.links[worker], self._shares[worker]
        values = torch.empty(layout.numel // size, dtype=layout.dtype)
        order = link.order(Action.FETCH, unit=unit, number=version) if worker == 0 else None
        link.receive(values, FETCHED + unit).wait()
        if order is not None:
            order.wait()
        return values

    def push(
        self, worker: int, unit: int, window: int, values: Tensor, *, last: bool, touched: list[bool] | None = None
    ) -> None:
        """Send a worker's gradient of a unit."""
        link = self.links[worker]
        flags = torch.tensor(touched or [True] * len(self.units[unit].names), dtype=torch.uint8)
        under_way = [link.order(Action.GRADIENT, unit=unit, number=window, flag=last)] if worker == 0 else []
        under_way.append(link.send(flags))
        place, size = self._shares[worker]
        if size > 1 or flags.any():
            under_way.append(link.send(values.view(size, -1)[place]))
        for transfer in under_way:
            transfer.wait()

    def commit(self, worker: int, window: int, edits: Any = (), options: Any = None) -> None:
        """Commit a step."""
        message = {"edits": list(edits), "options": self._options if options is None else options}
        self.links[worker].order(Action.COMMIT, number=window, message=message).wait()

    def read(self, unit: int, version: int) -> tuple[Tensor, dict[tuple[str, str], Tensor]]:
        """Return a unit's values and states."""
        layout = self.units[unit]
        values = torch.empty(layout.numel, dtype=layout.dtype)
        self.ask(Action.SETTLE)
        order = self.first.order(Action.VALUES, unit=unit, number=version, message=[0])
        self.first.receive(values).wait()
        order.wait()
        told = self.ask(Action.STATES, unit=unit, message={0: list(layout.names)})
        states = {(n, key): torch.as_tensor(value) for n, state in told.items() for key, value in state.items()}
        return values, states

    def _work(
        self,
        worker: int,
        num_windows: int,
        gradient: Tensor | None,
        *,
        is_eager: bool = False,
        num_batches: int = 1,
        clips: bool = False,
        fetches: bool = True,
        first: int = 1,
    ) -> None:
        link, random = self.links[worker], torch.Generator().manual_seed(10 + worker)
        names = [name for unit in self.units.values() for name in unit.names]
        for window in range(first, first + num_windows):
            for batch in range(num_batches):
                last = is_eager and batch == num_batches - 1
                if last:
                    link.order(Action.BEGIN, number=window, message={"options": self._options}).wait()
                for i in [*self.units, *reversed(self.units)] if fetches else ():
                    self.fetch(worker, i, window)
                for i, unit in reversed(self.units.items()):
                    values = torch.randn(unit.numel, generator=random) if gradient is None else gradient
                    self.push(worker, i, window, values, last=last)
            edits = []
            if clips:
                message = {"names": names, "edits": []}
                order = link.order(Action.NORM, number=window, message=message) if worker == 0 else None
                edits = [("scale", 1.0 / link.hear().message ** 0.5)]
                if order is not None:
                    order.wait()
            self.commit(worker, window, edits)

    def close(self) -> None:
        """End the session well."""
        for link in self.links:
            link.order(Action.SETTLE, flag=True).wait()
        for link in self.links:
            link.hear()
        for link in self.links:
            link._group = None
        self._thread.join(30)
        assert not self._thread.is_alive() and self.error is None, self.error
