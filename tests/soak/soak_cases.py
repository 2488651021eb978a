"""The code that runs in each process of a soak job: snapshot_cases' fit, which reports when it reaches a place of
faults.py and waits there for a fault that is to strike exactly there.
"""

import ctypes
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from faults import LASTS, RANKS
from lightning.pytorch import Callback
from snapshot_cases import train
from testbed import enter

from lightning_holmes.checkpoint import atomic, loading, manager, saving
from lightning_holmes.checkpoint.copies import Copies
from lightning_holmes.comm import collectives

_NEW_MOUNTS, _PRIVATE, _BIND, _RECURSIVE = 0x00020000, 1 << 18, 4096, 16384
_PATIENCE_S = 10.0


class UsersError(RuntimeError):
    """The error that the user's code raises."""


def see_folder_of_host(own: str, seen: str) -> None:
    """Bind-mount ``own`` at ``seen`` for this process, as hosts have different folders under the same path."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.unshare(_NEW_MOUNTS) == 0
    done = done and libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None) == 0
    done = done and libc.mount(own.encode(), seen.encode(), None, _BIND, None) == 0
    if not done:
        raise OSError(ctypes.get_errno(), "mount")


class Places:
    """Counts how often this rank reaches each place, and reports when a fault of this attempt is due there."""

    def __init__(self, folder: Path, faults: list[dict[str, Any]]) -> None:
        self._folder, self._faults = folder, faults
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def come(self, place: str) -> None:
        with self._lock:
            self._counts[place] += 1
            count = self._counts[place]
        for fault in self._faults:
            if (fault["place"], fault["count"]) == (place, count):
                self._meet(fault)

    def _meet(self, fault: dict[str, Any]) -> None:
        reached, struck = (self._folder / f"{what}.{fault['index']}" for what in ("reached", "struck"))
        reached.with_suffix(".part").write_text(repr(time.time()))
        reached.with_suffix(".part").rename(reached.with_name(reached.name))
        end = time.monotonic() + _PATIENCE_S
        while not fault["delay_s"] and not struck.exists() and time.monotonic() < end:
            time.sleep(0.001)
        if fault["kind"] == "raise":
            raise UsersError(f"fault {fault['index']}")


class Notes(Callback):
    """Reports the places in the user's code; in a lasting run, also writes the process's threads, open files and memory (MB) ten times."""

    def __init__(self, places: Places, usage: Path, pace_s: float) -> None:
        self._places, self._usage, self._pace_s = places, usage, pace_s

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self._pace_s)  # as long as the steps of a larger model
        self._places.come("batch")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._places.come("optimizer")

    def on_validation_batch_start(self, *_: Any) -> None:
        self._places.come("validation")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.max_steps >= LASTS and trainer.global_step % (trainer.max_steps // 10) == 0:
            process = psutil.Process()
            with self._usage.open("a") as file:
                print(process.num_threads(), process.num_fds(), process.memory_info().rss / 1e6, file=file)

    def on_train_end(self, *_: Any) -> None:
        self._places.come("ended")


def watch_writing(places: Places, snapshots: str) -> None:
    """Patch this process to report the places where files are written and read."""
    write, replace, copy, load = saving.write_part, atomic.replace, Copies.__call__, loading.load_folder
    gather = collectives._native_gather

    def write_part(path: Path, *args: Any) -> Any:
        places.come("snapshot" if str(path).startswith(snapshots) else "checkpoint")
        return write(path, *args)

    def replaced(source: Path, target: Path) -> None:
        if str(target).startswith(snapshots):
            places.come("rename")
        replace(source, target)

    def copied(copies: Copies, *args: Any) -> None:
        places.come("copy")
        copy(copies, *args)

    def load_folder(*args: Any, **options: Any) -> Any:
        places.come("loading")
        return load(*args, **options)

    def gathered(*args: Any) -> None:
        places.come("gather")
        gather(*args)

    collectives._native_gather = gathered
    saving.write_part, atomic.replace, Copies.__call__ = write_part, replaced, copied  # type: ignore[method-assign]
    manager.load_folder = load_folder


def run(options: dict[str, Any]) -> str:
    """Run one start of the job on this rank and return the digest of the final weights."""
    rank, folder = int(os.environ["RANK"]), Path(options["folder"])
    if "SOAK_NAMESPACE" in os.environ:
        place = (os.environ[f"SOAK_{what}"] for what in ("NAMESPACE", "HOSTS_FILE"))
        # without joining a cpu cgroup
        enter.enter("/dev/null", next(place), os.getppid(), os.environ["HOLMES_HOST_NAME"], next(place))
    if "snapshots" in options:
        see_folder_of_host(options["memory_of_rank"][rank], options["snapshots"])
    if options["strategy"]["pipeline_parallel_size"] == RANKS:
        options["strategy"] = options["strategy"] | {"pipeline_parallel_size": int(os.environ["WORLD_SIZE"])}
    places = Places(folder, [fault for fault in options["faults"] if fault["rank"] == rank])
    if "snapshots" in options:
        watch_writing(places, options["snapshots"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    places.come("joining")
    notes = Notes(places, folder / f"usage.{rank}", options.get("pace_s", 0.0))
    return train(options, callbacks=[notes], in_step=lambda: places.come("forward"))
