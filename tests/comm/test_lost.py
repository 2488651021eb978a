"""A connection counts as lost if a library or this package waited for it, whatever the message of a user's exception
says."""

import pytest
import torch
import torch.distributed as dist
from launch import launch
from lost_connections import CASES, USERS, raise_in

from lightning_holmes.comm.lost import is_lost


def test_what_torch_raises_when_the_other_end_is_gone_is_a_lost_connection() -> None:
    found = launch(2, "lost_connections:lose")[0]
    assert found == dict.fromkeys(CASES, True)


@pytest.mark.parametrize("name", USERS)
def test_a_users_exception_that_sounds_like_one_is_his_own(name: str) -> None:
    with pytest.raises((RuntimeError, ConnectionError), match="timed out") as raised:
        USERS[name]()
    assert not is_lost(raised.value)


def test_it_is_told_by_the_words_and_the_place_together() -> None:
    for module, said, lost in (
        (dist, "Connection closed by peer", True),
        (dist, "Invalid scalar type", False),
        (torch.nn, "Connection closed by peer", False),
    ):
        with pytest.raises(RuntimeError) as raised:
            raise_in(module, said)
        assert is_lost(raised.value) is lost
    assert not is_lost(RuntimeError("Connection closed by peer"))
