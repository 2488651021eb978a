"""The code that tests/benchmarks/test_checkpoint.py times, in four processes."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_holmes.checkpoint import CheckpointManager, Membership
from lightning_holmes.checkpoint.atomic import sync_file
from lightning_holmes.checkpoint.folder import FolderStateDict

STATE_BYTES = 1_000_000_000
TENSORS = 16
REPEATS = 5


def _seconds(run: Any) -> float:
    dist.barrier()
    begin = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - begin


def throughput(folder: str) -> dict[str, list[float]]:
    """Return the seconds of saving and loading the state in each way; the ways take turns, and each rank holds a
    quarter of the state."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = STATE_BYTES // size // TENSORS // 4
    part = {f"w{rank}.{i}": torch.randn(numel) for i in range(TENSORS)}
    names = [f"w{r}.{i}" for r in range(size) for i in range(TENSORS)]
    job = Membership(rank=rank, size=size, make_group=lambda name: dist.new_group(backend="gloo"))
    about: dict[str, Any] = {"order": names, "parameters": frozenset(names), "plan": "", "assigned": frozenset()}
    keepers = {way: CheckpointManager(distributed=True, background=way == "stall") for way in ("save", "stall")}
    own, new = Path(folder) / f"plain{rank}.pt", Path(folder) / f"new{rank}.pt"

    def plain_in_place() -> None:
        torch.save(part, own)

    def plain_replaced() -> None:
        torch.save(part, new)
        sync_file(new)
        os.replace(new, own)

    def save(way: str) -> None:
        target = Path(folder) / f"{way}.ckpt"
        checkpoint = {"state_dict": part, "global_step": 0}
        keepers[way].save_folder(job, checkpoint, target, background=way == "stall", **about)

    def load() -> None:
        state = keepers["save"].load(job, Path(folder) / "save.ckpt", weights_only=None)["state_dict"]
        assert isinstance(state, FolderStateDict)
        read = state.read_many(part)
        assert all(torch.equal(read[name][:9], part[name][:9]) for name in part)

    ways: dict[str, Any] = {
        "plain save in place": plain_in_place,
        "plain save to a new file that takes the old one's place": plain_replaced,
        "save": lambda: save("save"),
        "stall": lambda: save("stall"),
        "plain load": lambda: torch.load(own),
        "load": load,
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(REPEATS + 1):
        for way, run in ways.items():
            seconds = _seconds(run)
            if number > 0:  # the first round allocates staging memory and imports modules
                found[way].append(seconds)
            if way == "stall":
                keepers["stall"].finish(job)
            os.sync() if rank == 0 and "save" in way else None
            dist.barrier()
    dist.destroy_process_group()
    return found
