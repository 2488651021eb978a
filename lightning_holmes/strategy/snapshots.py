"""Snapshots of a fit: when they are taken, and how a restarted fit continues from one.

    snapshots = begin_snapshots(trainer, member, topology, ...)       # every rank, before a fit
    path = snapshots.choose(find_checkpoint, ckpt_path)
    with snapshots.attached(pipeline, loaded_state):     # around the fit's batches
        ...
    snapshots.take()                                     # all ranks, between two batches

A snapshot is taken between two batches. It holds what a Lightning checkpoint holds, the state of the random generators of every rank, and
the positions of the data loaders. A loader without a state of its own is brought to its position by loading again what was loaded in this
epoch, with the same random numbers. Folders and files are handled by checkpoint/snapshots.py and job_folder.py.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_holmes.checkpoint import Membership, atomic, run_state
from lightning_holmes.checkpoint.finding import newest_whole
from lightning_holmes.checkpoint.job_folder import MEMORY, JobFolder, job_name, name_start
from lightning_holmes.checkpoint.manifest import MANIFEST
from lightning_holmes.checkpoint.snapshots import SnapshotManager, find_newest
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import CheckpointDamagedError, ConfigurationError
from lightning_holmes.lightning_package import fabric, pl
from lightning_holmes.lightning_private import data_fetcher, loaders_of
from lightning_holmes.pipeline.seeds import random_states, set_random_states
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.replacements import Replacements
from lightning_holmes.strategy.loaded_state import LoadedState

KEY = "lightning_holmes_snapshot"
# with every="auto": shares of the time for pauses, and for writing in the background
_PAUSE_SHARE, _WRITE_SHARE = 0.01, 0.1

Switches = Mapping[str, Sequence[str]]
"""Settings of a module that hooks change in mid-run and that a checkpoint does not contain: which parameters are frozen,
which modules are in eval mode, which norms track no statistics. The names of parameters or modules that have a setting
off, by the name of the setting (an attribute such as ``requires_grad``).

A resumed run has them even if the hook that has changed them is not called again: Lightning calls on_train_epoch_start,
in which BaseFinetuning changes them, only when an epoch begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a snapshot records in addition to Lightning's checkpoint; lists are by global rank of the ranks that have taken it.

    Attributes:
        step: the global step.
        replicas: each rank's replica.
        now: each rank's random states when the snapshot was taken.
        pass_began: each rank's random states at the beginning of the loaders' pass; None if all loaders have states of their own.
        first_fetch: each rank's random states before the first batch of that pass; None as for ``pass_began``.
        switches: which are off.
    """

    step: int
    replicas: list[int]
    now: list[dict[str, Any]]
    pass_began: list[dict[str, Any]] | None
    first_fetch: list[dict[str, Any]] | None
    switches: Switches

    def of_rank(self, states: list[dict[str, Any]], rank: int, replica: int, size: int) -> dict[str, Any]:
        """Return this rank's entry of ``states``, or, in another layout, the entry of the first rank that loaded the same samples."""
        own = rank if len(self.replicas) == size and self.replicas[rank] == replica else self.replicas.index(replica)
        return states[own]


class Snapshots:
    """Takes the snapshots of one fit on this rank, and resumes the fit from one.

    Args:
        fit: the number of fits that this start of the job has begun before.
        every: steps between two snapshots; "auto": so often that their pauses take a hundredth of the time.
        device: the device whose random generator is saved in addition to the host's.
        member: this rank's place in the job.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        manager: SnapshotManager,
        folder: JobFolder,
        fit: int,
        *,
        every: int | Literal["auto"],
        device: torch.device,
        member: Membership,
    ) -> None:
        self.manager, self.folder = manager, folder
        self.is_taking = False
        """Whether the checkpoint that is being saved is a snapshot."""
        self.is_active = False
        """Whether the fit has reached its batches: training that a callback does before in the same loops takes no snapshots."""
        self.chosen: str | None = None
        """The path of the snapshot that the fit begins from."""
        self.own_checkpoint: str | None = None
        """The path of the job's own checkpoint that the fit begins from instead of a snapshot."""
        self.num_microbatches: int | None = None
        """The number of microbatches of a replica's batch, if the number of replicas has changed since the snapshot; else None."""
        self._trainer = trainer
        self._fit = fit
        self._every = every
        self._device = device
        self._member = member
        self._started = 0  # the step that the fit began from
        self._step: int | None = None  # the step of the last snapshot, or of the one resumed from
        self._taken_at = 0.0
        self._pause_s = 0.0
        self._made: dict[int, dict[str, Any]] = {}
        self._pass_began: dict[str, Any] | None = None
        self._first_fetch: dict[str, Any] | None = None
        self._epoch: tuple[int, Any] | None = None
        self._moment: Moment | None = None
        self._trains = False  # whether a batch has been trained
        self._given: int | None = None  # the data module's original batch size, if this class has changed it

    # when

    @property
    def is_due(self) -> bool:
        """Whether to take a snapshot before the next batch; rank 0's value decides. The first one is due after the first step."""
        step = self._trainer.global_step
        if not self.is_active or self.is_accumulating:
            return False
        if self._step is None:
            return step > self._started
        if step == self._step:
            return False
        if self._every != "auto":
            return step - self._step >= self._every
        passed = time.monotonic() - self._taken_at
        return not self.manager.is_writing and passed >= max(
            self._pause_s / _PAUSE_SHARE, self.manager.write_s / _WRITE_SHARE
        )

    @property
    def is_accumulating(self) -> bool:
        """Whether accumulated gradients of earlier batches wait for more batches."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.ready % self._trainer.accumulate_grad_batches > 0 and not progress.is_last_batch

    # taking one

    def take(self) -> None:
        """Copy this rank's state, and write it while training continues. All ranks must call, between two batches."""
        begin, step = time.monotonic(), self._trainer.global_step
        self.is_taking = True
        try:
            self._trainer.save_checkpoint(self.folder.snapshot(self._fit, step), weights_only=False)
        finally:
            self.is_taking = False
        self._step, self._taken_at = step, time.monotonic()
        self._pause_s = self._taken_at - begin

    def take_last(self) -> None:
        """Take a last snapshot and wait until it is whole, before all ranks end on a signal. All ranks must call."""
        if self.is_active and not self.is_accumulating and self._trainer.global_step not in (self._started, self._step):
            self.take()
        self.manager.settle(self._member)

    def describe(self, checkpoint: dict[str, Any]) -> None:
        """Add to ``checkpoint``, which may be a snapshot, what a resumed fit needs in addition. All ranks must call.

        Raises:
            ConfigurationError: some of several training loaders have a state and others do not.
        """
        member = self._member
        if not self.is_active or "loops" not in checkpoint:
            return
        batch_size = _batch_size(loaders_of(self._trainer.fit_loop))
        # differs after a restart with another number of replicas
        given = batch_size if self._given is None else self._given
        checkpoint[run_state.KEY] = {"batch_size": batch_size, "given_batch_size": given}
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
            "switches": read_switches(self._pipeline),
        }

    # resuming

    def choose(self, find_checkpoint: Callable[[Any], Any], ckpt_path: Any) -> Any:
        """Return the path that the fit begins from: the newest snapshot that the hosts hold together; without one, if the job was restarted, the
        newest checkpoint that it has written; else ``ckpt_path``. All ranks must call, and get the same.

        Args:
            find_checkpoint: resolves a ``ckpt_path`` (such as "last") to a path, or None.
        """
        member, saved = self._member, dict[str, int]()
        for of_rank in member.all_gather(self.folder.saved_checkpoints(self._fit)):
            saved |= of_rank
        found = find_newest(self.folder, self._fit, member.all_gather)
        if found is not None:
            path, step = found
            requeued = None if ckpt_path is not None else self._requeued(path, saved, find_checkpoint)
            if requeued is not None:
                self._say(f"this job was started again, and goes on from {requeued}, newer than the snapshots here")
                return requeued
            self.chosen, self.manager.whole = str(path), path
            self._say(f"this job was started again, and goes on from the snapshot of step {step}: {path}")
            return self.chosen
        self.own_checkpoint = member.broadcast(newest_whole(saved))
        if self.own_checkpoint is not None:
            self._say(
                f"this job was started again, and goes on from {self.own_checkpoint}, since no snapshot is left whole"
            )
            return self.own_checkpoint
        if any(member.all_gather(self.folder.is_restart)):
            self._say(
                "this job was started again, and begins as at first: neither a whole snapshot nor a checkpoint of its own is left"
            )
        return find_checkpoint(ckpt_path)

    def _requeued(self, snapshot: Path, saved: Mapping[str, int], find_checkpoint: Callable[[Any], Any]) -> Any:
        """Return the checkpoint that a SLURM job has saved before it was requeued, if it did so on other hosts since ``snapshot`` was taken here; else
        None. All ranks must call.

        Args:
            saved: this fit's checkpoints that the hosts know, by path: for each of them a snapshot is at hand that is at least as new.
        """
        requeued = find_checkpoint(None) if fabric.plugins.environments.slurm.SLURMEnvironment.detect() else None
        if requeued is None or os.path.abspath(requeued) in saved:
            return None
        manifest = snapshot / MANIFEST
        taken = max(self._member.all_gather(manifest.stat().st_mtime if manifest.exists() else 0.0))
        is_newer = self._member.broadcast(os.path.exists(requeued) and os.stat(requeued).st_mtime > taken)
        return requeued if is_newer else None

    def note_saved(self, checkpoint: Mapping[str, Any], path: Any) -> None:
        """Record in the job's folder that a checkpoint was saved, if a fit can continue from it."""
        if not self.is_taking and "optimizer_states" in checkpoint:
            self.folder.note_checkpoint(self._fit, str(path), checkpoint["global_step"])

    def _say(self, words: str) -> None:
        if self._member.rank == 0:
            print(words, flush=True)

    def fail(self, exception: BaseException) -> None:
        """Handle a failure of this rank. If the snapshot that the fit begins from has turned out to be damaged, remove it on this host, so that the
        next start continues from copies elsewhere, or from another snapshot."""
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
        self._moment = Moment(**loaded[KEY])
        self._step = self._moment.step
        self.keep_whole_batch(loaded)

    def keep_whole_batch(self, loaded: Mapping[str, Any]) -> None:
        """If the number of replicas differs from that which saved ``loaded``, change the batch size and the number of microbatches of each
        replica, so that all replicas together train on the same batches and the same microbatches.

        Raises:
            ConfigurationError: the data module does not count the samples of all replicas, its batch size has changed, or the batch cannot be
                divided by this number of replicas.
        """
        saved, count = loaded.get(run_state.KEY, {}), self._member.num_replicas
        if "batch_size" not in saved:  # saved before the fit reached its batches
            return
        replicas, batch_size, given_then = saved["data_parallel_size"], saved["batch_size"], saved["given_batch_size"]
        if replicas == count and given_then == batch_size:
            return
        states = run_state.loader_states(loaded)
        counted = bool(states) and all(run_state.SAMPLES_SEEN in state for state in states)
        data = self._trainer.datamodule  # type: ignore[attr-defined]
        whole, parts = (batch_size or 0) * replicas, saved["num_microbatches"] * replicas
        given = getattr(data, "batch_size", None)
        refusal = ""
        if not counted or not whole or given is None:
            refusal = "only data modules that count the samples of all replicas, as lightning_holmes.data's, can give them the same batches"
        elif given != given_then:
            refusal = f"the data module's batch_size is {given}, and was {given_then}"
        elif whole % count or parts % count:
            refusal = f"a batch of {whole} samples in {parts} microbatches is not divided by {count}"
        if refusal:
            raise ConfigurationError(
                f"what was saved at step {loaded['global_step']} was taken by {replicas} replicas, and {count} are left: {refusal}. Start with "
                f"{replicas} replicas again (pipeline_parallel_size decides how many hosts make one), or, to begin anew, remove "
                f"{self.folder.path}"
            )
        self._given, data.batch_size = given, whole // count
        if parts:
            self.num_microbatches = parts // count
        in_parts = f" in {parts // count} microbatches" if parts else ""
        self._say(f"{replicas} replicas took it; {count} go on with batches of {whole // count}{in_parts} each")

    def note_loader(self, loader: object) -> None:
        """Record the present random states for a loader that was just made: its first pass begins with them."""
        self._made[id(loader)] = random_states(self._device)  # loaders live as long as their fit

    @contextmanager
    def attached(self, pipeline: PipelineModule, loaded_state: LoadedState) -> Iterator[None]:
        """Inside, the trainer's loops restore the fit before its first batch, and note the random states and steps that snapshots need; a single
        process also takes its snapshots there.

        Args:
            pipeline: the fit's module.
            loaded_state: keeps the optimizers' states, with their groups, until the first batch.
        """
        self._pipeline, self._loaded_state = pipeline, loaded_state
        loop: Any = self._trainer.fit_loop.epoch_loop
        advance, on_run_start, on_advance_end = loop.advance, loop.on_run_start, loop.on_advance_end

        def begin_pass(fetcher: Any) -> None:
            if self._pass_began is None:
                self._started = self._trainer.global_step
            self._note_pass(loop)
            on_run_start(fetcher)

        def begin_batch(fetcher: Any) -> None:
            if self._moment is not None:
                self._go_on(loop, self._moment)
                self._moment = None
            elif self._first_fetch is None:
                self._first_fetch = random_states(self._device)
            if self._member.size == 1 and self.is_due:
                self.take()
            advance(fetcher)
            self._trains = True

        def end_batch(fetcher: Any) -> None:
            try:
                on_advance_end(fetcher)
            except pl.utilities.exceptions.SIGTERMException:  # with several processes, BatchSignals takes this snapshot
                if self._trainer.training and not loop.batch_progress.is_last_batch:
                    self.take_last()
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

    def _go_on(self, loop: Any, moment: Moment) -> None:
        """Bring loaders and random states to where they were when the snapshot was taken."""
        put_switches(self._pipeline, moment.switches)
        self._loaded_state.put_groups(self._pipeline.parameters)
        loop.restarting = False  # else Lightning would assume that a validation was under way: there was none
        member = self._member

        def own(states: list[dict[str, Any]]) -> dict[str, Any]:
            return moment.of_rank(states, member.rank, member.replica, member.size)

        same = len(set(moment.replicas)) == member.num_replicas
        if moment.pass_began is not None and moment.first_fetch is not None:
            fetcher = data_fetcher(self._trainer.fit_loop)
            self._pass_began, self._first_fetch = own(moment.pass_began), own(moment.first_fetch)
            set_random_states(self._pass_began, self._device)
            iter(fetcher)
            set_random_states(self._first_fetch, self._device)
            for _ in range(loop.batch_progress.current.ready):
                next(fetcher)
        if same:
            set_random_states(own(moment.now), self._device)

    # the end

    def close(self, *, well: bool) -> None:
        """End the snapshots at the fit's end. If the fit has ended well on all ranks, keep the last one until the process ends."""
        if not well:
            self.folder.keep_at_exit()
            self.manager.finish(self._member, failed=True)
            return
        self.manager.settle(self._member)
        self.folder.remove_at_exit()


def begin_snapshots(
    trainer: "pl.Trainer",
    member: Membership,
    topology: Topology,
    *,
    every: int | Literal["auto"],
    device: torch.device,
    environment: fabric.plugins.environments.cluster_environment.ClusterEnvironment,
) -> Snapshots:
    """Begin the snapshots of a fit; for the arguments see :class:`Snapshots`. Every rank must call.

    Raises:
        ConfigurationError: there is no usable folder for snapshots (raised on every rank), or a callback is a LearningRateFinder or BatchSizeFinder.
    """
    finders = (pl.callbacks.LearningRateFinder, pl.callbacks.BatchSizeFinder)
    searching = [type(c).__name__ for c in trainer.callbacks if isinstance(c, finders)]  # type: ignore[attr-defined]
    if searching:
        raise ConfigurationError(
            f"snapshot_every_n_steps beside {searching[0]}, which puts a fit that has gone on from a snapshot back to its beginning: search "
            f"with a strategy without snapshots, and train with what was found"
        )
    if (
        isinstance(environment, fabric.plugins.environments.lightning.LightningEnvironment)
        and "MASTER_PORT" not in os.environ
    ):
        pl.utilities.rank_zero_warn(
            "snapshot_every_n_steps: this job has no name under which it is found when it is started again; use torchrun --rdzv-id, or set "
            "MASTER_PORT to a port of its own"
        )
    name = job_name(os.environ, environment.main_address, environment.main_port)
    name, start = member.broadcast((name, name_start()))
    folder, problem = None, ""
    try:
        folder = JobFolder(MEMORY / name, start)
    except ConfigurationError as error:
        problem = str(error)
    problems = [said for said in member.all_gather(problem) if said]
    if problems or folder is None:
        raise ConfigurationError(problems[0])
    fit = member.broadcast(folder.count_fit() if member.rank == 0 else 0)
    names = [topology.cluster_of_rank(rank).name for rank in range(member.size)]
    manager = SnapshotManager([names.index(name) for name in names])
    return Snapshots(trainer, manager, folder, fit, every=every, device=device, member=member)


def _batch_size(loaders: list[Any]) -> int | None:
    """Return the batch size of the training loader; None if it has none, or if there are several loaders."""
    found = getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None
    return found if isinstance(found, int) else None


def read_switches(pipeline: PipelineModule) -> Switches:
    """Return which switches are off now."""
    modules = list(pipeline.module.named_modules())
    return {
        "requires_grad": [name for name, p in pipeline.parameters.items() if not p.requires_grad],
        "training": [name for name, module in modules if not module.training],
        "track_running_stats": [n for n, m in modules if getattr(m, "track_running_stats", None) is False],
    }


def put_switches(pipeline: PipelineModule, saved: Switches) -> None:
    """Restore ``saved``."""
    for name, parameter in pipeline.parameters.items():
        if parameter.requires_grad == (name in saved["requires_grad"]):
            parameter.requires_grad_(name not in saved["requires_grad"])
    for name, module in pipeline.module.named_modules():
        module.training = name not in saved["training"]
        if hasattr(module, "track_running_stats"):
            vars(module)["track_running_stats"] = name not in saved["track_running_stats"]
