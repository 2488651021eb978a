"""The address on which the job's store listens: the master's, so that hosts on another network cannot reach it."""

import os
import threading

import psutil
import pytest
import torch.distributed as dist
from launch import launch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_holmes.comm import world
from lightning_holmes.comm.user_settings import UserSettings
from lightning_holmes.errors import ConnectionLostError


def listening() -> list[str]:
    port = int(os.environ["MASTER_PORT"])
    ends = psutil.Process().net_connections(kind="tcp")
    return sorted(end.laddr.ip for end in ends if end.status == psutil.CONN_LISTEN and end.laddr.port == port)


def connect(address: str) -> list[str]:
    """Return the addresses on which this process listens once WORLD has been formed."""
    os.environ["MASTER_ADDR"] = address
    world.connect_world(
        TorchElasticEnvironment(),
        "gloo",
        interface=None,
        several_hosts=address == "127.0.0.2",
        user=UserSettings(),
        timeout=None,
    )
    dist.barrier()
    return listening()


@pytest.mark.parametrize(
    ("address", "listens"),
    [("127.0.0.1", ["127.0.0.1"]), ("localhost", ["127.0.0.1"]), ("127.0.0.2", ["::"])],
    ids=["an address", "a name", "loopback between hosts"],
)
def test_the_store_listens_on_the_masters_address(address: str, listens: list[str]) -> None:
    assert launch(2, "test_world:connect", address, timeout_s=90) == [listens, []]


def test_ranks_of_an_attempt_meet_in_a_store_that_those_of_others_have_used() -> None:
    """Ranks arrive in any order, and one attempt has fewer; values left by an earlier attempt are not taken for
    answers."""
    store, names = dist.HashStore(), []
    for ranks in ([0, 1, 2], [2, 1, 0], [1, 0], [1, 2, 0]):
        given: dict[int, str] = {}

        def meet(rank: int, size: int = len(ranks), given: dict[int, str] = given) -> None:
            given[rank] = world.meet_in_store(store, rank, size, timeout_s=20.0)

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
            thread.join(0.05)  # those ranks that can end do
        for thread in threads:
            thread.join(20.0)
        assert sorted(given) == sorted(ranks)
        names += set(given.values())
    assert len(names) == len(set(names)) == 4
    with pytest.raises(ConnectionLostError, match="rank 1 has not come"):
        world.meet_in_store(store, 0, 2, timeout_s=0.05)
