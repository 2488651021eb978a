"""The parts of `make gpu`: each launches ranks that share one card, and prints a row for each thing that it has compared.

Baseline: plain Lightning in one process on the same card. A row's ``ok`` is None where something is only told. With ``tiny``, the same
code runs at small sizes on the CPU, where times and memory are only told.
"""

import json
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from launch import Worker, launch_raw

GIB = 2**30
H100_FLOPS = 989e12
"""Dense bf16 operations a second of an H100 (SXM), for the model FLOPs utilisation."""
SHARDED_OPTIMIZER: dict[str, Any] = {"sharding": "optimizer"}
SHARDED_PARAMETERS: dict[str, Any] = {"sharding": "parameters"}
LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one process": (1, {"num_microbatches": 2}),
    "optimizer node": (1, {"num_microbatches": 2, "optimizer_nodes": 1}),
    "1f1b, 2 stages": (2, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
    "interleaved, 2 x 2 stages": (2, {"pipeline_parallel_size": 2, "num_microbatches": 4, "num_chunks": 2}),
    "zero-bubble, 2 stages": (2, {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "zero_bubble"}),
    "breadth-first, 2 x 2 stages": (
        2,
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "num_chunks": 2, "schedule": "breadth_first"},
    ),
    "2 replicas": (2, {"num_microbatches": 2}),
    "2 replicas, sharded optimizer": (2, SHARDED_OPTIMIZER),
    "2 replicas, sharded parameters": (2, {"num_microbatches": 2, **SHARDED_PARAMETERS}),
    "4 stages": (4, {"pipeline_parallel_size": 4, "num_microbatches": 4}),
    "2 stages x 2 replicas": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "2 x 2 stages x 2 replicas, sharded parameters": (
        4,
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "num_chunks": 2, **SHARDED_PARAMETERS},
    ),
}
_LARGE_ONLY = {"2 replicas", "2 stages x 2 replicas", "interleaved, 2 x 2 stages"}
"""Layouts that the tiny run leaves out, since other layouts contain what they are made of."""
TOLERANCES = {"32-true": 1e-4, "bf16-mixed": 2e-2, "bf16-true": 4e-2, "16-mixed": 2e-2}
"""Of losses, relative: 8 bits of mantissa and sums in another order; under 16-mixed the first steps may overflow and be skipped."""
MOVED = 1e-3
"""The largest difference between final weights in fp32, relative to how far they moved: sums are made in another order."""


@dataclass
class Script:
    """One run of the script.

    Attributes:
        tiny: small sizes on the CPU.
        out: where ``PART.json`` is written, after each row.
    """

    tiny: bool
    out: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    part: str = ""
    deadline: float = 0.0

    @property
    def patience(self) -> float:
        """The factor of all time limits: the tiny run shares its cores with others."""
        return 5.0 if self.tiny else 1.0

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def row(self, what: str, *, ok: bool | None = None, **figures: Any) -> None:
        """Print a row and keep it."""
        told = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in figures.items()}
        verdict = {True: "ok", False: "NOT OK", None: "told"}[ok]
        print(f"{self.part:10} {verdict:6} {what:50} " + "  ".join(f"{n}={v}" for n, v in told.items()), flush=True)
        self.rows.append({"part": self.part, "what": what, "ok": ok, **figures})
        mine = [row for row in self.rows if row["part"] == self.part]
        (self.out / f"{self.part}.json").write_text(json.dumps(mine, indent=1, default=str))

    def launch(
        self, world_size: int, target: str, payload: dict[str, Any], *, seconds: float, threads: int = 1
    ) -> tuple[list[Worker], Path]:
        """Run ``target`` of gpu_workers on ranks that share the card; returns the workers and their folder."""
        folder = Path(tempfile.mkdtemp(prefix=f"{self.part}-", dir=self.out))

        def environment(rank: int) -> dict[str, str]:
            return {
                "NCCL_HOSTID": f"holmes-{rank}",  # NCCL refuses two ranks on one card of one host
                "NCCL_SOCKET_IFNAME": "lo",
                "LOCAL_RANK": "0",
                "GROUP_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "1",
                "OMP_NUM_THREADS": str(threads),
                "TMPDIR": str(folder),
            }

        limit = max(1.0, min(seconds * self.patience, self.deadline - time.monotonic()))
        payload = payload | {"folder": str(folder)}
        workers = launch_raw(
            world_size, f"gpu_workers:{target}", payload, timeout_s=limit, folder=folder, environment=environment
        )
        return workers, folder

    def result(self, target: str, payload: dict[str, Any], *, world_size: int = 1, **options: Any) -> list[Any]:
        """Like :meth:`launch`, but return what the ranks returned.

        Raises:
            RuntimeError: a rank failed, or did not end in time.
        """
        workers, folder = self.launch(world_size, target, payload, **options)
        for rank, worker in enumerate(workers):
            if worker.exit_code != 0:
                raise RuntimeError(
                    f"rank {rank} ended with {worker.exit_code} (None: not in time)\n{worker.output[-1500:]}"
                )
        found = [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]
        shutil.rmtree(folder, ignore_errors=True)
        return found


def small(script: Script, **about: Any) -> dict[str, Any]:
    """A case of a model small enough to compare all weights."""
    width = 32 if script.tiny else 128
    sizes = {"vocab_size": 64, "hidden_size": width, "num_layers": 4, "num_heads": 4, "sequence_length": 16}
    case = {"model": "gpt", "sizes": sizes, "batch": 8, "steps": 3, "device": script.device, "holmes": None}
    sizes |= about.pop("sizes", {})
    return case | {"sizes": sizes} | about


# parity


def parity(script: Script) -> None:
    """Losses and final weights of every layout in fp32, and of each precision and kind of module on some of them."""
    layouts = [name for name in LAYOUTS if not (script.tiny and name in _LARGE_ONLY)]
    some = ["one process", "1f1b, 2 stages", "2 replicas, sharded parameters"]
    tables: list[tuple[str, dict[str, Any], list[str]]] = [
        ("fp32", {"precision": "32-true"}, layouts),
        ("bf16-mixed", {"precision": "bf16-mixed"}, [some[1]] if script.tiny else layouts),
        (
            "bf16-true",
            {"precision": "bf16-true"},
            some[1:2] if script.tiny else [*some, "2 replicas, sharded optimizer"],
        ),
        ("checkpointed", {"sizes": {"checkpoints": True}}, some[1:2] if script.tiny else some),
        ("Llama, SDPA", {"model": "llama"}, some[1:2] if script.tiny else some),
    ]
    if not script.tiny:  # fp16 needs a card, and a compiler takes minutes on two cores
        tables.insert(2, ("16-mixed", {"precision": "16-mixed"}, [*some, "optimizer node", "4 stages"]))
        tables.append(("compiled layers", {"sizes": {"compiles": True}}, some))
    baselines = {name: small(script, **about) for name, about, _ in tables}
    known = run_fits(script, 1, baselines, seconds=100)
    by_size: dict[int, dict[str, dict[str, Any]]] = {1: {}, 2: {}, 4: {}}
    for name, about, chosen in tables:
        for layout in chosen:
            size, holmes = LAYOUTS[layout]
            by_size[size][f"{name}: {layout}"] = small(script, **about, holmes=holmes)
    for size, cases in by_size.items():
        run_fits(script, size, cases, seconds=100, told=lambda name, found: compare(script, name, found, known))


def run_fits(
    script: Script,
    world_size: int,
    cases: dict[str, dict[str, Any]],
    *,
    seconds: float,
    told: Callable[[str, list[dict[str, Any]]], None] = lambda name, found: None,
) -> dict[str, dict[str, Any]]:
    """Run cases in one launch, or in several where one fails; returns rank 0's results by name. ``told(name, results of all ranks)``."""
    left, results = dict(cases), {}
    while left and time.monotonic() < script.deadline:
        workers, folder = script.launch(world_size, "fits", {"cases": list(left.values())}, seconds=seconds)
        for index, name in enumerate(list(left)):
            paths = [folder / f"fit{index}-rank{rank}" for rank in range(world_size)]
            found = [torch.load(p, weights_only=False) if p.exists() else {} for p in paths]
            del left[name]
            for rank, result in enumerate(found):
                if not result:
                    result["error"] = f"rank {rank} ended with {workers[rank].exit_code}: {workers[rank].output[-800:]}"
            results[name] = found[0]
            told(name, found)
            if any("error" in result for result in found):
                break
        shutil.rmtree(folder, ignore_errors=True)
    for name in left:
        told(name, [{"error": "no time was left for it"}])
    return results


def compare(script: Script, name: str, found: list[dict[str, Any]], known: dict[str, dict[str, Any]]) -> None:
    """Compare a case's losses and weights on every rank with plain Lightning's."""
    table = name.split(": ")[0]
    plain = known.get(table, {"error": "plain Lightning did not run"})
    for result in (plain, *found):
        if "error" in result:
            script.row(name, ok=False, error=result["error"].strip()[-800:])
            return
    tolerance = TOLERANCES.get(table, TOLERANCES["32-true"])
    losses = max(
        abs(mine - theirs) / abs(theirs)
        for result in found
        for mine, theirs in zip(result["losses"], plain["losses"], strict=True)
    )
    moved = max(float((r["moved"] - plain["moved"]).norm() / plain["moved"].norm()) for r in found)
    ok = losses <= tolerance and (tolerance > 1e-4 or moved <= MOVED) and bool(plain["moved"].norm() > 0)
    script.row(name, ok=ok, losses=losses, weights=moved, tolerance=tolerance)


# checkpoints and faults


def checkpoint(script: Script) -> None:
    """A fit that is stopped after an epoch and resumed in another layout has the losses of plain Lightning."""
    pairs = [
        ("1f1b, 2 stages", "2 replicas"),
        ("2 replicas, sharded parameters", "1f1b, 2 stages"),
        ("2 replicas", "2 replicas, sharded optimizer"),
    ]
    case = small(script, steps=2)
    (plain,) = script.result("stop_and_resume", {"case": case, "layouts": [None, None]}, seconds=40)
    for pair in pairs[1:2] if script.tiny else pairs:
        layouts = [LAYOUTS[name][1] for name in pair]
        try:
            found = script.result("stop_and_resume", {"case": case, "layouts": layouts}, world_size=2, seconds=50)
        except RuntimeError as error:
            script.row(" -> ".join(pair), ok=False, error=str(error))
            continue
        losses = max(abs(a - b) / abs(b) for one in found for a, b in zip(one["losses"], plain["losses"], strict=True))
        metrics = max(abs(a - b) / abs(b) for f in found for a, b in zip(f["metrics"], plain["metrics"], strict=True))
        script.row(" -> ".join(pair), ok=max(losses, metrics) <= 1e-4, losses=losses, val_loss=metrics)


def faults(script: Script) -> None:
    """A killed rank ends the others within 30 s, with an error that names it."""
    for name in ["2 replicas"] if script.tiny else ["1f1b, 2 stages", "2 replicas"]:
        case = small(script, steps=2000, holmes=LAYOUTS[name][1])
        workers, folder = script.launch(2, "fit_with_a_kill", {"case": case}, seconds=60)
        survivor, killed = workers
        seconds = survivor.seconds - killed.seconds
        told = [line for line in survivor.output.splitlines() if "Error" in line and "rank 1" in line]
        ok = killed.exit_code == -9 and survivor.exit_code not in (0, None) and bool(told) and seconds <= 30
        error = told[-1][:300] if told else survivor.output[-800:]
        script.row(f"{name}, rank 1 is killed", ok=ok, seconds=seconds, exit_code=survivor.exit_code, error=error)
        shutil.rmtree(folder, ignore_errors=True)


# speed

GPT_350M = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_layers": 24,
    "num_heads": 16,
    "sequence_length": 1024,
    "fuses": True,
}
GPT_1B = GPT_350M | {"hidden_size": 2048, "num_layers": 18, "sequence_length": 2048}
TINY = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "sequence_length": 16}


def step_time(script: Script) -> None:
    """One process: a step of the 350 M model, and of a compiled one, against plain Lightning's."""
    _speed(script, "GPT 350M", GPT_350M, batch=32, goals={False: None, True: None})


def mfu(script: Script) -> None:
    """The same of the 1 B model, with the share of the card's FLOPs: at least 40 % compiled, 30 % eager."""
    _speed(script, "GPT 1B", GPT_1B, batch=8, goals={False: 0.3, True: 0.4})


def _speed(script: Script, name: str, sizes: dict[str, Any], *, batch: int, goals: dict[bool, float | None]) -> None:
    for compiles in [False] if script.tiny else [False, True]:
        case = small(
            script,
            sizes=(TINY if script.tiny else sizes) | {"compiles": compiles},
            batch=2 if script.tiny else batch,
            steps=6 if script.tiny else 14,
            precision="bf16-mixed",
        )
        what = f"{name}, bf16-mixed{', compiled layers' if compiles else ''}"
        try:
            payload = {"case": case, "holmes": {"num_microbatches": 1}, "rounds": 1 if script.tiny else 2, "warm_up": 3}
            (found,) = script.result("step_times", payload, seconds=150)
        except RuntimeError as error:
            script.row(what, ok=False, error=str(error))
            continue
        plain, ours = (statistics.median(found["seconds"][key]) for key in ("plain", "holmes"))
        width, length, layers = (case["sizes"][key] for key in ("hidden_size", "sequence_length", "num_layers"))
        # 6 N for the weights, and causal attention's products: half of 12 L D S
        flops = (6 * found["parameters"] + 6 * layers * width * length) * found["batch"] * length
        share, goal = flops / ours / H100_FLOPS, goals[compiles]
        ok = ours / plain <= 1.02 and (goal is None or share >= goal)
        script.row(
            what,
            ok=None if script.tiny else ok,
            step_s=ours,
            plain_s=plain,
            ratio=ours / plain,
            mfu=share,
            mfu_plain=flops / plain / H100_FLOPS,
            batch=found["batch"],
            peak_gib=found["peak"]["holmes"] / GIB,
            plain_gib=found["peak"]["plain"] / GIB,
        )


def syncs(script: Script) -> None:
    """In steps of one process, and of the first, a middle and the last stage, nothing makes the host wait for the device."""
    chosen = {
        "3 stages": (3, {"pipeline_parallel_size": 3, "num_microbatches": 3}),
        "one process": LAYOUTS["one process"],
        "2 replicas, sharded parameters": LAYOUTS["2 replicas, sharded parameters"],
    }
    for name, (size, holmes) in list(chosen.items())[: 1 if script.tiny else None]:
        case = small(script, steps=8, batch=6, precision="bf16-mixed", holmes=holmes)
        try:
            found = script.result("host_syncs", {"case": case}, world_size=size, seconds=60)
        except RuntimeError as error:
            script.row(f"{name}: waits of the host in two steps", ok=False, error=str(error))
            continue
        for rank, places in enumerate(found):
            script.row(
                f"{name}, rank {rank}: waits of the host in two steps",
                ok=None if script.tiny else not places,
                count=len(places),
                places=sorted(set(places))[:6],
            )


def sockets(script: Script) -> None:
    """Four ranks on the card, whose host names differ, so that NCCL goes through sockets: losses as plain Lightning's, and the timeline."""
    case = small(script, steps=6)
    timelines = script.out / "timelines"
    holmes = LAYOUTS["2 stages x 2 replicas"][1] or {}
    (plain,) = script.result("monitored", {"case": case, "timelines": str(timelines)}, seconds=20)
    payload = {"case": case | {"holmes": holmes | {"monitor": True}}, "timelines": str(timelines)}
    found = script.result("monitored", payload, world_size=4, seconds=30)
    losses = max(abs(a - b) / abs(b) for one in found for a, b in zip(one["losses"], plain["losses"], strict=True))
    written = sorted(str(path.relative_to(script.out)) for path in timelines.rglob("*.json"))
    what, step_s = "2 stages x 2 replicas through sockets", statistics.median(found[0]["seconds"])
    script.row(what, ok=losses <= 1e-4 and bool(written), losses=losses, step_s=step_s, timelines=written)


# memory


def memory(script: Script) -> None:
    """Sharded over two ranks, a rank holds its share of weights, gradients and states, and two stages whole; more layers add only shares."""
    width, activations = (32, 0) if script.tiny else (2048, 48 * 2**20)  # the workspace of cuBLAS is 32 MiB of it
    peaks = {}
    for layers in (4, 8) if script.tiny else (12, 24):
        case = small(
            script, model="deep", sizes={}, batch=4, steps=5, holmes=LAYOUTS["2 replicas, sharded parameters"][1]
        )
        case["sizes"] = {"width": width, "num_layers": layers}
        found = script.result("peak_memory", {"case": case}, world_size=2, seconds=60)
        peaks[layers] = peak = max(one["peak"] for one in found)
        shares = 4 * found[0]["model"] / 2  # weights, gradients and two states
        bound = shares + 4 * found[0]["layer"] + activations  # whole weights and gradients of two stages
        script.row(
            f"{layers} layers over 2 ranks: peak of a rank",
            ok=None if script.tiny else peak <= bound,
            peak_mib=peak / 2**20,
            bound_mib=bound / 2**20,
            shares_mib=shares / 2**20,
        )
    few, many = peaks
    grown = peaks[many] - peaks[few]
    share = 4 * 4 * width * width * (many - few) / 2
    script.row(
        "what more layers add, in shares",
        ok=None if script.tiny else grown <= 1.05 * share,
        grown_mib=grown / 2**20,
        shares_mib=share / 2**20,
    )


def node(script: Script) -> None:
    """The optimizer on the host: an optimizer node against AdamW on the card and against FSDP2's CPUOffloadPolicy; then the largest
    model that trains in 20 GiB of the card each way."""
    threads = 1 if script.tiny else 16
    case = small(
        script, sizes=TINY if script.tiny else GPT_1B, batch=2 if script.tiny else 8, steps=6, precision="bf16-mixed"
    )
    seconds: dict[str, float] = {}
    for where in ("node", "fsdp2") if script.tiny else ("card", "node", "fsdp2"):
        try:
            (found,) = script.result("train_beside", {"case": case, "where": where}, seconds=90, threads=threads)
        except RuntimeError as error:
            script.row(f"GPT 1B, optimizer: {where}", ok=False, error=str(error))
            continue
        if found["fits"]:
            seconds[where] = found["seconds"]
        script.row(f"GPT 1B, optimizer: {where}", ok=None, **found)
    if "node" in seconds and "fsdp2" in seconds:
        ratio = seconds["node"] / seconds["fsdp2"]
        script.row("node against FSDP2's offload", ok=None if script.tiny else ratio <= 1.0, ratio=ratio)
    if script.tiny:
        return
    layers = [18, 36, 54, 72]
    for where in ("card", "node", "fsdp2"):
        most = 0
        for number in layers:
            big = case | {"sizes": case["sizes"] | {"num_layers": number}, "batch": 1, "steps": 3}
            if time.monotonic() > script.deadline - 5:
                break
            try:
                payload = {"case": big, "where": where, "limit": 20 * GIB}
                (found,) = script.result("train_beside", payload, seconds=60, threads=threads)
            except RuntimeError as error:
                script.row(f"{number} layers in 20 GiB, optimizer: {where}", ok=None, error=str(error)[-300:])
                break
            if not found["fits"]:
                break
            most = number
        script.row(f"most layers that train in 20 GiB, optimizer: {where}", ok=None, layers=most, tried=layers)


PARTS: dict[str, tuple[Callable[[Script], None], float]] = {
    "parity": (parity, 130),
    "checkpoint": (checkpoint, 40),
    "faults": (faults, 40),
    "step_time": (step_time, 60),
    "mfu": (mfu, 70),
    "syncs": (syncs, 30),
    "memory": (memory, 30),
    "node": (node, 60),
    "sockets": (sockets, 20),
}
"""The parts in their order, and the seconds that each may take: 480 in all."""
