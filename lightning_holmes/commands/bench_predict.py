"""lightning-holmes bench --predict and --partitions: compares predictions with runs on testbeds.

    lightning-holmes bench --predict --output runs/predictions
    lightning-holmes bench --predict --beds unequal slow-ethernet
    lightning-holmes bench --partitions

--predict runs every case of a bed (commands/benchmark/prediction_beds.py) and compares the step that the strategy predicted before
the first step with the measured one; earlier runs in the output folder are kept, so that beds can be run separately.
--partitions runs all partitions of one model on hosts of unequal speed, and the partition that the strategy chooses. Needs root.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_holmes.cluster.testbed import Testbed, TestbedOptions
from lightning_holmes.cluster.testbed.bed import raise_if_failed
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.commands.benchmark.bench_report import show_seconds
from lightning_holmes.commands.benchmark.prediction_beds import (
    PARTITION_BED,
    PREDICTION_BEDS,
    PROGRESS,
    PredictionBed,
)
from lightning_holmes.commands.benchmark.prediction_report import PredictedRun, PredictionReport
from lightning_holmes.commands.benchmark.workload import Workload
from lightning_holmes.commands.testbed import parse_rate
from lightning_holmes.errors import ConfigurationError

_WORKER = "lightning_holmes.commands.benchmark.prediction_worker"
_CPU_PERIOD_S = 0.01  # shorter than the default: a host with a share of a core is then closer to a slower core
_AT_LEAST, _WITHIN = 1.25, 1.05
_RUN_TIMEOUT = 0.1  # of the timeout of a contender, for each of a bed's runs


def run_predictions(
    names: Sequence[str] | None,
    make_topology: Any,
    *,
    rounds: int,
    output: Path,
    timeout_s: float,
    facts: dict[str, Any],
) -> PredictionReport:
    """Run the beds with these names (all by default); print, write and return the report.

    Args:
        make_topology: bench.make_topology.
        rounds: how often a bed's cases run, in turn.
    """
    beds = [bed for bed in PREDICTION_BEDS if names is None or bed.name in names]
    unknown = sorted(set(names or ()) - {bed.name for bed in beds})
    if unknown:
        known = ", ".join(bed.name for bed in PREDICTION_BEDS)
        raise ConfigurationError(f"--beds {unknown[0]}: there is no such bed; there are {known}")
    report = PredictionReport.load(output, facts)
    for bed in beds:
        in_turn = dataclasses.replace(bed, cases=bed.cases * rounds)
        print(f"{bed.name}: {len(in_turn.cases)} runs", flush=True)
        results = run_bed(in_turn, make_topology, profile="measure", timeout_s=timeout_s, keep=output / bed.name)
        report.add(
            [
                PredictedRun(
                    bed=bed.name,
                    name=result["name"],
                    model=_model(case.workload),
                    layers=tuple(result["layers"]),
                    predicted_s=result["predicted_s"],
                    measured_s=result["measured_s"],
                    schedule=result["schedule"],
                    round=index // len(bed.cases) + 1,
                )
                # strict=False: only the cases that were completed
                for index, (result, case) in enumerate(zip(results, in_turn.cases, strict=False))
                if result["predicted_s"] is not None
            ]
        )
        for path in report.write(output):
            print(f"written: {path}")
    report.print()
    return report


def run_partitions(make_topology: Any, *, output: Path, timeout_s: float, facts: dict[str, Any]) -> dict[str, Any]:
    """Run all partitions on the bed of unequal hosts; print, write and return the comparison."""
    results = run_bed(PARTITION_BED, make_topology, profile=None, timeout_s=timeout_s, keep=output / PARTITION_BED.name)
    data = {**facts, **compare_partitions(results)}
    for result in results:
        layers = ", ".join(map(str, result["layers"]))
        print(f"{result['name']:24} layers {layers:8} {show_seconds(result['measured_s'])} s a step")
    print(
        f"self_adapting is {data['uniform_over_self_adapting']:.2f}x as fast as uniform (wanted: {_AT_LEAST}), and takes "
        f"{data['self_adapting_over_best']:.2f}x the time of the best partition, {data['best']} (wanted: {_WITHIN})"
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / "partitions.json").write_text(json.dumps(data, indent=2) + "\n")
    print(f"written: {output / 'partitions.json'}")
    return data


def compare_partitions(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the chosen partition with the uniform and the best one. Runs with the same partition are the same program, whichever case
    they belong to, so that the time of a partition is the median of all its runs; a run of self_adapting counts with the time of the
    partition it chose."""
    runs: dict[tuple[int, ...], list[float]] = {}
    for result in results:
        runs.setdefault(tuple(result["layers"]), []).append(result["measured_s"])
    seconds = {layers: statistics.median(taken) for layers, taken in runs.items()}
    best = min(seconds, key=lambda layers: seconds[layers])

    def of(name: str) -> float:
        return statistics.fmean(seconds[tuple(r["layers"])] for r in results if r["name"] == name)

    data: dict[str, Any] = {
        "runs": [{"name": r["name"], "layers": list(r["layers"]), "measured_s": r["measured_s"]} for r in results],
        "seconds": {", ".join(map(str, layers)): taken for layers, taken in seconds.items()},
        "best": ", ".join(map(str, best)),
        "uniform_over_self_adapting": of("uniform") / of("self_adapting"),
        "self_adapting_over_best": of("self_adapting") / seconds[best],
    }
    data["missed"] = []
    if data["uniform_over_self_adapting"] < _AT_LEAST:
        data["missed"].append(
            f"self_adapting is {data['uniform_over_self_adapting']:.2f}x as fast as uniform, wanted at least {_AT_LEAST}"
        )
    if data["self_adapting_over_best"] > _WITHIN:
        data["missed"].append(
            f"self_adapting takes {data['self_adapting_over_best']:.2f}x the time of the best partition, wanted at most {_WITHIN}"
        )
    return data


def run_bed(
    bed: PredictionBed, make_topology: Any, *, profile: str | None, timeout_s: float, keep: Path | None = None
) -> list[dict[str, Any]]:
    """Run a bed's cases; return rank 0's result of each, with measured_s.

    Args:
        profile: the strategy's argument for all cases, unless a case sets it; None: the cases decide.
        timeout_s: for up to ten runs; proportionally more for more runs.
        keep: a folder for the timelines.
    """
    topology: Topology = make_topology(
        bed.hosts,
        devices=1,
        fast_bytes_per_s=parse_rate(bed.fast, source="fast"),
        ethernet_bytes_per_s=parse_rate(bed.ethernet, source="ethernet"),
    )
    shares = {
        host.name: share
        for cluster, share in zip(topology.clusters, bed.cpu_shares, strict=True)
        for host in cluster.hosts
    }
    num_hosts = sum(bed.hosts)
    cases = [
        {
            "name": case.name,
            "workload": case.workload.to_json(),
            "arguments": {**({} if profile is None else {"profile": profile}), **case.arguments},
        }
        for case in bed.cases
    ]
    timeout_s *= max(1.0, _RUN_TIMEOUT * len(cases))
    options = TestbedOptions(host_cpu_shares=shares, cpu_period_s=_CPU_PERIOD_S, precedence=True)
    with Testbed(topology, options) as testbed, tempfile.TemporaryDirectory(prefix="holmes-bench-") as name:
        folder = Path(name)
        written = {"topology": topology.to_yaml(), "num_hosts": num_hosts, "cases": cases}
        (folder / "bed.json").write_text(json.dumps(written))
        results = testbed.torchrun(
            ["-m", _WORKER, str(folder)],
            nproc_per_node=1,
            env={"WANDB_MODE": "offline", "PYTHONWARNINGS": "ignore"},
            folder=folder,
            timeout_s=timeout_s,
            echo=_echo_progress,
        )
        written_by = [folder / f"rank{rank}.json" for rank in range(num_hosts)]
        ranks: list[list[dict[str, Any]]] = [
            json.loads(path.read_text()) if path.exists() else [] for path in written_by
        ]
    complete = min(len(of_rank) for of_rank in ranks)
    if complete == 0:
        raise_if_failed(results, timeout_s)
    if complete < len(bed.cases):
        print(f"{bed.name}: {complete} of {len(bed.cases)} runs came to their end within {timeout_s:g} s", flush=True)
    ranks = [of_rank[:complete] for of_rank in ranks]
    found = []
    for of_ranks in zip(*ranks, strict=True):
        first = next(entry for entry in of_ranks if "timeline" in entry)
        measured = max(_undisturbed(entry["steps_s"]) for entry in of_ranks)
        found.append({**first, "measured_s": measured})
        if keep is not None:
            _keep(keep, first)
    return found


def _echo_progress(_: str, line: str) -> None:
    if line.startswith(PROGRESS):
        print(line.removeprefix(PROGRESS).strip(), flush=True)


def _undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile, since other work on the machine only makes steps longer."""
    return statistics.quantiles(seconds, n=4)[0] if len(seconds) > 1 else seconds[0]


def _keep(folder: Path, result: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() else "-" for c in str(result["name"]))
    (folder / f"{name}.json").write_text(json.dumps({**result["timeline"], "notes": result["notes"]}))


def _model(workload: Workload) -> str:
    fields = dataclasses.asdict(workload)
    return f"GPT {fields['hidden_size']} x {fields['num_layers']}, {fields['batch_size']} x {fields['sequence_length']}"
