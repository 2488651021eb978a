"""Snapshots of a fit: when they are taken, and how a restarted fit continues from one.

    snapshots = Snapshots(trainer, manager, folder, every=100, joined=...)     # every rank, once a fit
    with snapshots.attached():                           # around the fit's batches
        ...
    snapshots.take()                                     # all ranks, between two batches

A snapshot is taken between two batches. It holds what a Lightning checkpoint holds, the state of the random generators of every rank, and
the positions of the data loaders. A loader without a state of its own is brought to its position by loading again what was loaded in this
epoch, with the same random numbers. Folders and files are handled by checkpoint/snapshot_folder.py.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_holmes.checkpoint import Job as Membership
from lightning_holmes.checkpoint import atomic
from lightning_holmes.checkpoint.finding import newest_whole
from lightning_holmes.checkpoint.manifest import MANIFEST
from lightning_holmes.checkpoint.resume import SAMPLES_SEEN
from lightning_holmes.checkpoint.snapshot_folder import (
    SnapshotFolder,
    SnapshotManager,
    find_newest,
    read_name,
    snapshot_name,
)
from lightning_holmes.comm.uncaught import one_line
from lightning_holmes.errors import CheckpointDamagedError, ConfigurationError
from lightning_holmes.lightning_private import data_fetcher, loaders_of
from lightning_holmes.pipeline.seeds import random_states, set_random_states
from lightning_holmes.strategy.compat.replacements import Replacements
from lightning_holmes.strategy.switches import Saved, Switches


class Due(Enum):
    """The kind of a snapshot: of all values (WHOLE), or without those that optimizer nodes keep when workers are lost (BESIDE_NODES)."""

    WHOLE = auto()
    BESIDE_NODES = auto()


KEY = "lightning_holmes_snapshot"
BATCH = "lightning_holmes_batch"
# with every="auto": shares of the time for pauses, and for writing in the background
_PAUSE_SHARE, _WRITE_SHARE = 0.01, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a snapshot records in addition to Lightning's checkpoint; lists are by global rank of the ranks that have taken it.

    Attributes:
        step: the global step.
        replicas: each rank's replica.
        now: each rank's random states when the snapshot was taken.
        pass_began: each rank's random states at the beginning of the loaders' pass; None if all loaders have states of their own.
        first_fetch: each rank's random states before the first batch of that pass; None as for ``pass_began``.
        switches: see switches.py.
    """

    step: int
    replicas: list[int]
    now: list[dict[str, Any]]
    pass_began: list[dict[str, Any]] | None
    first_fetch: list[dict[str, Any]] | None
    switches: Saved | None = None  # None in snapshots of versions without switches

    def of_rank(self, states: list[dict[str, Any]], rank: int, replica: int, size: int) -> dict[str, Any]:
        """Return this rank's entry of ``states``, or, in another layout, the entry of the first rank that loaded the same samples."""
        own = rank if len(self.replicas) == size and self.replicas[rank] == replica else self.replicas.index(replica)
        return states[own]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatch:
    """The batch on which all replicas together train in a step, as recorded in snapshots and in the fit's checkpoints.

    Attributes:
        replicas: the number of replicas.
        batch_size: the batch size of each replica's loader; None: the loader has none, or there are several loaders.
        given: the batch size that the script sets; differs from ``batch_size`` after a restart with another number of replicas.
        num_microbatches: the number of microbatches of each replica's batch; 0: not known.
    """

    replicas: int
    batch_size: int | None
    given: int | None
    num_microbatches: int


class Snapshots:
    """Takes the snapshots of one fit on this rank, and restores the fit from one.

    Args:
        every: steps between two snapshots; "auto": so often that their pauses take a hundredth of the time.
        device: the device whose random generator is saved in addition to the host's.
        member: this rank's place in the job.
        run: a name for the values of this fit that is unique among all starts of the job; the same on all ranks.
        have_kept: whether the optimizer nodes have outlived the workers of an earlier start, and still hold the values of a commit (a run and
            a version); None: there are no such nodes.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        manager: SnapshotManager,
        folder: SnapshotFolder,
        *,
        every: int | Literal["auto"],
        device: torch.device,
        member: Membership,
        run: str = "",
        have_kept: Callable[[str, int], bool] | None = None,
    ) -> None:
        self.manager, self.folder = manager, folder
        self.run = run
        self.adopted = 0
        """The version of the values that optimizer nodes have kept and continue from; 0: the nodes are given values."""
        self.version_on_nodes: Callable[[], int | None] = lambda: None
        """Returns the version of the values that the nodes hold now, if they will keep them, so that a snapshot can leave them out; else None."""
        self.switches: Switches  # set by the strategy
        self.taking: Due | None = None
        self.is_active = False
        """Whether the fit has reached its batches: training that a callback does before in the same loops takes no snapshots."""
        self.chosen: str | None = None
        """The path of the snapshot that the fit begins from."""
        self.own_checkpoint: str | None = None
        """The path of the job's own checkpoint that the fit begins from instead of a snapshot."""
        self.num_microbatches: int | None = None
        """The number of microbatches of a replica's batch, if the number of replicas has changed since the snapshot; else None."""
        self._trainer = trainer
        self._every = every
        self._device = device
        self._member = member
        self._started = 0  # the step that the fit began from
        self._step: int | None = None  # the step of the last snapshot of kind WHOLE, or of the one resumed from
        self._taken_at = 0.0
        self._pause_s = 0.0
        self._have_kept = have_kept
        # the last snapshot of kind BESIDE_NODES: its step, when it was taken, and its pause in seconds
        self._beside = (0, 0.0, 0.0)
        self._made: dict[int, dict[str, Any]] = {}
        self._pass_began: dict[str, Any] | None = None
        self._first_fetch: dict[str, Any] | None = None
        self._epoch: tuple[int, Any] | None = None
        self._resumed: Resumed | None = None
        self._trains = False  # whether a batch has been trained
        self._given: int | None = None  # the data module's original batch size, if this class has changed it

    # when

    @property
    def is_taking(self) -> bool:
        """Whether the checkpoint that is being saved is a snapshot."""
        return self.taking is not None

    @property
    def due(self) -> Due | None:
        """The kind of snapshot to take before the next batch; None: take none. Rank 0's value decides. The first snapshot is due after the
        first step."""
        step = self._trainer.global_step
        if not self.is_active or self.is_accumulating:
            return None
        if self._step is None:
            return Due.WHOLE if step > self._started else None
        if step == self._step:
            return None
        return Due.WHOLE if self._is_due(step - self._step) else Due.BESIDE_NODES if self._is_due_beside(step) else None

    def _is_due(self, num_steps: int) -> bool:
        if self._every != "auto":
            return num_steps >= self._every
        passed = time.monotonic() - self._taken_at
        return not self.manager.is_writing and passed >= max(
            self._pause_s / _PAUSE_SHARE, self.manager.write_s / _WRITE_SHARE
        )

    def _is_due_beside(self, step: int) -> bool:
        """Whether a snapshot of kind BESIDE_NODES is due: so often that their pauses take a hundredth of the time."""
        last, taken_at, pause_s = self._beside
        if step == last or self.manager.is_writing or time.monotonic() - taken_at < pause_s / _PAUSE_SHARE:
            return False
        return self.version_on_nodes() is not None

    @property
    def is_accumulating(self) -> bool:
        """Whether accumulated gradients of earlier batches wait for more batches."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.ready % self._trainer.accumulate_grad_batches > 0 and not progress.is_last_batch

    # taking one

    def take(self, kind: Due = Due.WHOLE) -> None:
        """Copy this rank's state, and write it while training continues. All ranks must call, between two batches."""
        begin = time.monotonic()
        self.taking = kind
        step, version = self._trainer.global_step, self.version_on_nodes()
        try:
            name = snapshot_name(step, None if kind is Due.WHOLE or version is None else (self.run, version))
            self._trainer.save_checkpoint(self.folder.path / name, weights_only=False)
            if kind is Due.BESIDE_NODES:  # it is small, and only useful until the nodes' next commit
                self.manager.settle(self._member)
        finally:
            self.taking = None
        end = time.monotonic()
        if kind is Due.WHOLE:
            self._step, self._taken_at, self._pause_s = step, end, end - begin
        else:
            self._beside = step, end, end - begin

    def take_last(self, why: str) -> None:
        """Take a last snapshot and wait until it is whole, before all ranks end on a signal. All ranks must call.

        Args:
            why: the reason, for the history.
        """
        if self.folder.is_first:
            self.folder.history.note("told", f"all ranks end before the next batch: {why}")
        if self.is_active and not self.is_accumulating and self._trainer.global_step not in (self._started, self._step):
            self.take()
        self.manager.settle(self._member)

    def describe(self, checkpoint: dict[str, Any], num_microbatches: int) -> None:
        """Add to ``checkpoint``, which may be a snapshot, what a resumed fit needs in addition. All ranks must call.

        Args:
            num_microbatches: the number of microbatches of a replica's batch.

        Raises:
            ConfigurationError: some of several training loaders have a state and others do not.
        """
        member = self._member
        if not self.is_active or "loops" not in checkpoint:
            return
        batch_size = _batch_size(loaders_of(self._trainer.fit_loop))
        given = batch_size if self._given is None else self._given
        checkpoint[BATCH] = asdict(
            WholeBatch(
                replicas=member.num_replicas, batch_size=batch_size, given=given, num_microbatches=num_microbatches
            )
        )
        if not self.is_taking:
            return
        epoch = self._trainer.current_epoch
        if self._epoch is None or self._epoch[0] != epoch:
            loaders = loaders_of(self._trainer.fit_loop)
            stateful = [hasattr(loader, "load_state_dict") for loader in loaders]
            if any(stateful) and not all(stateful):
                raise ConfigurationError(
                    "snapshot_every_n_steps with several training loaders, of which some have a state_dict and some do not: the ones "
                    "cannot be brought to where the others are; give all of them one, or none"
                )
            of_pass = None if all(stateful) else (self._pass_began, self._first_fetch)
            self._epoch = epoch, member.all_gather(of_pass)
        began, first = zip(*self._epoch[1], strict=True) if self._epoch[1][0] is not None else (None, None)
        everyone = member.all_gather((member.replica, random_states(self._device)))
        checkpoint[KEY] = {
            "step": self._trainer.global_step,
            "replicas": [replica for replica, _ in everyone],
            "now": [states for _, states in everyone],
            "pass_began": None if began is None else list(began),
            "first_fetch": None if first is None else list(first),
            "switches": self.switches.read(),
        }

    # resuming

    def choose(self, find_checkpoint: Callable[[Any], Any], ckpt_path: Any) -> Any:
        """Return the path that the fit begins from: the newest snapshot that the hosts hold together, or a checkpoint of the job that is newer;
        without a snapshot, if the job was restarted, the newest checkpoint that it has written; else ``ckpt_path``. All ranks must call, and
        get the same.

        Args:
            find_checkpoint: resolves a ``ckpt_path`` (such as "last") to a path, or None.
        """
        member, folder = self._member, self.folder
        attempts = member.all_gather((folder.began, folder.reached, folder.newest))
        reached, known = (max(attempt[index] for attempt in attempts) for index in (1, 2))
        saved: dict[str, int] = {}
        for of_rank in member.all_gather(folder.saved_checkpoints()):
            saved |= of_rank
        found = find_newest(folder.path, member.all_gather, self._have_kept)
        if found is not None:
            path, step = found
            commit = (read_name(path.name) or (0, None))[1]
            later = self._later_checkpoint(path, step, saved, find_checkpoint, ckpt_path, known=known)
            if later is not None:
                self._tell(
                    f"from {later}, which is newer than the snapshots that are left whole; {reached} steps were done"
                )
                self.own_checkpoint = later
                return later
            self.chosen = str(path)
            beside = ""
            if commit is None:
                self.manager.whole = path
            else:
                self.run, self.adopted = commit
                self.manager.beside_nodes = path
                whole = find_newest(folder.path, member.all_gather)
                self.manager.whole = None if whole is None else whole[0]
                beside = ", with what the optimizer nodes have kept"
            self._tell(
                f"from the snapshot of step {step}, {max(reached - step, 0)} before the last one{beside}: {path}"
            )
            return self.chosen
        began = [attempt[0] for attempt in attempts if attempt[0] is not None]
        if not began:
            return find_checkpoint(ckpt_path)
        newest = member.broadcast(newest_whole(saved))
        if newest is not None:
            self._tell(f"from {newest}, since no snapshot is left whole; {reached} steps were done")
            self.own_checkpoint = newest
            return newest
        self._tell(
            f"at its beginning: neither a whole snapshot nor a checkpoint of it is left; {reached} steps were done"
        )
        return find_checkpoint(ckpt_path)

    def _later_checkpoint(
        self,
        snapshot: Path,
        step: int,
        saved: Mapping[str, int],
        find_checkpoint: Callable[[Any], Any],
        ckpt_path: Any,
        *,
        known: int,
    ) -> Any:
        """Return a checkpoint that is newer than ``snapshot``, if newer snapshots are lost; else None. Candidates are this fit's checkpoints that
        the hosts know, and the one that a SLURM job saved before it was requeued on other hosts. All ranks must call.

        Args:
            step: the step of ``snapshot``.
            saved: the steps of this fit's checkpoints, by path.
            known: the step of the newest snapshot that is known to have been whole.
        """
        member = self._member
        newer = [path for path, at in saved.items() if at > step] if known > step else []
        found = member.broadcast(newest_whole(newer))
        if found is not None or ckpt_path is not None or not SLURMEnvironment.detect():
            return found
        requeued = find_checkpoint(None)
        if requeued is None or os.path.abspath(requeued) in saved:
            return None
        manifest = snapshot / MANIFEST
        taken = max(member.all_gather(manifest.stat().st_mtime if manifest.exists() else 0.0))
        is_newer = member.broadcast(os.path.exists(requeued) and os.stat(requeued).st_mtime > taken)
        return requeued if is_newer else None

    def note_saved(self, checkpoint: Mapping[str, Any], path: Any) -> None:
        """Record in the job's folder that a checkpoint was saved, if a fit can continue from it."""
        if not self.is_taking and "optimizer_states" in checkpoint:
            self.folder.note_checkpoint(str(path), checkpoint["global_step"])

    def _tell(self, where: str) -> None:
        words = f"this job was started again, and goes on {where}"
        self._say(words)
        if self.folder.is_first:
            self.folder.history.note("resumed", words)

    def _say(self, words: str) -> None:
        if self._member.rank == 0:
            print(words, flush=True)

    def fail(self, exception: BaseException) -> None:
        """Handle a failure of this rank. If the snapshot that the fit begins from has turned out to be damaged, remove it on this host, so that the
        next start continues from copies elsewhere, or from another snapshot."""
        # with several ranks, FailureWatch records it
        if self._member.size == 1 and not isinstance(exception, SIGTERMException):
            self.folder.history.note("failed", one_line(exception))
        if isinstance(exception, CheckpointDamagedError) and self.chosen is not None and not self._trains:
            atomic.delete(Path(self.chosen))
            print(
                f"[rank {self._member.rank}] {self.chosen} is removed on this host; the next start of the job goes on from copies elsewhere, or "
                f"from what was saved before",
                file=sys.stderr,
                flush=True,
            )

    def resume(self, loaded: Mapping[str, Any]) -> None:
        """Take over the state of the snapshot that the fit begins from.

        Raises:
            ConfigurationError: see :meth:`keep_whole_batch`.
        """
        self._resumed = Resumed(**loaded[KEY])
        self._step = self._resumed.step
        self.keep_whole_batch(loaded)

    def keep_whole_batch(self, loaded: Mapping[str, Any]) -> None:
        """If the number of replicas differs from that which saved ``loaded``, change the batch size and the number of microbatches of each
        replica, so that all replicas together train on the same batches and the same microbatches.

        Raises:
            ConfigurationError: the data module does not count the samples of all replicas, its batch size has changed, or the batch cannot be
                divided by this number of replicas.
        """
        if BATCH not in loaded:  # saved before the fit reached its batches
            return
        saved, count = WholeBatch(**loaded[BATCH]), self._member.num_replicas
        if saved.replicas == count and saved.given == saved.batch_size:
            return
        states = loaded.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader") or []
        counted, data = bool(states) and all(SAMPLES_SEEN in state for state in states), self._trainer.datamodule  # type: ignore[attr-defined]
        whole, parts = (saved.batch_size or 0) * saved.replicas, saved.num_microbatches * saved.replicas
        given = getattr(data, "batch_size", None)
        refusal = ""
        if not counted or not whole or given is None:
            refusal = "only data modules that count the samples of all replicas, as lightning_holmes.data's, can give them the same batches"
        elif given != saved.given:
            refusal = f"the data module's batch_size is {given}, and was {saved.given}"
        elif whole % count or parts % count:
            refusal = f"a batch of {whole} samples in {parts} microbatches is not divided by {count}"
        if refusal:
            raise ConfigurationError(
                f"what was saved at step {loaded['global_step']} was taken by {saved.replicas} replicas, and {count} are left: {refusal}. Start with "
                f"{saved.replicas} replicas again (pipeline_parallel_size decides how many hosts make one), or, to begin anew, remove "
                f"{self.folder.path}"
            )
        self._given, data.batch_size = given, whole // count
        if parts:
            self.num_microbatches = parts // count
        in_parts = f" in {parts // count} microbatches" if parts else ""
        self._say(f"{saved.replicas} replicas took it; {count} go on with batches of {whole // count}{in_parts} each")

    def note_loader(self, loader: object) -> None:
        """Record the present random states for a loader that was just made: its first pass begins with them."""
        self._made[id(loader)] = random_states(self._device)  # loaders live as long as their fit

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the trainer's loops restore the fit before its first batch, and note the random states and steps that snapshots need; a single
        process also takes its snapshots there."""
        loop: Any = self._trainer.fit_loop.epoch_loop
        advance, on_run_start, on_advance_end = loop.advance, loop.on_run_start, loop.on_advance_end

        def begin_pass(fetcher: Any) -> None:
            if self._pass_began is None:
                self._started = self._trainer.global_step
            self._note_pass(loop)
            on_run_start(fetcher)

        def begin_batch(fetcher: Any) -> None:
            if self._resumed is not None:
                self._go_on(loop, self._resumed)
                self._resumed = None
            elif self._first_fetch is None:
                self._first_fetch = random_states(self._device)
            if self._member.size == 1 and (due := self.due) is not None:
                self.take(due)
            advance(fetcher)
            self._trains = True
            self.folder.note_step(self._trainer.global_step)

        def end_batch(fetcher: Any) -> None:
            try:
                on_advance_end(fetcher)
            except SIGTERMException:  # with several processes, BatchSignals takes this snapshot
                if self._trainer.training and not loop.batch_progress.is_last_batch:
                    self.take_last("SIGTERM")
                raise

        with Replacements() as changes:
            changes.replace(loop, advance=begin_batch, on_run_start=begin_pass)
            if self._member.size == 1:
                changes.replace(loop, on_advance_end=end_batch)
            yield

    def _note_pass(self, loop: Any) -> None:
        """At the beginning of an epoch, keep the random states with which the loaders' pass begins: those of now, or, for the first pass, those
        of when Lightning made the loaders."""
        fit_loop = self._trainer.fit_loop
        begins_now = self._trainer.current_epoch > 0 and not fit_loop.is_resuming and not loop.restarting
        noted = None if begins_now else self._made.get(id(loaders_of(fit_loop)[-1]))
        self._pass_began, self._first_fetch = noted or random_states(self._device), None

    def _go_on(self, loop: Any, resumed: Resumed) -> None:
        """Bring loaders and random states to where they were when the snapshot was taken."""
        if resumed.switches is not None:
            self.switches.put(resumed.switches)
        loop.restarting = False  # else Lightning would assume that a validation was under way: there was none
        member = self._member

        def own(states: list[dict[str, Any]]) -> dict[str, Any]:
            return resumed.of_rank(states, member.rank, member.replica, member.size)

        same = len(set(resumed.replicas)) == member.num_replicas
        if resumed.pass_began is not None and resumed.first_fetch is not None:
            fetcher = data_fetcher(self._trainer.fit_loop)
            self._pass_began, self._first_fetch = own(resumed.pass_began), own(resumed.first_fetch)
            set_random_states(self._pass_began, self._device)
            iter(fetcher)
            set_random_states(self._first_fetch, self._device)
            for _ in range(loop.batch_progress.current.ready):
                next(fetcher)
        if same:
            set_random_states(own(resumed.now), self._device)

    # the end

    def close(self, *, well: bool) -> None:
        """End the snapshots at the fit's end. If the fit has ended well on all ranks, keep the last one until the process has ended well, too."""
        self.folder.remove_at_exit(well=well)
        if well:
            self.manager.settle(self._member)
            self.folder.clear(keep=self.manager.whole)
        else:
            try:
                self.manager.finish(failed=True, alone=self._member.size == 1)
            except Exception as error:  # only warn: the run's own failure is reported
                warnings.warn(f"a snapshot was not written: {error}")


def _batch_size(loaders: list[Any]) -> int | None:
    """Return the batch size of the training loader; None if it has none, or if there are several loaders."""
    found = getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None
    return found if isinstance(found, int) else None
