"""The state that an optimizer node keeps when its workers are lost, step by step: one worker, and a node in this
process."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_holmes.errors import CheckpointDamagedError, HolmesError
from lightning_holmes.optim.node import service
from lightning_holmes.optim.node.description import UnitLayout, describe_optimizer
from lightning_holmes.optim.node.link import NodeLink
from lightning_holmes.optim.node.node_options import NodeOptions
from lightning_holmes.optim.node.server import NodeServer

SECRET = "of this test"
NUMEL = 6
LAYOUT = UnitLayout(
    names=("weight",),
    shapes=((2, 3),),
    starts=(0,),
    numel=NUMEL,
    dtype=torch.float32,
    sent_dtype=torch.float32,
    gradient_dtype=torch.float32,
    is_trained=True,
)


class Node:
    """A node with two units, and the workers' messages to it."""

    def __init__(self, states: str) -> None:
        options = NodeOptions.given(None, "4G" if states != "memory" else None)
        self.server = NodeServer("127.0.0.1", SECRET, number=0, may_import=True, options=options)
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2, 3))], lr=0.1)
        self.told: dict[str, Any] = {
            "place": "pipeline rank 0",
            "module": "Net",
            "num_workers": 1,
            "units": {index: LAYOUT.to_plain() for index in range(2)},
            "optimizer": describe_optimizer(optimizer, [["weight"]], {}) | {"state_bytes": 8.0},
            "states": states,
            "num_places": 1,
            "run": "a run",
            "adopt": 0,
        }
        self._sessions = 0
        self._links: list[NodeLink] = []

    def connect(self, **told: Any) -> NodeLink:
        self._sessions += 1
        session = str(self._sessions)
        link = NodeLink(
            self.server.address, SECRET, session=session, worker=0, told=self.told | told, number=0, timeout_s=30.0
        )
        self._links.append(link)
        return link

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.server.drain()
        self.server.let_go()

    def lose(self, link: NodeLink) -> None:
        """Disconnect the worker and wait until the node has handled this."""
        link.close()
        with self.server._lock:
            assert self.server._lock.wait_for(lambda: not self.server._services, 30.0)


@pytest.fixture(params=["memory", "disk"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = Node("memory" if request.param == "memory" else str(tmp_path))
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


def give(link: NodeLink) -> None:
    for unit in range(2):
        link.ask({"ask": "keep", "unit": unit, "values": torch.full((NUMEL,), float(unit)), "version": 1})


def push(link: NodeLink, window: int, *, version: int, units: tuple[int, ...] = (0, 1), is_last: bool = False) -> None:
    """Push gradients of the values that came before, as in a step."""
    before = values(link, version)
    for unit in units:
        about = {"window": window, "touched": ["weight"], "is_last": is_last}
        link.tell({"tell": "gradient", "unit": unit, "values": before[unit] + 0.5 * version} | about)


def step(link: NodeLink, node: Node, window: int, *, version: int) -> None:
    push(link, window, version=version)
    link.tell({"tell": "done", "window": window})
    link.tell({"tell": "commit", "window": window, "edits": [], "options": node.told["optimizer"]["groups"]})


def values(link: NodeLink, version: int) -> list[Tensor]:
    found = [torch.empty(NUMEL), torch.empty(NUMEL)]
    for unit, into in enumerate(found):
        link.ask({"ask": "fetch", "unit": unit, "version": version, "whole": False}, into=[into])
    return found


def test_it_goes_on_bit_for_bit_after_the_last_commit(node: Node) -> None:
    whole = node.connect(run="")
    give(whole)
    for window in range(1, 5):
        step(whole, node, window, version=window)
    expected = values(whole, 5)
    node.lose(whole)
    assert not node.server.kept, "without snapshots nobody goes on from it"

    first = node.connect()
    give(first)
    step(first, node, 1, version=1)
    push(first, 2, version=2, units=(1,))  # of a step that is never completed
    node.lose(first)
    assert [kept.commit for kept in node.server.kept.values()] == [("a run", 2)]
    second = node.connect(adopt=2)
    assert not node.server.kept
    step(second, node, 1, version=2)  # workers count windows from the start again
    step(second, node, 2, version=3)  # and are lost before the node has made the step
    node.lose(second)
    third = node.connect(adopt=4)
    step(third, node, 1, version=4)
    assert all(one.equal(other) for one, other in zip(values(third, 5), expected, strict=True))
    third.ask({"ask": "rest"})
    node.lose(third)
    assert not node.server.kept


def test_layers_of_two_steps_are_not_kept(node: Node) -> None:
    link = node.connect()
    give(link)
    step(link, node, 1, version=1)
    link.tell({"tell": "begin", "window": 2, "options": node.told["optimizer"]["groups"]})
    push(link, 2, version=2, units=(1,), is_last=True)
    link.ask({"ask": "fetch", "unit": 1, "version": 3, "whole": False}, into=[torch.empty(NUMEL)])
    node.lose(link)
    assert not node.server.kept


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"adopt": 7}, "other commit than"),
        ({"run": "another"}, "other commit than"),
        ({"module": "Other"}, "other module than"),
        ({"units": {0: LAYOUT.to_plain()}}, "other units than"),
    ],
)
def test_workers_that_go_on_from_something_else_are_refused(node: Node, different: Any, words: str) -> None:
    link = node.connect()
    give(link)
    node.lose(link)
    with pytest.raises(CheckpointDamagedError, match=words):
        node.connect(**{"adopt": 1} | different)
    with pytest.raises(CheckpointDamagedError, match="nothing is kept for pipeline rank 1"):
        node.connect(adopt=1, place="pipeline rank 1")


def test_what_was_never_given_values_is_not_kept(node: Node) -> None:
    link = node.connect()
    node.lose(link)
    assert not node.server.kept


def test_workers_that_begin_with_other_values_have_nothing_kept(node: Node) -> None:
    link = node.connect()
    give(link)
    node.lose(link)
    assert node.server.kept
    other = node.connect()
    assert not node.server.kept
    give(other)
    assert values(other, 1)[1].eq(1.0).all()
    other.ask({"ask": "rest"})
    node.lose(other)


def test_what_has_failed_on_the_node_is_not_kept(node: Node) -> None:
    link = node.connect()
    give(link)
    step(link, node, 1, version=1)
    step(link, node, 1, version=2)  # the gradients of one batch, twice
    with pytest.raises(HolmesError, match="steps twice"):
        values(link, 9)
    node.lose(link)
    assert not node.server.kept


def test_it_tells_how_it_gets_on(
    node: Node, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_TOLD_EVERY_S", 0.0)
    link = node.connect()
    give(link)
    for window in (1, 2):
        step(link, node, window, version=window)
    link.ask({"ask": "settle", "window": 2})
    link.ask({"ask": "rest"})
    node.lose(link)
    said = capsys.readouterr().out
    disk = "" if node.told["states"] == "memory" else r", disk \S+ MB/s each way"
    lines = rf"step 2, \S+ s each; updates at \S+ M parameters/s, \d+% of the time, 0 waiting; network \S+ MB/s in, \S+ out{disk}; \d+ MB of memory"
    assert re.search(lines, said) and "2 updates at" in said, said
