"""The long form of the soak: random faults on runs of a tiny model, one after the other, for a given time.

    python tests/soak/soak.py --minutes 60 --seed 1          # make soak
    python tests/soak/soak.py --seed 1234 --runs 1           # replay a seed, once for each kind of cases
    python tests/soak/soak.py --seed 1234 --runs 1 --only network

Prints a line per run and, at the end, the table of faults. Exits with 1 if a run did not end like one without faults.
"""

import argparse
import functools
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests), str(tests / "strategy")]

from agent import Expected, Report, Run, expected_of
from faults import KINDS, KINDS_OF_HOSTS, KINDS_OF_LINKS, Case, Layout, draw, draw_elastic, draw_on_network, lasting
from soak_hosts import Hosts

_DRAWN = {"hosts": (draw, lasting), "network": (draw_on_network, None), "elastic": (draw_elastic, None)}
_expected: dict[tuple[str, int], Expected] = {}


def soak(case: Case, folder: Path) -> Report:
    """Run a case in a new folder."""
    with Hosts(folder, case.layout) as hosts:
        return Run(case, hosts, folder).go(functools.partial(_expect, hosts))


def _expect(hosts: Hosts, layout: Layout) -> Expected:
    key = layout.name, layout.hosts
    if key not in _expected:
        _expected[key] = expected_of(layout, hosts, Path(tempfile.mkdtemp(dir=hosts.folder.parent)) / "expected")
    return _expected[key]


def table(reports: Sequence[Report]) -> str:
    """Format the table of all faults and their consequences."""
    struck = [s for report in reports for s in report.struck if report.outcome == "well"]
    lines = [
        f"{len(reports)} runs, {sum(r.attempts for r in reports)} starts, {sum(len(r.struck) for r in reports)} faults; "
        f"{sum(r.outcome != 'well' for r in reports)} runs not as without faults",
        f"{'fault':>20} {'number':>7} {'went on':>7} {'restarted':>10}",
    ]
    for kind in (*KINDS, *KINDS_OF_LINKS, *KINDS_OF_HOSTS, "all"):
        of_kind = [s for s in struck if kind in (s.fault.kind, "all")]
        went_on = sum(s.went_on for s in of_kind)
        lines.append(f"{kind:>20} {len(of_kind):7} {went_on:7} {len(of_kind) - went_on:10}")
    return "\n".join(lines)


def _tell(report: Report) -> Report:
    print(report, report.output, sep="\n" if report.output else "", flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--runs", type=int, help="so many at the most")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--steps", type=int, help="before the others, one run of so many steps, whose memory and threads stay"
    )
    parser.add_argument("--only", choices=sorted(_DRAWN), help="one of the kinds of cases")
    given = parser.parse_args()
    reports: list[Report] = []
    end = time.monotonic() + given.minutes * 60
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the file systems are unmounted
    with tempfile.TemporaryDirectory(prefix="holmes-soak-") as folder:
        drawn = {name: both for name, both in _DRAWN.items() if given.only in (None, name)}
        for name, (_, lasts) in drawn.items():
            if lasts is None or not given.steps:
                continue
            reports.append(_tell(soak(lasts(given.steps), Path(folder) / f"lasting.{name}")))
        seeds = itertools.count(given.seed) if given.runs is None else range(given.seed, given.seed + given.runs)
        for seed, name in ((seed, name) for seed in seeds for name in drawn):
            if time.monotonic() > end:
                break
            reports.append(_tell(soak(drawn[name][0](seed), Path(folder) / f"{seed}.{name}")))
    print(table(reports))
    return any(report.outcome != "well" for report in reports)


if __name__ == "__main__":
    sys.exit(main())
