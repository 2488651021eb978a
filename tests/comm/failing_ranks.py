"""Processes of one job whose ranks fail in one way or another, while the others are in a call that no broken connection
ends: as under NCCL, where a host waits for its device."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_holmes.comm import failure, heartbeat, world
from lightning_holmes.comm.failure import FailureWatch
from lightning_holmes.comm.user_settings import UserSettings
from lightning_holmes.torch_private import default_store

SIZE, CULPRIT = 3, 1


def _begin(culprit: int) -> FailureWatch:
    """Form WORLD, and watch; when a rank ends because of the culprit, it kills the culprit, which may be stopped."""
    rank = int(os.environ["RANK"])
    heartbeat.SILENT_TICKS = 6
    dist.init_process_group("gloo", rank=rank, world_size=SIZE, timeout=timedelta(seconds=300))
    store = default_store()
    if rank == culprit:
        store.set("culprit", str(os.getpid()))
    pid = int(store.get("culprit"))
    watch = FailureWatch(store, rank, SIZE, 300.0)
    watch.heartbeat.where = lambda: ("in step 3, F0.1", True)
    if rank == SIZE - 1:
        leave = os._exit

        def leave_with_culprit(code: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                if code:
                    os.kill(pid, signal.SIGKILL)
            leave(code)

        os._exit = leave_with_culprit
    said = watch.heartbeat.number + 2
    while watch.heartbeat.number < said:
        threading.Event().wait(0.05)
    dist.barrier()
    return watch


def fail(how: str) -> None:
    """Rank CULPRIT, in the actions of a step, fails as ``how`` says; the others wait for it."""
    watch = _begin(CULPRIT)
    if how == "holds Python's lock":
        if dist.get_rank() == CULPRIT:
            ctypes.PyDLL(None).sleep(9)
        dist.barrier()
        watch.stop()
    elif dist.get_rank() != CULPRIT:
        threading.Event().wait()
    elif how == "raises":
        watch.report(ZeroDivisionError("division by zero\nand more"))
        sys.exit(1)
    else:
        os.kill(os.getpid(), getattr(signal, how))


def lose_store(how: str) -> str:
    """Rank 0, which keeps the store, is killed or stopped while the others wait for each other; or its run ends well,
    and the others go on."""
    failure._GRACE_S = 0.2
    watch = _begin(0)
    if dist.get_rank() == 0:
        watch.stop() if how == "ends well" else os.kill(os.getpid(), getattr(signal, how))
        return "ended"
    if how != "ends well":
        threading.Event().wait()
    assert watch._gone.wait(60)
    watch._thread.join(60)
    watch.stop()
    return "went on"


def join(absent: int) -> None:
    """Join a job of one rank more than there are."""
    world._PATIENCE_S = 1.0
    size, rank = int(os.environ["WORLD_SIZE"]) + 1, int(os.environ["RANK"])
    os.environ |= {"WORLD_SIZE": str(size), "RANK": str(rank + (rank >= absent))}
    world.connect_world(
        TorchElasticEnvironment(),
        "gloo",
        interface=None,
        several_hosts=False,
        user=UserSettings(),
        timeout=timedelta(seconds=4),
    )
