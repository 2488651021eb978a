"""Begins the snapshots of a fit, and so finds what a restarted job continues from: its newest snapshot, or else its newest checkpoint.

snapshots = begin_snapshots(trainer, job, options, environment)      # every rank, before a fit
path = snapshots.choose(find_checkpoint, ckpt_path)
"""

import functools
import itertools
import os
import sys
import uuid
from pathlib import Path

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities import rank_zero_warn

from lightning_holmes.checkpoint.snapshot_folder import MEMORY, SnapshotFolder, SnapshotManager, job_name
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.options import Options
from lightning_holmes.strategy.snapshots import Snapshots

_fits = itertools.count()
"""Counts the fits of this process, of all trainers: a restarted process begins the same fits in the same order."""

_START = uuid.uuid4().hex
"""Names this start of the job on rank 0, together with the process id, since the process may have been forked."""


def begin_snapshots(trainer: "pl.Trainer", job: Job, options: Options, environment: ClusterEnvironment) -> Snapshots:
    """Return the snapshots of a fit that begins. Every rank must call.

    Raises:
        ConfigurationError: there is no usable folder for snapshots (raised on every rank), or a callback is a LearningRateFinder or BatchSizeFinder.
    """
    connection, every = job.connection, options.snapshot_every_n_steps
    assert every is not None
    searching = [type(c).__name__ for c in trainer.callbacks if isinstance(c, (LearningRateFinder, BatchSizeFinder))]  # type: ignore[attr-defined]
    if searching:
        raise ConfigurationError(
            f"snapshot_every_n_steps beside {searching[0]}, which puts a fit that has gone on from a snapshot back to its beginning: search "
            f"with a strategy without snapshots, and train with what was found"
        )
    if isinstance(environment, LightningEnvironment) and "MASTER_PORT" not in os.environ:
        rank_zero_warn(
            "snapshot_every_n_steps: this job has no name under which it is found when it is started again; use torchrun --rdzv-id, or set "
            "MASTER_PORT to a port of its own"
        )
    name = connection.broadcast(job_name(os.environ, environment.main_address, environment.main_port))
    base = MEMORY if options.snapshot_folder is None else Path(options.snapshot_folder)
    folder, problem = None, ""
    try:
        if options.snapshot_folder is not None:
            base.mkdir(parents=True, exist_ok=True)
        fit, start = connection.broadcast((next(_fits), f"{_START}-{os.getpid()}"))
        folder = SnapshotFolder(base, name, fit, start)
    except (ConfigurationError, OSError) as error:
        problem = str(error)
    problems = [said for said in connection.all_gather(problem) if said]
    if problems or folder is None:
        raise ConfigurationError(problems[0])
    if folder.is_first:
        folder.history.note("start", f"starts with {connection.world_size} ranks: {' '.join(sys.argv)}")
    if connection.watch is not None:
        connection.watch.on_end = functools.partial(folder.history.note, "failed")
    names = [job.topology.cluster_of_rank(rank).name for rank in range(connection.world_size)]
    manager = SnapshotManager(
        folder,
        group=lambda: job.groups.builder.build(range(connection.world_size), "holmes_snapshots", on_host=True),
        clusters=[names.index(name) for name in names],
    )
    nodes = job.optimizer_nodes(options.optimizer_nodes) if options.optimizer_nodes else None
    return Snapshots(
        trainer,
        manager,
        folder,
        every=every,
        device=connection.device,
        member=job.membership,
        run=f"{start}-{fit}",
        have_kept=nodes.have_kept if nodes is not None and nodes.outlive else None,
    )
