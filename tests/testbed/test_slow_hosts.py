"""A host that becomes slow gets fewer layers at the next start, which resumes from the snapshot of the previous
start."""

import itertools
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launch import forked_python
from slow_host_worker import LAYERS, Progress, train

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from testbed import HostResult, Testbed, TestbedOptions
from testbed.cgroup import CpuGroup, find_cpu_hierarchy

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.usefixtures("testbed_works"),
    pytest.mark.xdist_group("testbed"),
    pytest.mark.timeout(900),
]
SHARE, THROTTLED = 0.6, 0.2
"""Shares of a core: of each host, and of the host that becomes slow."""
TWO_HOSTS = Topology(
    clusters=tuple(
        Cluster(name=name, hosts=(Host(name=name, devices=1, nics=(Nic(name="eth0", kind="ethernet"),)),))
        for name in ("east", "west")
    )
)


def throttle(bed: Testbed, host: str) -> None:
    group = CpuGroup(find_cpu_hierarchy(), bed._group_name(bed.layout.host(host)))
    group.create(share=THROTTLED, period_s=bed.options.cpu_period_s)


@dataclass
class Start:
    """One start of the job: its output, its losses by step, the layers per host, and the plan."""

    output: str
    losses: dict[int, float]
    layers: dict[str, int]
    notes: str

    @property
    def step_s(self) -> float:
        """Return the median step time of the last steps."""
        times = [float(at) for at in re.findall(r"of this start done at ([\d.]+) s", self.output)][-15:]
        return statistics.median(after - before for before, after in itertools.pairwise(times))


class Job:
    """Starts of one job on a testbed."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        self.starts: list[Start] = []

    def start(self, end: str, echo: Callable[[str, str], None] | None = None) -> Start:
        attempt = len(self.starts)
        worker = Path(__file__).with_name("slow_host_worker.py")
        results: dict[str, HostResult] = self.bed.run(
            [*forked_python(), str(worker), str(self.folder)],
            env={"ATTEMPT": str(attempt), "END": end},
            node_order=["east", "west"],
            echo=echo,
            grace_s=60,
            timeout_s=240,
        )
        shown = "\n".join(f"--- {host}: {r.exit_code}\n{r.output[-6000:]}" for host, r in results.items())
        assert {host: r.exit_code for host, r in results.items()} == {"east": 0, "west": 143}, shown
        lines = (self.folder / f"losses.0.{attempt}").read_text().splitlines()
        plan: dict[str, Any] = json.loads((self.folder / f"plan.0.{attempt}").read_text())
        hosts = [("east", "west")[row[0]] for row in plan["grid"]]
        found = Start(
            output=results["east"].output,
            losses={int(step): float(loss) for step, loss in map(str.split, lines)},
            layers=dict(zip(hosts, plan["layers"], strict=True)),
            notes="\n".join(plan["notes"]),
        )
        resumed = re.search(r"goes on from the snapshot of step (\d+)", found.output)
        if self.starts:
            assert resumed is not None and int(resumed[1]) == max(self.starts[-1].losses), shown
            assert min(found.losses) == int(resumed[1]) + 1
        steps = f"steps {min(found.losses)} to {max(found.losses)}, the last of them {found.step_s:.3f} s each"
        print(f"start {attempt}: {found.layers}, {steps}", flush=True)
        print("\n".join(line for line in found.notes.splitlines() if line.startswith(("partition", "prediction"))))
        print("\n".join(line for line in found.output.splitlines() if "costs that" in line or "holds the" in line))
        self.starts.append(found)
        return found

    def assert_losses_are_those_of_one_process(self) -> None:
        losses = {step: loss for start in self.starts for step, loss in start.losses.items()}
        assert list(losses) == list(range(1, len(losses) + 1))
        progress = Progress()
        train(progress, devices=1, max_steps=len(losses))
        assert losses == pytest.approx(progress.losses, rel=1e-5)


def test_a_host_that_became_slow_while_nothing_ran_gets_fewer_layers(tmp_path: Path) -> None:
    """Every start measures the speeds of the hosts. Baseline: one process; losses to 1e-5."""
    with Testbed(TWO_HOSTS, TestbedOptions(cpu_share=SHARE, precedence=True)) as bed:
        job = Job(bed, tmp_path)
        first = job.start("20")
        assert sum(first.layers.values()) == LAYERS and abs(first.layers["east"] - first.layers["west"]) <= 2
        throttle(bed, "west")
        second = job.start("20")
        assert second.layers["west"] <= first.layers["west"] - 2
    job.assert_losses_are_those_of_one_process()
