"""Workers of an optimizer node's service, as threads of one process and without connections: they fetch, push
gradients and commit.

driver = Driver(told_of("adamw", num_layers=8, shape=(64, 96), num_workers=2, states="memory"), memory=None)
found = driver.run(num_windows=3, is_eager=True)        # values and states of each unit
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from lightning_holmes.optim.elementwise import test_separability as separability_of
from lightning_holmes.optim.node.description import UnitLayout, describe_optimizer
from lightning_holmes.optim.node.node_options import NodeOptions
from lightning_holmes.optim.node.service import Service

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}


def told_of(
    optimizer: str,
    *,
    num_layers: int,
    shape: tuple[int, int],
    num_workers: int,
    states: str,
    sent_dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return the message in which workers describe themselves: layers of a matrix and a bias; without the biases for
    Muon, which does not train them."""
    names = [f"{kind}{i}" for i in range(num_layers) for kind in ("weight", "bias")]
    names = [name for name in names if optimizer != "muon" or "weight" in name]
    blank = {name: nn.Parameter(torch.zeros(shape if "weight" in name else shape[0])) for name in names}
    twin = OPTIMIZERS[optimizer](list(blank.values()))
    size = shape[0] * shape[1]
    layouts = [
        UnitLayout(
            names=(f"weight{i}", f"bias{i}"),
            shapes=(shape, (shape[0],)),
            starts=(0, size),
            numel=size + shape[0],
            dtype=torch.float32,
            sent_dtype=sent_dtype,
            gradient_dtype=torch.float32,
            is_trained=True,
        )
        for i in range(num_layers)
    ]
    return {
        "module": "Net",
        "num_workers": num_workers,
        "units": {i: layout.to_plain() for i, layout in enumerate(layouts)},
        "optimizer": describe_optimizer(twin, [names], {})
        | {"state_bytes": separability_of(twin, torch.device("cpu")).state_bytes},
        "states": states,
        "num_places": 1,
    }


class Driver:
    """Drives a service. ``memory``: bytes that the service may use beyond the process's present memory; None: no
    limit."""

    def __init__(self, told: dict[str, Any], *, memory: int | None) -> None:
        limit = None if memory is None else psutil.Process().memory_info().rss + memory
        self.told = told
        self.service = Service(told, name="a node", may_import=False, options=NodeOptions(memory_bytes=limit))
        self.units = {i: UnitLayout.from_plain(unit) for i, unit in told["units"].items()}
        random = torch.Generator().manual_seed(1)
        for i, unit in self.units.items():
            values = torch.randn(unit.numel, generator=random).to(unit.sent_dtype)
            self.ask(0, {"ask": "keep", "unit": i, "values": values, "version": 1})

    def ask(
        self, worker: int, message: dict[str, Any], read: Callable[[dict[str, Any]], Any] = lambda answer: None
    ) -> Any:
        """Send a request and return ``read(answer)``."""
        with ExitStack() as held:
            answer = self.service._answers[message["ask"]](worker, message, held)
            assert self.service._failure is None, self.service._failure
            return read(answer)

    def run(self, *, num_windows: int, gradient: Tensor | None = None, **kinds: Any) -> None:
        """Run all workers to the end."""
        errors: list[BaseException] = []

        def work(worker: int) -> None:
            try:
                self._work(worker, num_windows, gradient, **kinds)
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(w,), daemon=True) for w in range(self.told["num_workers"])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors and not any(thread.is_alive() for thread in threads), errors

    def read(self, unit: int, version: int) -> tuple[Tensor, dict[tuple[str, str], Tensor]]:
        """Return a unit's values and states."""
        question = {"unit": unit, "version": version}
        values = self.ask(0, question | {"ask": "fetch", "whole": False}, lambda answer: answer["values"].clone())
        names = list(self.units[unit].names)
        states = self.ask(
            0,
            question | {"ask": "states", "names": names},
            lambda answer: {
                (name, key): torch.as_tensor(value).clone()
                for name, state in answer["states"].items()
                for key, value in state.items()
            },
        )
        keys = self.ask(0, question | {"ask": "keys", "names": names}, lambda answer: answer["keys"])
        assert {(name, key) for name in keys for key in keys[name]} == states.keys()
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
    ) -> None:
        service, random = self.service, torch.Generator().manual_seed(10 + worker)
        options = self.told["optimizer"]["groups"]
        names = [name for unit in self.units.values() for name in unit.names]
        for window in range(1, num_windows + 1):
            for batch in range(num_batches):
                is_last = is_eager and batch == num_batches - 1
                if is_last:
                    service._updates.begin({"tell": "begin", "window": window, "options": options})
                for i in [*self.units, *reversed(self.units)] if fetches else ():
                    self.ask(worker, {"ask": "fetch", "unit": i, "version": window, "whole": False})
                for i, unit in reversed(self.units.items()):
                    self.wait_for(i, window)
                    values = torch.randn(unit.numel, generator=random) if gradient is None else gradient
                    memory = service._allocate(worker, {"unit": i}, values.nbytes)
                    if memory is not None:
                        memory = memory[: values.nbytes].view(values.dtype)
                        values = memory.copy_(values)
                    message = {"window": window, "values": values, "is_last": is_last, "touched": unit.names}
                    service._arrive(worker, service._units[i], message)
            with service._changed:
                service._done[worker] = window
                service._changed.notify_all()
            edits = []
            if clips:
                question = {"ask": "norm", "window": window, "names": names, "edits": []}
                edits = [("scale", 1.0 / self.ask(worker, question, lambda answer: answer["squared"]) ** 0.5)]
            commit = {"tell": "commit", "window": window, "edits": edits, "options": options}
            service._updates.commit(worker, commit)

    def wait_for(self, unit: int, version: int) -> None:
        """Wait until a unit has reached that version."""
        assert self.service._wait(lambda: self.service._units[unit].version >= version), self.service._failure

    def close(self) -> None:
        self.service.close()
