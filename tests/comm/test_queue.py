"""ThreadQueue: order, failures, and its calls of CUDA, with a recorder in place of a device."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def test_on_cuda_a_function_runs_between_what_came_before_and_what_comes_after_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    class Event:
        def __init__(self, name: str = "", **_: Any) -> None:
            self.name = name

        def record(self, stream: Any) -> None:
            self.name = f"event {len(said)}"
            said.append(f"{stream.name} records {self.name}")

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, device: Any = None, name: str = "side") -> None:
            self.name = name

        def record_event(self) -> Event:
            event = Event()
            event.record(self)
            return event

        def wait_event(self, event: Event) -> None:
            said.append(f"{self.name} waits for {event.name}")

    @contextmanager
    def inside(stream: Stream) -> Any:
        said.append(f"in {stream.name}")
        yield
        said.append(f"out of {stream.name}")

    main = Stream(name="main")
    fake = SimpleNamespace(Stream=Stream, Event=Event, stream=inside, current_stream=lambda device: main)
    monkeypatch.setattr(torch, "cuda", fake)
    queue, told = ThreadQueue(torch.device("cuda", 0)), []
    queue.on_run = lambda kind, began, ended: told.append((kind, began.name, ended.name))
    work = queue.start(lambda: said.append("copies"), "bucket_gather")
    work.wait()
    queue.close()
    assert said == [
        "main records event 0",
        "in side",
        "side waits for event 0",
        "side records event 3",
        "copies",
        "side records event 5",
        "out of side",
        "main waits for event 5",
    ]
    assert told == [("bucket_gather", "event 3", "event 5")]
