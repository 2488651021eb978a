"""The code of each process of a job in which one process is killed while the other waits for it in a meeting."""

import functools
import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_holmes.checkpoint.meeting import Meeting
from lightning_holmes.comm.gloo import has_ended
from lightning_holmes.errors import CheckpointError
from lightning_holmes.torch_private import default_store


def lose_a_member(_: None) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=90))
    ended = functools.partial(has_ended, None)
    assert not ended(1 - rank)
    dist.barrier()
    meeting = Meeting(default_store().clone(), rank, 2, "killed", timedelta(seconds=80), ended)
    if rank == 1:
        meeting.gather("first", b"1")
        os.kill(os.getpid(), signal.SIGKILL)
    assert meeting.gather("first", b"0") == [b"0", b"1"]
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"^rank 1 has written nothing, and its process has ended$"):
        meeting.gather("second", b"0")
    assert time.monotonic() - began < 40
    meeting.announce("error", b"told")  # the store answers at once
    assert time.monotonic() - began < 40
