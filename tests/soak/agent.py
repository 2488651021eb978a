"""A launcher that restarts a job repeatedly, as torchrun does, while faults strike it, and a report of its end.

    with Hosts(folder, layout) as hosts:
        report = Run(case, hosts, folder).go()
    report.outcome              # "well", or the problem: a hang, other weights, a leftover file, an end without a message

The ranks are processes of this machine.
"""

import contextlib
import functools
import itertools
import json
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from faults import LASTS, STEPS, Case, Fault, Layout
from launch import free_port
from soak_hosts import Hosts

TIMEOUT_S = 15.0  # the strategy's timeout
_LIMIT_S = 100.0  # an attempt that takes longer counts as a hang
_LIMIT_ON_NETWORK_S = 200.0  # longer: links are cut for some time
_STEP_S = 0.2  # added for each step
_SPARED_S = 30.0  # how long torchrun waits for ranks that it has sent SIGTERM
_ALIKE = {"partition": "uniform"}  # the same partition whatever the load of the machine
_MORE_ATTEMPTS = 3
_CLOSE = 1e-5  # where another layout sums in another order
_MORE_MB = 10.0  # of memory: growth that an allocator may cause
_UGLY = re.compile(r"terminate called|Segmentation fault|core dumped|Fatal Python error|double free|SIGABRT")
_CLEAR = re.compile(r"^(\[rank ?\d+\]: )?\S*(Error|Exception)\b|^\[rank \d+\]|ends by|KeyboardInterrupt", re.MULTILINE)
_REMOVED = "is removed on this host"
_NONE_WHOLE = "since no snapshot is left whole"
_DAMAGES = ("kill and tear", "kill and flip")
"""Faults that damage the newest snapshot, which is the only one while the next is being written; the job then resumes
from the newest checkpoint."""
_TOGETHER = re.compile(r"Ctrl-C: all ranks end|SIGTERM")  # printed by the ranks that were notified


@dataclass
class Struck:
    """A fault that has happened, and whether the attempt went on."""

    fault: Fault
    attempt: int
    went_on: bool = False


@dataclass
class Report:
    case: Case
    outcome: str = "well"
    struck: list[Struck] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
    output: str = ""

    def __str__(self) -> str:
        return f"{self.case} -> {self.outcome}; {self.attempts} starts, {self.seconds:.0f} s"


class Attempt:
    """One start of the job."""

    def __init__(self, run: "Run", number: int, faults: tuple[Fault, ...]) -> None:
        self.run, self.faults = run, faults
        self.hosts = run.case.hosts_at(number)
        self.layout = run.case.layout.on(len(self.hosts))
        self.folder = run.folder / f"attempt{number}"
        self.number = number
        self.struck: list[Struck] = []
        self.codes: dict[int, int] = {}
        self.signalled: set[tuple[int, int]] = set()
        self.hung: list[int] = []
        self.has_damaged_the_only_snapshot = False
        self._due: dict[int, float] = {}
        self._later: list[tuple[float, Any]] = []

    def go(self) -> None:
        run, size = self.run, self.layout.size
        self.folder.mkdir()
        given = [asdict(fault) | {"index": index} for index, fault in enumerate(self.faults)]
        own = [str(run.hosts.own[self.host_of(rank)]) for rank in range(size)]
        payload = run.options | {"folder": str(self.folder), "name": "soak", "faults": given, "memory_of_rank": own}
        (self.folder / "payload").write_bytes(pickle.dumps(("soak_cases:run", payload)))
        port = free_port()
        self.pids = {}
        # as set by a torchrun that has restarts left
        env = {"TORCHELASTIC_RESTART_COUNT": str(self.number), "TORCHELASTIC_MAX_RESTARTS": "99"}
        for rank in range(size):
            self.pids[rank] = run.hosts.start(self.folder, rank, self.layout, port, env)
        began = time.monotonic()
        limit_s = _limit_s(self.layout) + len(self.faults) * 5.0
        first_end: float | None = None
        while len(self.codes) < size:
            now = time.monotonic()
            self._strike(now)
            for when, act in [item for item in self._later if item[0] <= now]:
                act()
                self._later.remove((when, act))
            for rank in self.pids.keys() - self.codes.keys():
                path = self.folder / f"exit{rank}"
                if path.exists():
                    self.codes[rank] = int(path.read_text())
                    if self.codes[rank] and first_end is None:
                        first_end = now
                        self._end_host_of(rank, now)
            left = self.pids.keys() - self.codes.keys()
            if left and left <= self.stopped:  # nobody waits for stopped ranks any more
                self._signal(signal.SIGKILL, list(left))
            if now - began > limit_s and not self.hung:
                self.hung = sorted(self.pids.keys() - self.codes.keys() - self.stopped)
                self._signal(signal.SIGKILL, list(self.pids))
            time.sleep(0.005)
        for _, act in self._later:
            act()

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host among all hosts."""
        return self.hosts[self.layout.host_of(rank)]

    @property
    def is_done(self) -> bool:
        """Whether all ranks have trained to the end."""
        return all(code == 0 and (self.folder / f"result{rank}").exists() for rank, code in self.codes.items())

    @property
    def stopped(self) -> set[int]:
        return {s.fault.rank for s in self.struck if s.fault.kind == "hang"}

    def _end_host_of(self, rank: int, now: float) -> None:
        """End the other ranks of a failed rank's host, as the host's torchrun does. Ranks on other hosts notice the
        failure by themselves."""
        others = [r for r in self.layout.ranks_of(self.layout.host_of(rank)) if r != rank]
        self._later.append((now + 0.1, lambda: self._signal(signal.SIGTERM, others)))
        self._later.append((now + _SPARED_S, lambda: self._signal(signal.SIGKILL, others)))
        for stopped in self.stopped:  # its own torchrun learns of the failure through the rendezvous
            self._later.append((now + 1.0, lambda r=stopped: self._signal(signal.SIGKILL, [r])))

    def _signal(self, number: int, ranks: list[int]) -> None:
        for rank in ranks:
            if rank not in self.codes:
                self.signalled.add((rank, -number))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], number)

    def _strike(self, now: float) -> None:
        for index, fault in enumerate(self.faults):
            if index not in self._due and (self.folder / f"reached.{index}").exists():
                self._due[index] = now + fault.delay_s
            if self._due.get(index, now + 1) <= now:
                self._due[index] = float("inf")
                self.struck.append(Struck(fault, self.number))
                self._act(fault, now)
                (self.folder / f"struck.{index}").touch()

    def _act(self, fault: Fault, now: float) -> None:
        hosts, host = self.run.hosts, self.host_of(fault.rank)
        fellows, everyone = self.layout.ranks_of(self.layout.host_of(fault.rank)), list(range(self.layout.size))
        kind = fault.kind
        if kind in ("kill", *_DAMAGES):
            self._signal(signal.SIGKILL, [fault.rank])
        elif kind in ("kill host", "lose host"):
            self._signal(signal.SIGKILL, fellows)
        elif kind in ("SIGTERM", "hosts return"):
            self._signal(signal.SIGTERM, fellows if kind == "SIGTERM" else everyone)
        elif kind == "SIGINT":
            self._signal(signal.SIGINT, everyone)
        elif kind == "SIGINT to one":
            self._signal(signal.SIGINT, [fault.rank])
        elif kind in ("stop", "hang"):
            self._signal(signal.SIGSTOP, [fault.rank])
            if kind == "stop":
                self._later.append((now + fault.seconds, lambda: self._signal(signal.SIGCONT, [fault.rank])))
        elif kind.startswith("full"):
            path = hosts.own[host] if kind == "full snapshots" else hosts.checkpoints
            hosts.fill(path)
            self._later.append((now + fault.seconds, lambda: hosts.free(path)))
        elif kind.startswith("cut"):
            hosts.switch(host, up=False)
            self._later.append((now + fault.seconds, functools.partial(hosts.switch, host, up=True)))
        else:
            assert kind == "raise"

    def after_end(self) -> None:
        """Apply the faults that take effect after all processes have ended: delete or damage snapshots."""
        for struck in self.struck:
            host = self.host_of(struck.fault.rank)
            if struck.fault.kind == "lose host":
                self.run.hosts.lose(host)
            elif struck.fault.kind in _DAMAGES:
                chance = self.run.case.seed * 7919
                is_only = self.run.hosts.damage(host, cut=struck.fault.kind == "kill and tear", chance=chance)
                self.has_damaged_the_only_snapshot |= is_only

    def output(self, rank: int) -> str:
        return (self.folder / f"log{rank}").read_text(errors="replace")

    def wrong(self, before: Sequence["Attempt"]) -> str:
        """Return what went wrong in this attempt, or "". An attempt may end without a fault if it found a byte that
        was flipped in an attempt of ``before``."""
        if self.hung:
            return f"ranks {self.hung} hang in attempt {self.number}"
        together = any(_TOGETHER.search(self.output(rank)) for rank in self.codes)
        for rank, code in self.codes.items():
            told = self.output(rank)
            if _UGLY.search(told) or (code < 0 and (rank, code) not in self.signalled):
                return f"rank {rank} ended by signal {-code} in attempt {self.number}"
            if code > 0 and not _CLEAR.search(told) and not together:
                return f"rank {rank} ended with {code} and without a word in attempt {self.number}"
        found = any(_REMOVED in self.output(rank) for rank in self.codes)
        has_found = found and any(s.fault.kind == "kill and flip" for attempt in before for s in attempt.struck)
        if not self.struck and not self.is_done and not has_found:
            return f"attempt {self.number} ended without a fault"
        return ""


class Run:
    """Runs a case from its first start to its end."""

    def __init__(self, case: Case, hosts: Hosts, folder: Path) -> None:
        self.case, self.hosts, self.folder = case, hosts, folder
        layout = case.layout
        self.options = layout.options | {
            "snapshots": str(hosts.seen),
            **({"checkpoints": str(hosts.checkpoints)} if steps_of(layout) < LASTS else {}),
            "strategy": {
                "snapshot_every_n_steps": case.every,
                "timeout": timedelta(seconds=TIMEOUT_S),
                **_ALIKE,
                **layout.options["strategy"],
            },
        }

    def go(self, expect: Callable[[Layout], "Expected"]) -> Report:
        """Start the job until it has ended well, and compare it with a run without faults, which ``expect`` returns."""
        expect(self.case.layout)  # while all cards are up
        report, began = Report(self.case), time.monotonic()
        attempts: list[Attempt] = []
        planned: Iterator[tuple[Fault, ...]] = iter(self.case.attempts)
        while report.outcome == "well" and len(attempts) < len(self.case.attempts) + _MORE_ATTEMPTS:
            attempt = Attempt(self, len(attempts), next(planned, ()))
            attempts.append(attempt)
            attempt.go()
            attempt.after_end()
            wrong = attempt.wrong(attempts[:-1])
            if wrong:
                report.outcome = wrong
            if attempt.is_done:
                break
        else:
            if report.outcome == "well":
                report.outcome = "it does not end well, however often it is started"
        if report.outcome == "well":
            report.outcome = self._compare(attempts, expect) or "well"
        report.attempts, report.seconds = len(attempts), time.monotonic() - began
        report.struck = [struck for attempt in attempts for struck in attempt.struck]
        for struck in report.struck:
            struck.went_on = attempts[struck.attempt].is_done
        if report.outcome != "well":
            report.output = "\n".join(
                f"--- attempt {a.number}, rank {rank}: exit {a.codes.get(rank)}\n{a.output(rank)[-2500:]}"
                for a in attempts
                for rank in a.codes
            )
        return report

    def _compare(self, attempts: list[Attempt], expect: Callable[[Layout], "Expected"]) -> str:
        last = attempts[-1]
        # ignore attempts before the last one that began at step 1: nothing was left of them, and it began anew with
        # the hosts that were present, as a new job would
        attempts = attempts[max((a.number for a in attempts if 1 in losses(a.folder, 0)), default=0) :]
        expected = expect(attempts[0].layout)
        if self.case.present:
            return self._compare_closely(attempts, expected) or self._look_for_remains(last)
        ranks = range(self.case.layout.size)
        later = next((a.number for a in attempts if _NONE_WHOLE in a.output(0)), None)
        if later is not None:  # from then on the samples differ, as in plain Lightning
            before = [attempt for attempt in attempts if attempt.number < later]
            if not any(attempt.has_damaged_the_only_snapshot for attempt in before):
                return f"attempt {later} went on from a checkpoint, though no host's only snapshot was damaged"
            attempts = before
        elif [pickle.loads((last.folder / f"result{rank}").read_bytes()) for rank in ranks] != expected.weights:
            return "other weights than without faults"
        for attempt in attempts:
            found = [losses(attempt.folder, rank) for rank in ranks]
            differ = [_differing(found, order) for order in itertools.permutations(expected.losses)]
            if all(differ):  # ranks may have swapped replicas if a card was down at the start
                return f"step {differ[0]} of attempt {attempt.number} has another loss than without faults"
        for rank in ranks:
            usage = last.folder / f"usage.{rank}"
            if usage.exists():
                told = [[float(n) for n in line.split()] for line in usage.read_text().splitlines()[1:]]
                if len(told) < 2:
                    return f"the last of {last.number + 1} starts was too short to tell what stays: see how the one before has ended"
                early, late = told[0], told[-1]
                if late[0] > early[0] or late[1] > early[1] or late[2] > early[2] + _MORE_MB:
                    return f"rank {rank} had {early} threads, open files and MB after a fifth of the steps, and {late} at the end"
        return self._look_for_remains(last)

    def _compare_closely(self, attempts: list[Attempt], expected: "Expected") -> str:
        """Compare within rounding after the layout has changed; for replicas, compare the mean of their losses."""
        found, known = (torch.load(folder / "weights.soak.0") for folder in (attempts[-1].folder, expected.folder))
        for name, value in known.items():
            if not torch.allclose(found[name], value, rtol=_CLOSE, atol=_CLOSE):
                return f"{name} differs by {float((found[name] - value).abs().max()):.2g} from that without faults"
        for attempt in attempts:
            of_ranks = [losses(attempt.folder, rank) for rank in attempt.codes]
            for step in set.intersection(*map(set, of_ranks)):
                (*place, _), mean = of_ranks[0][step], _mean_loss(of_ranks, step)
                (*known_place, _), known_mean = expected.losses[0][step], _mean_loss(expected.losses, step)
                if place != known_place or abs(mean - known_mean) > 10 * _CLOSE * known_mean:
                    return f"step {step} of attempt {attempt.number} is {place}, {mean:.9g}; without faults {known_place}, {known_mean:.9g}"
        return ""

    def _look_for_remains(self, last: Attempt) -> str:
        left = [str(path) for host in last.hosts for path in self.hosts.own[host].iterdir()]
        left += [str(path) for path in self.hosts.checkpoints.iterdir() if path.name.startswith(".")]
        return f"{left} is left" if left else ""


def _differing(found: Sequence[dict[int, Any]], known: Sequence[dict[int, Any]]) -> int | None:
    """Return the first step in which a rank's loss differs from the known one."""
    pairs = list(zip(found, known, strict=True))
    return min((step for own, other in pairs for step in own if own[step] != other[step]), default=None)


def _mean_loss(of_ranks: list[dict[int, Any]], step: int) -> float:
    return sum(float.fromhex(of_rank[step][-1]) for of_rank in of_ranks) / len(of_ranks)


def steps_of(layout: Layout) -> int:
    return int(layout.options.get("steps", STEPS))


def _limit_s(layout: Layout) -> float:
    return (_LIMIT_ON_NETWORK_S if layout.clusters else _LIMIT_S) + _STEP_S * steps_of(layout)


def losses(folder: Path, rank: int) -> dict[int, Any]:
    """Return what snapshot_cases has written down in one attempt, by step."""
    path = folder / f"losses.soak.{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return {step: rest for step, *rest in map(json.loads, lines)}


@dataclass
class Expected:
    """The result of a run without faults: every rank's digest of the weights, and its losses."""

    weights: list[str]
    losses: list[dict[int, Any]]
    folder: Path


def expected_of(layout: Layout, hosts: Hosts, folder: Path) -> Expected:
    """Run a layout without faults or snapshots."""
    folder.mkdir()
    options = layout.options | {"folder": str(folder), "name": "soak", "faults": []}
    options |= {"strategy": _ALIKE | layout.options["strategy"]}
    (folder / "payload").write_bytes(pickle.dumps(("soak_cases:run", options)))
    port = free_port()
    ranks = range(layout.size)
    for rank in ranks:
        hosts.start(folder, rank, layout, port, {})
    end = time.monotonic() + _limit_s(layout)
    while not all((folder / f"exit{rank}").exists() for rank in ranks):
        assert time.monotonic() < end, f"{layout.name} does not end without faults"
        time.sleep(0.02)
    codes = [int((folder / f"exit{rank}").read_text()) for rank in ranks]
    assert not any(codes), "".join((folder / f"log{rank}").read_text() for rank in ranks)
    found = [losses(folder, rank) for rank in ranks]
    assert all(sorted(of_rank) == list(range(1, steps_of(layout) + 1)) for of_rank in found)
    return Expected([pickle.loads((folder / f"result{rank}").read_bytes()) for rank in ranks], found, folder)
