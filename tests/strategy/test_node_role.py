"""Rank 0 and optimizer nodes, in threads of one process: how they meet, and which nodes are refused."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import free_port

from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.errors import ConfigurationError, ConnectionLostError, HolmesError
from lightning_holmes.optim.node.node_options import NodeOptions
from lightning_holmes.optim.node.role import PORT, SECRET, join, open_store
from lightning_holmes.strategy import optimizer_nodes
from lightning_holmes.strategy.optimizer_nodes import OptimizerNodes, _listen

TOPOLOGY = Topology(clusters=(Cluster(name="a", hosts=(Host(name="a", devices=1),)),))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    found = free_port()
    monkeypatch.setenv(SECRET, "known to both")
    monkeypatch.setenv(PORT, str(found))
    return found


def node(port: int) -> Callable[[], int]:
    """Start a node; returns a function that waits for its exit code."""
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(
            join([("127.0.0.1", port)], -1, may_import=True, options=NodeOptions(), wait_s=20.0)
        ),
        daemon=True,
    )
    thread.start()

    def wait() -> int:
        thread.join(30)
        assert not thread.is_alive()
        return codes[0]

    return wait


def rank_0(count: int = 1) -> OptimizerNodes:
    options = SimpleNamespace(timeout=None, optimizer_hosts=())
    alone: Any = SimpleNamespace(
        rank=0, world_size=1, num_nodes=1, master=None, options=options, ask_rank_0=lambda ask: ask(), node_watch=None
    )
    return OptimizerNodes(count, alone, TOPOLOGY)


def test_nodes_of_one_job_are_numbered_and_end_with_it(port: int) -> None:
    job = rank_0(2)
    codes = [node(port), node(port)]
    assert job.share(["a", None]) == [[0], [1]]
    del job
    assert [code() for code in codes] == [0, 0]


def test_a_node_of_other_versions_is_refused_with_the_difference(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine: Any = optimizer_nodes.versions()
    monkeypatch.setattr(optimizer_nodes, "versions", lambda: mine | {"torch": "1.0"})
    job, code = rank_0(), node(port)
    difference = f"has torch {torch.__version__}, and rank 0 1.0: install the same versions on all hosts"
    with pytest.raises(ConfigurationError, match=difference.replace("+", r"\+")):
        job.share([None])
    assert code() == 1
    assert difference in capsys.readouterr().out, "the node says it, too"


def test_a_node_too_many_is_refused(port: int) -> None:
    job, codes = rank_0(), [node(port)]
    job.share([None])  # rank 0 waits at its end for nodes that have come
    codes.append(node(port))
    with pytest.raises(ConfigurationError, match=r"optimizer node 1 on .* is one too many: start 1"):
        while job.share([None]):
            job._nodes.clear()
    del job
    assert [code() for code in codes] == [0, 1]


def test_nodes_that_do_not_come_are_counted(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_nodes, "_COME_S", 1.0)
    with pytest.raises(HolmesError, match=f"0 of 1 optimizer nodes have come to 127.0.0.1:{port}"):
        rank_0().share([None])


def test_a_port_that_is_taken_is_named() -> None:
    with (
        _listen("127.0.0.1", 0) as taken,
        pytest.raises(ConfigurationError, match=r"nobody can listen for optimizer nodes at .* set HOLMES_NODE_PORT"),
    ):
        _listen("127.0.0.1", taken.getsockname()[1])


def test_jobs_with_another_secret_do_not_meet(port: int) -> None:
    with _listen("127.0.0.1", 0) as listener:
        at = listener.getsockname()[1]
        here = open_store("127.0.0.1", at, "one", listen=listener.detach())
    here.set("end", "now")
    there = open_store("127.0.0.1", at, "another")
    assert here.check(["end"]) and not there.check(["end"])
    with pytest.raises(ConnectionLostError, match="cannot be reached"):
        open_store("127.0.0.1", port, "one")
