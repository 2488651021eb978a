"""Which ranks of WORLD do not reach each other: the reports in the store, and their summary."""

import json
import re
import socket
import threading
from typing import Any

import torch.distributed as dist

from lightning_holmes.comm import failure, reach


def test_a_port_that_does_not_answer_is_told_with_both_ends(monkeypatch: Any) -> None:
    monkeypatch.setattr(reach, "_ANSWER_S", 0.1)
    store: Any = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as open_end, socket.create_server(("127.0.0.1", 0)) as closed_end:
        port = closed_end.getsockname()[1]
        closed_end.close()
        reach.announce(store, rank=0, host="a")
        assert json.loads(store.get("holmes/listening/0"))[0] == "a"
        assert ["lo", "127.0.0.1", open_end.getsockname()[1]] in json.loads(store.get("holmes/listening/0"))[1]
        store.set("holmes/listening/1", json.dumps(["b", [["lo", "127.0.0.1", open_end.getsockname()[1]]]]))
        store.set("holmes/listening/2", json.dumps(["c", [["lo", "127.0.0.1", port]]]))
        reach.tell_blocked(store, rank=0, world_size=3)
    (told,) = reach.gather_blocked(store, world_size=3)
    assert re.fullmatch(
        rf"rank 0 on a \(lo 127\.0\.0\.1\) does not reach rank 2 on c \(lo 127\.0\.0\.1\) at port {port}: Connection refused",
        told,
    )


def test_nothing_is_told_of_ranks_that_have_not_announced_themselves() -> None:
    store: Any = dist.HashStore()
    reach.tell_blocked(store, rank=0, world_size=2)
    assert not store.check(["holmes/blocked/0"])


def test_a_rank_that_doubts_has_every_rank_look(monkeypatch: Any) -> None:
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    store = dist.HashStore()
    watches = [failure.FailureWatch(store, rank, 2) for rank in range(2)]
    asked = [threading.Event() for _ in watches]
    for watch, event in zip(watches, asked, strict=True):
        watch.on_doubt = lambda given, event=event: event.set()  # type: ignore[misc]
    watches[1].doubt()
    try:
        assert all(event.wait(60) for event in asked)
    finally:
        for watch in watches:
            watch.stop()
