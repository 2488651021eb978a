"""Ranks that meet in a store which does not answer, or whose process has ended, get an error in time."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launch import launch_raw

from lightning_holmes.checkpoint.meeting import Meeting
from lightning_holmes.comm.job_store import answer_within, connect_again
from lightning_holmes.errors import CheckpointError, ConnectionLostError

KEEP = """
import torch.distributed as dist, sys
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def kept() -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """Return a client of a store, and the process that keeps the store."""
    keeper = subprocess.Popen([sys.executable, "-c", KEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert keeper.stdin is not None and keeper.stdout is not None
    with keeper, keeper.stdin, keeper.stdout:
        try:
            port = int(keeper.stdout.readline())
            yield dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60)), keeper
        finally:
            keeper.kill()
            keeper.wait(30)


def test_a_store_that_falls_silent_or_goes_ends_a_meeting(kept: tuple[Any, subprocess.Popen[str]]) -> None:
    store, keeper = kept
    store.set("asked", "1")
    assert connect_again(store, timeout_s=60).get("asked") == b"1"
    with pytest.raises(KeyError):
        answer_within(lambda: {}["what is raised inside"], timeout_s=60)

    os.kill(keeper.pid, signal.SIGSTOP)  # as if the link to it were cut
    meeting = Meeting(store, 1, 2, "silent", timedelta(seconds=0.2))
    with pytest.raises(CheckpointError, match="nothing is heard of rank 0: the job's store has not answered for 2 s"):
        meeting.announce("files")
    with pytest.raises(ConnectionLostError, match="has not answered for 0 s"):
        connect_again(store, timeout_s=0.2)

    keeper.kill()
    keeper.wait(30)
    with pytest.raises(ConnectionLostError, match="is gone: the process that keeps it has ended"):
        connect_again(store, timeout_s=60)
    with pytest.raises(CheckpointError, match=r"rank 0 has written nothing for 60 s, or is gone \("):
        Meeting(store, 1, 2, "gone", timedelta(seconds=60)).announce("files")


def test_a_member_whose_process_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    """The wait ends long before the timeout of 80 s."""
    waits, killed = launch_raw(2, "meeting_cases:lose_a_member", None, timeout_s=120, folder=tmp_path)
    assert killed.exit_code == -signal.SIGKILL and waits.exit_code == 0, waits.output
