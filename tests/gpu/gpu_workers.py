"""What the ranks of `make gpu` run: functions of one payload, called in each process by launch.py.

A payload names the device ("cuda" or "cpu"); the ranks share one card.
"""

import gc
import itertools
import os
import signal
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from gpu_models import MODELS
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_holmes import HolmesStrategy


class Samples(Dataset):  # type: ignore[type-arg]
    """Sample ``index`` is ``make(generator)`` with a generator of its own."""

    def __init__(self, count: int, make: Any) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        sample: Tensor = self.make(torch.Generator().manual_seed(index))
        return sample


def tokens_of(case: dict[str, Any]) -> Any:
    sizes = case["sizes"]
    length = sizes["sequence_length"] + 1
    return lambda generator: torch.randint(0, sizes["vocab_size"], (length,), generator=generator)


class OfReplica(Callback):
    """Gives the module the loader of its replica once the strategy knows which that is."""

    def __init__(self, case: dict[str, Any], make: Any) -> None:
        self.case, self.make = case, make

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        def loader() -> DataLoader[Tensor]:
            place = getattr(trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
            replicas, batch = place["num_replicas"], self.case["batch"]
            data = Samples(batch * self.case["steps"], self.make)
            # one replica's samples, so that all replicas together see the global batch in order
            sampler = range(place["rank"], len(data), replicas)
            return DataLoader(data, batch_size=batch // replicas, sampler=sampler)

        pl_module.train_dataloader = loader  # type: ignore[method-assign]
        if self.case.get("validates"):
            pl_module.val_dataloader = loader  # type: ignore[method-assign]


class Steps(Callback):
    """Records the mean loss over replicas of each step, if ``losses``, and when each ended: on CUDA by events, which nothing
    waits for."""

    def __init__(self, *, losses: bool, device: str) -> None:
        self.records_losses, self.device = losses, device
        self.losses: list[float] = []
        self.marks: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        if self.records_losses:
            loss = outputs["loss"].detach().float().clone()
            self.losses.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The seconds between the ends of steps."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return [one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(self.marks)]
        return [other - one for one, other in itertools.pairwise(self.marks)]


def build(case: dict[str, Any]) -> LightningModule:
    """Make the module of a case on the device."""
    seed_everything(0, verbose=False)
    with torch.device(case["device"]):
        return MODELS[case["model"]](**case["sizes"])


def make_trainer(case: dict[str, Any], *callbacks: Callback, **options: Any) -> Trainer:
    holmes = case["holmes"]
    strategy = HolmesStrategy(**holmes) if isinstance(holmes, dict) else holmes or "auto"
    given: dict[str, Any] = {
        "accelerator": "gpu" if case["device"] == "cuda" else "cpu",
        "devices": 1,
        "num_nodes": int(os.environ["WORLD_SIZE"]) if holmes is not None else 1,
        "strategy": strategy,
        "precision": case.get("precision", "32-true"),
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return quiet_trainer(**given | options, callbacks=list(callbacks))


def forget() -> None:
    """Free what the last fit has left on the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# parity


def fit(case: dict[str, Any]) -> dict[str, Any]:
    """Train a case; return its losses, and how far its weights moved, and to where, as one vector on the host."""
    module, steps = build(case), Steps(losses=True, device=case["device"])
    before = whole_vector(module)
    make_trainer(case, OfReplica(case, tokens_of(case)), steps, gradient_clip_val=1.0).fit(module)
    return {"losses": steps.losses, "moved": whole_vector(module) - before}


def whole_vector(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().cpu().flatten() for p in module.parameters()])


def fits(payload: dict[str, Any]) -> None:
    """Train the cases in turn, and leave a file for each, so that a launch cut short still tells those before; end at the first error."""
    folder, rank = Path(payload["folder"]), os.environ["RANK"]
    for index, case in enumerate(payload["cases"]):
        try:
            found = fit(case)
        except Exception:
            found = {"error": traceback.format_exc()}
        path = folder / f"fit{index}-rank{rank}"
        torch.save(found, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        if "error" in found:
            return
        forget()


# checkpoints


def stop_and_resume(payload: dict[str, Any]) -> dict[str, Any]:
    """Train an epoch in each layout, each resuming from the checkpoint of the one before."""
    found: dict[str, Any] = {"losses": [], "metrics": []}
    resumed = None
    for epochs, holmes in enumerate(payload["layouts"], start=1):
        case = payload["case"] | {"holmes": holmes, "validates": True}
        module, steps = build(case), Steps(losses=True, device=case["device"])
        saves = ModelCheckpoint(f"{payload['folder']}/epoch{epochs}", filename="end")
        trainer = make_trainer(
            case, OfReplica(case, tokens_of(case)), steps, saves, max_epochs=epochs, enable_checkpointing=True
        )
        trainer.fit(module, ckpt_path=resumed)
        resumed = f"{payload['folder']}/epoch{epochs}/end.ckpt"
        found["losses"] += steps.losses
        found["metrics"].append(float(trainer.callback_metrics["val_loss"]))
        forget()
    return found


# faults


class Kill(Callback):
    """Kills rank 1 in its third step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_with_a_kill(payload: dict[str, Any]) -> None:
    """Train until rank 1 is killed."""
    case = payload["case"]
    make_trainer(case, OfReplica(case, tokens_of(case)), Kill()).fit(build(case))


# speed


def step_times(payload: dict[str, Any]) -> dict[str, Any]:
    """Fit plain Lightning and Holmes in turn, ``rounds`` times, on one process, and return the seconds of all steps but each fit's
    first ones. If the card cannot hold a batch, half of it is used."""
    case, device = payload["case"], payload["case"]["device"]
    while True:
        seconds: dict[str, list[float]] = {"plain": [], "holmes": []}
        peak = {}
        try:
            for _ in range(payload["rounds"]):
                for name, holmes in (("plain", None), ("holmes", payload["holmes"])):
                    module, steps = build(case), Steps(losses=False, device=device)
                    reset_peak(device)
                    trainer = make_trainer(case | {"holmes": holmes}, OfReplica(case, tokens_of(case)), steps)
                    trainer.fit(module)
                    seconds[name] += steps.seconds()[payload["warm_up"] :]
                    peak[name] = peak_bytes(device)
                    parameters = sum(p.numel() for p in module.parameters())
                    del module, trainer
                    forget()
            return {"seconds": seconds, "peak": peak, "batch": case["batch"], "parameters": parameters}
        except torch.cuda.OutOfMemoryError:
            if case["batch"] == 1:
                raise
            case = case | {"batch": case["batch"] // 2}
        module = trainer = None
        forget()


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


class Waits(Callback):
    """Counts what makes the host wait for the device, in steps 4 and 5, and where it is asked for."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.places: list[str] = []
        self._caught: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.device == "cuda" and batch_idx == 4:
            torch.cuda.set_sync_debug_mode("warn")
            self._caught = warnings.catch_warnings(record=True)
            self._found = self._caught.__enter__()
            warnings.simplefilter("always")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *rest: Any) -> None:
        if self._caught is not None and rest[-1] == 5:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self._caught = None
            self.places = [f"{w.filename}:{w.lineno}" for w in self._found if "synchroniz" in str(w.message)]


def host_syncs(payload: dict[str, Any]) -> list[str]:
    case = payload["case"]
    waits = Waits(case["device"])
    make_trainer(case, OfReplica(case, tokens_of(case)), waits).fit(build(case))
    return waits.places


def monitored(payload: dict[str, Any]) -> dict[str, Any]:
    """Fit with a timeline, which is written below ``folder``; return the losses and the seconds of steps."""
    case, steps = payload["case"], Steps(losses=True, device=payload["case"]["device"])
    root = payload["timelines"]
    make_trainer(case, OfReplica(case, tokens_of(case)), steps, default_root_dir=root).fit(build(case))
    return {"losses": steps.losses, "seconds": steps.seconds()}


# memory


class PeakMemory(Callback):
    """Records the device's peak from the third step on, above what was allocated before."""

    def __init__(self, device: str) -> None:
        self.device, self.peak = device, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            reset_peak(self.device)

    def on_train_batch_end(self, *_: Any) -> None:
        self.peak = peak_bytes(self.device)


def peak_memory(payload: dict[str, Any]) -> dict[str, Any]:
    """Fit layers whose parameters are sharded over the ranks, and return the peak and the bytes of the model and of a layer."""
    case, peak = payload["case"], PeakMemory(payload["case"]["device"])
    width = case["sizes"]["width"]
    before = torch.cuda.memory_allocated() if case["device"] == "cuda" else 0
    module = build(case | {"device": "cpu"})
    make_data = OfReplica(case, lambda generator: torch.randn(width, generator=generator))
    make_trainer(case, make_data, peak).fit(module)
    layer = 4 * width * width
    return {"peak": max(0, peak.peak - before), "layer": layer, "model": layer * case["sizes"]["num_layers"]}


# optimizer states on the host


def train_beside(payload: dict[str, Any]) -> dict[str, Any]:
    """Train one process with its optimizer in one of three places: "card", "node" or "fsdp2" (CPUOffloadPolicy); return the median
    step, the peak, or that memory was not enough. ``limit``: the bytes of the card that may be used."""
    case, device = payload["case"], payload["case"]["device"]
    if payload.get("limit") and device == "cuda":
        torch.cuda.set_per_process_memory_fraction(payload["limit"] / torch.cuda.get_device_properties(0).total_memory)
    try:
        seconds = fsdp2_with_offload(case) if payload["where"] == "fsdp2" else lightning_steps(case, payload["where"])
    except torch.cuda.OutOfMemoryError:
        return {"fits": False}
    return {"fits": True, "seconds": sorted(seconds)[len(seconds) // 2], "peak": peak_bytes(device)}


def lightning_steps(case: dict[str, Any], where: str) -> list[float]:
    holmes = {"optimizer_nodes": 1, "num_microbatches": 1} if where == "node" else None
    # with a node, the parameters need not fit on the card all at once before the fit
    module, steps = build(case | {"device": "cpu"}), Steps(losses=False, device=case["device"])
    reset_peak(case["device"])
    make_trainer(case | {"holmes": holmes}, OfReplica(case, tokens_of(case)), steps).fit(module)
    return steps.seconds()[1:]


def fsdp2_with_offload(case: dict[str, Any]) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device = case["device"]
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    module: Any = build(case | {"device": "cpu"})
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
    }
    if case["precision"] == "bf16-mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in module.layers:
        fully_shard(layer, **options)
    fully_shard(module, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    data, marks, batch = Samples(case["batch"] * case["steps"], tokens_of(case)), [], case["batch"]
    for step in range(case["steps"]):
        tokens = torch.stack([data[step * batch + i] for i in range(batch)]).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=case["precision"] == "bf16-mixed"):
            logits = module(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
    torch.distributed.destroy_process_group()
    return [other - one for one, other in itertools.pairwise(marks)][1:]
