"""The queues of collectives: order, failures, and their calls of CUDA, with a recorder in place of a device."""

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_holmes.comm.collectives import Named
from lightning_holmes.comm.queue import CommQueue, StreamQueue, ThreadQueue


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


@dataclass(eq=False)
class Stream:
    """A recorder in place of a CUDA stream."""

    device: Any
    waits: list[Any] = field(default_factory=list)

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        self.waits.append(event)

    def wait_stream(self, stream: "Stream") -> None:
        self.waits.append(stream)


@pytest.mark.parametrize("kind", [StreamQueue, ThreadQueue])
def test_the_stream_that_computes_waits_although_another_one_reads_first(
    kind: type[StreamQueue | ThreadQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first read of an arriving parameter waits; if a side stream reads it, the reads of the main stream that follow do not."""
    device = torch.device("cuda", 0)
    main, side = Stream(device), Stream(device)
    now = [main]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    queue: CommQueue = kind(device)
    work = queue.start(lambda: None)
    now[0] = side
    work.wait()
    queue.close()
    assert main.waits == side.waits and len(main.waits) == 1


@pytest.mark.parametrize("half", ["sum", "scatter", "gather"])
def test_a_collective_keeps_the_memory_that_its_stream_uses(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else memory that an exception lets go of before the wait would be given to others while the stream still writes to it."""
    used: list[Stream] = []
    mine = Stream(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mine)
    bucket: Any = SimpleNamespace(is_cuda=True, device=mine.device, record_stream=used.append)
    done: list[str] = []
    collective: Any = SimpleNamespace(**{half: lambda tensor: done.append(half)})
    groups: Any = SimpleNamespace(naming=lambda group: contextlib.nullcontext())
    getattr(Named(collective, groups, groups), half)(bucket)
    assert used == [mine] and done == [half]
