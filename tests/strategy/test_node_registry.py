"""Rank 0 and optimizer nodes, in threads of one process: which nodes are refused, and which wait for a job that is started again."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch import free_port
from torch import nn

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.optim.node import server
from lightning_holmes.optim.node.channel import Channel
from lightning_holmes.optim.node.description import UnitLayout, describe_module, describe_optimizer
from lightning_holmes.optim.node.link import NodeLink
from lightning_holmes.optim.node.node_options import NodeOptions
from lightning_holmes.optim.node.server import SECRET, NodeServer, join
from lightning_holmes.strategy import optimizer_nodes
from lightning_holmes.strategy.optimizer_nodes import _Registry


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], int]]:
    """Return a function that starts a node and returns a function that waits for its exit code."""
    monkeypatch.setenv(SECRET, "known to both")

    def start(port: int, **options: Any) -> Callable[[], int]:
        codes: list[int] = []
        run = lambda: codes.append(  # noqa: E731
            join([("127.0.0.1", port)], -1, may_import=True, options=NodeOptions(), wait_s=20.0, **options)
        )
        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def wait() -> int:
            thread.join(20)
            assert not thread.is_alive()
            return codes[0]

        return wait

    return start


def registry(port: int, count: int = 1) -> _Registry:
    return _Registry("127.0.0.1", "known to both", count, wait_s=20.0, port=port)


def test_a_node_of_other_versions_is_refused_with_the_difference(
    node: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = optimizer_nodes.versions()
    monkeypatch.setattr(optimizer_nodes, "versions", lambda: mine | {"torch": "1.0"})
    port = free_port()
    job, code = registry(port), node(port, again_s=0.0)
    difference = f"has torch {torch.__version__}, here 1.0: install the same versions on all hosts"
    with pytest.raises(ConfigurationError, match=difference.replace("+", r"\+")):
        job.wait()
    assert code() == 1
    assert difference in capsys.readouterr().out, "the node says it, too"


def test_the_number_of_a_node_that_is_lost_before_it_has_told_its_address_is_given_again(node: Any) -> None:
    port = free_port()
    job = registry(port, 2)
    lost = Channel.connect(("127.0.0.1", port), "known to both", {"kind": "node", "number": -1}, peer="rank 0")
    assert lost.receive()["number"] == 0
    lost.close()
    while job._numbers:
        threading.Event().wait(0.01)
    codes = [node(port, again_s=0.0) for _ in range(2)]
    assert len(job.wait()) == 2 and sorted(job._nodes) == [0, 1]
    job.ending = (1, False)
    job.end()
    assert [code() for code in codes] == [1, 1]


@pytest.mark.parametrize(("torchrun", "again_s"), [(True, 0.0), (False, 20.0)])
def test_a_node_waits_for_a_job_that_is_started_again(
    torchrun: bool, again_s: float, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MAX_RESTARTS", "1"), ("RESTART_COUNT", "0")) if torchrun else ():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    made: list[server.NodeServer] = []

    class Noted(server.NodeServer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(server, "NodeServer", Noted)
    port = free_port()
    code = node(port, again_s=again_s)
    first = registry(port)
    told = first.wait()
    first.ending = (1, torchrun)
    first.end()
    again = registry(port)
    told += again.wait()
    assert [entry["address"] for entry in told] == [each.address for each in made], (
        "it serves nobody of the first attempt any more"
    )
    again.end()
    assert code() == 0


@pytest.mark.parametrize(
    ("again_s", "ending", "expected"),
    [(0.0, (1, False), 1), (20.0, (0, False), 0), (None, (1, True), 1)],
    ids=["it has failed", "it has ended well", "rank 0 has started the node itself"],
)
def test_a_node_ends_with_the_jobs_exit_code(again_s: Any, ending: Any, expected: int, node: Any) -> None:
    port = free_port()
    job, code = registry(port), node(port, again_s=again_s)
    job.wait()
    job.ending = ending
    job.end()
    assert code() == expected


class Net(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(size, 2, bias=False)


class Other(Net):
    pass


class Mine(torch.optim.SGD):
    pass


LAYOUT = UnitLayout(
    names=("up.weight",),
    shapes=((2, 4),),
    starts=(0,),
    numel=8,
    dtype=torch.float32,
    sent_dtype=torch.float32,
    gradient_dtype=torch.float32,
    is_trained=True,
)


@pytest.mark.parametrize(
    ("module", "changes", "difference"),
    [
        (Net(), {}, ""),
        (None, {}, ""),
        (Other(), {}, "it is a Other there, and a Net on workers"),
        (Net(5), {}, r"up.weight is of shape \(2, 5\) there, and of shape \(2, 4\) on workers"),
        (nn.Identity(), {}, "it is a Identity there, and a Net on workers"),
        (Net(), {"precision": "bf16-true"}, "its precision is 16-mixed there, and bf16-true on workers"),
        (Net(), {"source": "another"}, r"Mine reads otherwise on the optimizer node, in .*test_node_registry.py"),
    ],
)
def test_a_node_for_another_module_is_refused_with_the_difference(
    module: nn.Module | None, changes: dict[str, str], difference: str
) -> None:
    expected = None if module is None else describe_module(module, is_whole=True, precision="16-mixed")
    server = NodeServer("127.0.0.1", "secret", number=0, may_import=False, options=NodeOptions(), expected=expected)
    twin = Mine(Net().parameters(), lr=0.1)
    source = {key: value for key, value in changes.items() if key == "source"}
    told = {
        "place": "pipeline rank 0",
        "module": "Net",
        "precision": changes.get("precision", "bf16-mixed"),
        "num_workers": 1,
        "units": {0: LAYOUT.to_plain()},
        "optimizer": describe_optimizer(twin, [["up.weight"]], {}) | {"state_bytes": 0.0, **source},
        "states": "memory",
        "num_places": 1,
        "run": "",
        "adopt": 0,
    }

    def connect() -> NodeLink:
        return NodeLink(server.address, "secret", session="1/0", worker=0, told=told, number=0, timeout_s=20.0)

    if difference:
        with pytest.raises(ConfigurationError, match=difference):
            connect()
    else:
        link = connect()
        link.ask({"ask": "rest"})
        link.close()
    server.drain()


def test_a_module_that_hooks_complete_is_compared_by_its_class() -> None:
    assert describe_module(Net(), is_whole=False) == {"class": "Net", "shapes": None, "precision": None}
