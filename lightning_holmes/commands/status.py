"""lightning-holmes status: shows the state and the faults of this user's jobs with snapshots on this host.

For each job it shows whether it is training now, its last step, its newest snapshots, and its faults with the seconds that they have cost.
The information comes from a file beside the job's snapshots (HolmesStrategy(snapshot_every_n_steps=...)): there is none without snapshots,
and it is removed when a job has ended successfully.
"""

import argparse
import time
from pathlib import Path

from lightning_holmes.checkpoint.history import summary
from lightning_holmes.checkpoint.snapshot_folder import MEMORY, JobOnHost, jobs_on_host
from lightning_holmes.errors import ConfigurationError

_SHOWN = 2  # of consecutive "failed" events, since several ranks report one failure


def main(args: list[str]) -> None:
    """Run the command.

    Raises:
        ConfigurationError: there is no such folder.
    """
    parser = argparse.ArgumentParser(prog="lightning-holmes status", description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=MEMORY, help=f"the strategy's snapshot_folder; default {MEMORY}"
    )
    given = parser.parse_args(args)
    if not given.folder.is_dir():
        raise ConfigurationError(f"FOLDER={str(given.folder)!r}: there is no such folder on this host")
    jobs = jobs_on_host(given.folder)
    if not jobs:
        print(f"no job of yours has snapshots in {given.folder} on this host")
    for job in jobs:
        print("\n".join(describe(job)))


def describe(job: JobOnHost) -> list[str]:
    """The output lines for one job."""
    now = time.time()
    lines = [f"{job.path.name}: {'trains' if job.lives else 'does not run'}; {summary(job.events)}"]
    for fit in job.fits:
        reached = f"step {fit.step}, {_ago(now - fit.step_at)}" if fit.step else "no step yet"
        newest = ", ".join(f"step {step}, {_ago(now - at)}" for step, at in fit.snapshots)
        lines.append(f"  {fit.name}: {reached}; snapshots here: {newest or 'none'}")
    failed = 0
    for event in job.events:
        failed = failed + 1 if event.kind == "failed" else 0
        if failed <= _SHOWN:
            lines.append(f"  {event.line()}")
    return lines


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s ago"
    return f"{seconds / 60:.0f} minutes ago" if seconds < 7200 else f"{seconds / 3600:.0f} hours ago"
