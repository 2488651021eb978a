"""Compare random modules in random layouts with plain Lightning (with DDP, where replicas divide the batch).

    python tests/fuzz/fuzz.py 0:500                    # cases by their seeds; --minutes 9, --shrink
    python tests/fuzz/fuzz.py "state=object stages=2"  # one case by its traits

Two verdicts are allowed: equal; or refused by name before a batch gave other numbers, with a cure that gives equal when it
is followed. A third, a warning that names microbatches, only where the case sets their number; or one that names a collective of
torch.distributed in a hook. Void: plain Lightning refuses the case, too.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
from fuzz_runs import Pool, Record, Run
from torch import Tensor
from traits import AXES, LAYOUT, OPTIONS, Case, draw, settle

TOLERANCES = {"double": (2e-6, 1e-8), "32-true": (1e-3, 2e-5), "bf16-mixed": (5e-2, 2e-2)}
"""Relative and absolute; logged values are single precision in any case."""
_ARGUMENT = re.compile(r'\b(\w+)=(?:"([^"]+)"|\'([^\']+)\'|(\d+|True|False))')
CURES: tuple[tuple[str, Case], ...] = (
    (
        "with the default sharding",
        {"stages": "1", "microbatches": "1", "schedule": "auto", "sharding": "none", "nodes": "0", "resume": "same"},
    ),
    ("uses self.logger directly", {"later": "log"}),
    ("reads .grad of a parameter", {"later": "log"}),
    ("overrides optimizer_zero_grad", {"override": "none"}),
    ("change options in on_train_batch_start", {"later": "never", "habit": "decay"}),
    ("between accumulated batches", {"accumulate": "1"}),
    ("use GroupNorm or LayerNorm", {"layers": "norm", "head": "linear"}),
    ("calls self.all_gather", {"stages": "1", "microbatches": "1", "resume": "same"}),
    ("keep it on the module", {"state": "list"}),
)
"""Words of refusals whose cure is a change of the module, and the traits of the changed one."""
ARGUMENTS = {
    "pipeline_parallel_size": "stages",
    "num_chunks": "chunks",
    "num_microbatches": "microbatches",
    "eval_num_microbatches": "evaluation microbatches",
    "sharding": "sharding",
    "optimizer_nodes": "nodes",
    "schedule": "schedule",
    "tensor_parallel_size": "tensor",
    "accumulate_grad_batches": "accumulate",
}
OTHER_LAYOUTS: dict[str, Case] = {
    "one": {"stages": "1", "chunks": "auto", "schedule": "auto", "sharding": "none", "nodes": "0"},
    "stages": {"stages": "2", "chunks": "auto", "schedule": "auto", "sharding": "none", "nodes": "0"},
    "shards": {"stages": "1", "chunks": "auto", "schedule": "auto", "sharding": "parameters", "nodes": "0"},
    "nodes": {"stages": "1", "chunks": "auto", "schedule": "auto", "sharding": "none", "nodes": "1"},
}


@dataclass
class Outcome:
    """What a case gave. ``verdict``: equal, refused, warned, void, or a failure: different, crashed, uncured."""

    verdict: str
    why: str = ""
    cures: list[Case] = field(default_factory=list)
    late: int = 0

    @property
    def fails(self) -> bool:
        return self.verdict in ("different", "crashed", "uncured")


def arguments(case: Case) -> tuple[int, dict[str, Any]]:
    """Return the number of processes and HolmesStrategy's arguments."""
    given = {axis: case.get(axis, AXES[axis][0]) for axis in LAYOUT}
    stages, tensor = int(given["stages"]), int(given["tensor"])
    numbers = ("num_chunks", "num_microbatches", "eval_num_microbatches")
    options: dict[str, Any] = {
        "pipeline_parallel_size": stages,
        "tensor_parallel_size": tensor,
        "schedule": given["schedule"],
        "sharding": "auto" if given["nodes"] != "0" else given["sharding"],
        "optimizer_nodes": int(given["nodes"]),
        **{name: int(given[ARGUMENTS[name]]) for name in numbers if given[ARGUMENTS[name]] != "auto"},
        "save_distributed_checkpoint": given["format"] == "folder",
        **OPTIONS[given["option"]],
    }
    if given["nodes"] != "0":
        options.pop("gradient_sync", None)  # nodes sum
    return stages * tensor * int(given["replicas"]), options


def differences(expected: dict[str, Any], found: dict[str, Any], precision: str) -> list[str]:
    """Return a line for each value that differs, losses first."""
    relative, absolute = TOLERANCES[precision]
    lines = []
    for name in dict.fromkeys([*expected, *found]):
        if name not in expected or name not in found:
            lines.append(f"{name}: only {'in plain Lightning' if name in expected else 'here'}")
            continue
        one, other = expected[name], found[name]
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            if one != other:
                lines.append(f"{name}: {other!r} for {one!r}"[:200])
        elif one.shape != other.shape:
            lines.append(f"{name}: shape {list(other.shape)} for {list(one.shape)}")
        elif not torch.allclose(other, one, rtol=relative, atol=absolute, equal_nan=True):
            worst = (other - one).abs().flatten().argmax()
            lines.append(f"{name}: {other.flatten()[worst]:.7g} for {one.flatten()[worst]:.7g}")
    return sorted(lines, key=lambda line: "/loss" not in line)


def judge(case: Case, expected: Record, records: list[Record]) -> Outcome:
    """Compare a run on all ranks with the reference's record."""
    first, failed = records[0], [record for record in records if record.error]
    named = next((record for record in failed if record.is_refusal), None)
    if failed and (named is None or any(not (r.is_refusal or r.is_remote) for r in records)):
        worst = next((r for r in failed if not r.is_refusal and not r.is_remote), failed[0])
        return Outcome("crashed", worst.error if worst.error != "hung" else f"hung after {failed[0].error}")
    # of a run that was refused at a later batch, the batches before it count
    ended = {
        name
        for name in expected.values
        if not name.startswith("/batches/") or int(name.split("/")[2]) >= first.num_batches
    }
    wanted = {n: v for n, v in expected.values.items() if named is None or n not in ended}
    found = {n: v for n, v in first.values.items() if named is None or n.startswith("/batches/")}
    lines = differences(wanted, found, case.get("precision", "double"))
    told = [text for record in records for text in record.warnings if "microbatch" in text]
    raw = [text for record in records for text in record.warnings if "calls torch.distributed." in text]
    if lines and raw and all("/seen/" in line for line in lines):
        return Outcome("warned", raw[0])
    if lines and told and "2" in (case.get("microbatches"), case.get("evaluation microbatches")):
        return Outcome("warned", told[0])
    late = "" if named is None else f"; only then refused: {named.error}"
    if lines:
        warned = f" [warned: {told[0]}]" if told else ""
        return Outcome("different", f"{len(lines)} values: {'; '.join(lines[:4])}{warned}{late}")
    return Outcome("equal") if named is None else Outcome("refused", named.error, late=first.num_batches)


def try_layout(jobs: Pool, case: Case) -> Outcome:
    """Run a case here and in plain Lightning; then, if it saves in mid-run, resume both from their own checkpoints."""
    replicas = int(case.get("replicas", "1"))
    resumed = case | OTHER_LAYOUTS.get(case.get("resume", "same"), {})
    ours: str | None = None
    theirs: str | None = None
    with tempfile.TemporaryDirectory(prefix="holmes-fuzz-", ignore_cleanup_errors=True) as name:
        for number, part in enumerate((case, resumed)):
            folders = [Path(name, f"{side}{number}") for side in ("plain", "here")]
            world_size, options = arguments(part)
            plain = Run(case=case, folder=str(folders[0]), resume=theirs)
            here = Run(case=case, folder=str(folders[1]), strategy=options, resume=ours)
            with ThreadPoolExecutor(2) as both:
                reference, records = both.map(jobs.run, (plain, here), (replicas, world_size))
            if any(record.error for record in reference):
                return Outcome("void", reference[0].error)
            outcome = judge(part, reference[0], records)
            if number:
                outcome.why = f"resumed: {outcome.why}"
            theirs, ours = reference[0].checkpoint, records[0].checkpoint
            if outcome.verdict != "equal" or not (ours and theirs):
                break
    return outcome


def cures_in(why: str, case: Case) -> list[Case]:
    """Return the changes of a case that a refusal offers, those that it names last first."""
    found: list[Case] = [{"resume": "same"}] if why.startswith("resumed") else []
    for match in reversed(list(_ARGUMENT.finditer(why))):
        axis = ARGUMENTS.get(match[1])
        value = match[2] or match[3] or match[4]
        if axis is not None and value in AXES[axis] and case.get(axis, AXES[axis][0]) != value:
            found.append({axis: value} | ({"schedule": "auto"} if axis == "chunks" else {}))
    return [cure for words, cure in CURES if words in why] + found


def examine(jobs: Pool, case: Case) -> Outcome:
    """Return the outcome of a case; if it is refused, after following what the refusal offers, one cure after the other."""
    outcome = try_layout(jobs, case)
    if outcome.verdict != "refused":
        return outcome
    tried, why = [case], outcome.why
    while len(tried) < 6:
        cures = [settle(tried[-1] | cure) for cure in cures_in(why, tried[-1])]
        cure = next((cure for cure in cures if cure not in tried), None)
        if cure is None:
            return Outcome(
                "uncured", f"{'no cure that is known' if len(tried) == 1 else 'refused again'}: {why}", tried[1:]
            )
        tried.append(cure)
        cured = try_layout(jobs, cure)
        if cured.verdict in ("equal", "warned", "void"):
            return Outcome("refused", outcome.why, tried[1:], outcome.late)
        if cured.verdict != "refused":
            return Outcome("uncured", f"{outcome.why} -> {cure}: {cured.verdict}: {cured.why}", tried[1:])
        why = cured.why
    return Outcome("uncured", f"refused again: {why}", tried[1:])


def shrink(jobs: Pool, case: Case, verdict: str) -> Case:
    """Return a case with as few traits as possible that still has this verdict, a failure."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for axis in list(case):
            fewer = settle({a: value for a, value in case.items() if a != axis})
            if len(fewer) < len(case) and examine(jobs, fewer).verdict == verdict:
                case, is_smaller = fewer, True
                break
    return case


def line_of(case: Case) -> str:
    """Return a case as the command line takes it."""
    return ", ".join(f"{axis}={value}" for axis, value in case.items())


def parse(line: str) -> Case:
    """Return the case of a line of line_of."""
    case = dict(part.strip().split("=", 1) for part in line.split(",") if part.strip())
    for axis, value in case.items():
        if value not in AXES.get(axis, ()):
            raise SystemExit(f"{axis}={value}: the axes are {AXES}")
    return case


def reason(why: str) -> str:
    """Return a refusal's words without names and numbers, so that equal reasons count together."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+|\S+\.\S+", "_", why.split("\n")[0])[:110]


def main() -> None:
    """Run the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="0:500, 17, or traits: axis=value, axis=value")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after this time")
    parser.add_argument("--shrink", action="store_true", help="look for the fewest traits of each failure")
    parser.add_argument("--log", type=Path, help="append a line of JSON for each case")
    given = parser.parse_args()
    cases: dict[str, Case] = {}
    for word in given.cases:
        if "=" in word:
            cases[word] = settle(parse(word))
        else:
            first, _, last = word.partition(":")
            for seed in range(int(first), int(last or int(first) + 1)):
                cases[str(seed)] = draw(seed)
    began, verdicts, reasons, outcomes = time.monotonic(), Counter[str](), Counter[str](), []
    with Pool() as jobs:
        for name, case in cases.items():
            if time.monotonic() - began > 60 * given.minutes:
                print(f"stopped before {name}")
                break
            started = time.monotonic()
            outcome = examine(jobs, case)
            seconds = time.monotonic() - started
            print(f"{name}: {outcome.verdict} ({seconds:.1f} s) {line_of(case)}", flush=True)
            if outcome.verdict not in ("equal", "warned"):
                print(f"    {outcome.why[:600]}", flush=True)
            if outcome.fails and given.shrink:
                smallest = shrink(jobs, case, outcome.verdict)
                print(f'    smallest: "{line_of(smallest)}": {examine(jobs, smallest).why[:600]}', flush=True)
            verdicts[outcome.verdict] += 1
            if outcome.verdict == "refused":
                reasons[reason(outcome.why)] += 1
            outcomes.append((case, outcome))
            if given.log is not None:
                with given.log.open("a") as log:
                    log.write(json.dumps({"name": name, "case": case, "seconds": seconds} | vars(outcome)) + "\n")
    print(f"{sum(verdicts.values())} cases in {time.monotonic() - began:.0f} s: {dict(verdicts.most_common())}")
    for why, count in reasons.most_common():
        print(f"  {count:4} refused: {why}")
    refused = {
        trait for case, outcome in outcomes if outcome.verdict in ("refused", "uncured") for trait in case.items()
    }
    tried = {trait for case, outcome in outcomes if outcome.verdict in ("equal", "warned") for trait in case.items()}
    print("never refused:", line_of_traits(tried - refused))
    if any(outcome.fails for _, outcome in outcomes):
        raise SystemExit(1)


def line_of_traits(traits: set[tuple[str, str]]) -> str:
    """Return traits of any number of cases, by axis."""
    found: dict[str, list[str]] = {}
    for axis, value in sorted(traits):
        found.setdefault(axis, []).append(value)
    return "; ".join(f"{axis}: {', '.join(values)}" for axis, values in found.items())


if __name__ == "__main__":
    main()
