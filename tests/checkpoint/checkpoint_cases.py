"""Runs that save and resume, in the processes of one launch: a GPT on the bytes of a file, 16 samples per step in any
layout, in four microbatches over all replicas together."""

import gc
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from quiet import quiet_trainer
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.checkpoint.manifest import Manifest
from lightning_holmes.errors import CheckpointError
from lightning_holmes.optim import bucket_reducer
from recipes.gpt import GPT
from recipes.text import FileBytes

GLOBAL_BATCH = 16
GLOBAL_MICROBATCHES = 4
STEPS = 10  # two epochs of five steps
DROPOUT = 0.3
MIDDLE = 3
"""A step inside the first epoch."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2xdp2": {"pipeline_parallel_size": 2},
    "pp4xdp1": {"pipeline_parallel_size": 4},
    "pp1xdp4": {"pipeline_parallel_size": 1},
    "interleaved": {"pipeline_parallel_size": 2, "num_chunks": 2},
}
FROM_FOLDER = ("pp4xdp1", "pp1xdp4")
"""The layouts in which a folder is resumed; a file is resumed in the others."""
REPLICAS = {"pp2xdp2": 2, "pp4xdp1": 1, "pp1xdp4": 4, "interleaved": 2, "alone": 1}

warnings.filterwarnings("ignore")


def make_data_file(folder: Path) -> Path:
    path = folder / "bytes"
    path.write_bytes(bytes((i * i + i // 7) % 256 for i in range(1600)))
    return path


def build_module(dropout: float = 0.0, num_layers: int = 4) -> GPT:
    torch.manual_seed(3)
    return GPT(
        hidden_size=16,
        num_layers=num_layers,
        num_heads=2,
        sequence_length=16,
        dropout=dropout,
        tie_embeddings=True,
        warmup_steps=2,
    )


class Bytes(FileBytes):
    """The package's own data module; with ``torchdata``, the same samples from a StatefulDataLoader."""

    def __init__(self, path: Path, replicas: int, *, torchdata: bool = False) -> None:
        super().__init__(str(path), sequence_length=16, batch_size=GLOBAL_BATCH // replicas, val_fraction=0.05)
        self.torchdata = torchdata

    def train_dataloader(self) -> Any:
        if not self.torchdata:
            return super().train_dataloader()
        assert self.trainer is not None and self.train_windows is not None
        sharing = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(self.train_windows, shuffle=True, seed=1, drop_last=True, **sharing)
        return StatefulDataLoader(self.train_windows, self.batch_size, sampler=sampler, drop_last=True)

    def test_dataloader(self) -> Any:
        return self.val_dataloader()


class Losses(Callback):
    """Records every step's loss on this rank, by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.by_step[trainer.global_step] = outputs["loss"].item()


class SaveAt(Callback):
    """Saves checkpoints after some steps."""

    def __init__(self, paths: dict[int, Path]) -> None:
        self.paths = paths

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self.paths:
            trainer.save_checkpoint(self.paths[trainer.global_step])


@dataclass
class Ran:
    """The results of a fit on a rank."""

    losses: dict[int, float]
    weights: dict[str, torch.Tensor]
    trainer: pl.Trainer


def fit(
    data: Path,
    layout: str,
    *,
    callbacks: list[Callback] | None = None,
    ckpt_path: Any = None,
    dropout: float = 0.0,
    torchdata: bool = False,
    strategy: Any = None,
    **options: Any,
) -> Ran:
    """Run one fit; ``layout`` "alone" is one process."""
    pl.seed_everything(7 if ckpt_path is None else 8, verbose=False)  # the run's own seed is in the checkpoint
    losses = Losses()
    if strategy is None:
        count = GLOBAL_MICROBATCHES // REPLICAS[layout]
        strategy = HolmesStrategy(num_microbatches=count, **LAYOUTS.get(layout, {}), **options.pop("holmes", {}))
    trainer = quiet_trainer(
        strategy,
        devices=1 if layout == "alone" else int(os.environ["WORLD_SIZE"]),
        max_epochs=2,
        callbacks=[losses, *(callbacks or [])],
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks or []),
        num_sanity_val_steps=0,
        limit_val_batches=options.pop("limit_val_batches", 0),
        **options,
    )
    module = build_module(dropout)
    trainer.fit(module, datamodule=Bytes(data, REPLICAS[layout], torchdata=torchdata), ckpt_path=ckpt_path)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    gc.collect()
    return Ran(losses.by_step, weights, trainer)


def state_bytes(trainer: pl.Trainer) -> int:
    """Return the bytes of the optimizer's state in this process."""
    states = trainer.optimizers[0].state.values()
    return sum(v.numel() * v.element_size() for state in states for v in state.values() if isinstance(v, torch.Tensor))


def run_matrix(payload: dict[str, Any]) -> dict[str, Any]:
    """In four processes, save in one layout and resume in others; return each run's losses on this rank."""
    folder, data = Path(payload["folder"]), Path(payload["data"])
    results: dict[str, Any] = {}

    def note(name: str, ran: Ran) -> Ran:
        results[name] = (ran.trainer.strategy.data_parallel_rank, ran.losses)
        results[f"{name} weights"] = ran.weights
        print("RAN", name, flush=True)
        return ran

    saved, folder_of_file = folder / "middle.ckpt", folder / "of_file.ckpt"
    note("whole", fit(data, "pp2xdp2", callbacks=[SaveAt({MIDDLE: saved})], dropout=DROPOUT))
    for layout in FROM_FOLDER:
        note(f"folder to {layout}", fit(data, layout, ckpt_path=saved, dropout=DROPOUT))
    # without dropout from here on: plain Lightning draws different numbers
    plain = folder / "plain.ckpt"
    options = {"holmes": {"save_distributed_checkpoint": False}}
    note("to file", fit(data, "pp4xdp1", callbacks=[SaveAt({MIDDLE: plain})], **options))
    note("file to interleaved", fit(data, "interleaved", ckpt_path=plain))
    save = SaveAt({STEPS - 1: folder_of_file})
    note("lightning to pp2xdp2", fit(data, "pp2xdp2", ckpt_path=payload["lightning"], callbacks=[save]))
    # sharded optimizer: saved sharded and resumed whole, and the other way round, in either format
    divided = {"sharding": "optimizer"}
    bucket_reducer.LEAST_BUCKET_BYTES = 5000  # so that a small module has several buckets
    shares, shares_file = folder / "shares.ckpt", folder / "shares_plain.ckpt"
    save = [SaveAt({MIDDLE: shares})]
    ran = note("sharded", fit(data, "pp2xdp2", callbacks=save, holmes=divided))
    assert all(p.grad is None for p in ran.trainer.lightning_module.parameters()), "each replica has its share only"
    note("sharded to pp1xdp4", fit(data, "pp1xdp4", ckpt_path=shares, holmes={"sharding": "none"}))
    ran = note("folder to sharded", fit(data, "pp1xdp4", ckpt_path=saved, dropout=DROPOUT, holmes=divided))
    results["state bytes"] = state_bytes(ran.trainer)
    save = [SaveAt({MIDDLE: shares_file})]
    one_file = divided | {"save_distributed_checkpoint": False}
    note("sharded to file", fit(data, "interleaved", callbacks=save, holmes=one_file))
    note("lightning to sharded", fit(data, "pp2xdp2", ckpt_path=payload["lightning"], holmes=divided))
    note("sharded to sharded", fit(data, "pp1xdp4", ckpt_path=shares_file, holmes=divided))
    stateful = folder / "stateful.ckpt"
    note("torchdata", fit(data, "pp2xdp2", callbacks=[SaveAt({MIDDLE: stateful})], dropout=DROPOUT, torchdata=True))
    note("torchdata resumed", fit(data, "interleaved", ckpt_path=stateful, dropout=DROPOUT, torchdata=True))
    try:
        fit_without_breaking_the_job(data, stateful)
    except Exception as error:
        results["other replicas"] = str(error)
    trainer = quiet_trainer(
        HolmesStrategy(pipeline_parallel_size=4), enable_checkpointing=True, enable_model_summary=True, devices=4
    )
    loaded = {"datamodule": Bytes(data, 1), "ckpt_path": folder_of_file, "verbose": False}
    results["validated"] = trainer.validate(build_module(), **loaded)
    return results


def fit_without_breaking_the_job(data: Path, path: Path) -> None:
    """Resume a replica's own loader state with another number of replicas: refused before ranks communicate."""
    strategy = HolmesStrategy(pipeline_parallel_size=4)
    strategy.on_exception = lambda exception: None  # type: ignore[method-assign]
    fit(data, "pp4xdp1", ckpt_path=path, torchdata=True, strategy=strategy)


def run_apart(payload: dict[str, Any]) -> dict[str, Any]:
    """In four processes of two clusters that share no file system: the same absolute path is a different folder in
    each cluster."""
    rank = int(os.environ["RANK"])
    own = Path(payload["folder"]) / f"cluster{rank // 2}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    data = Path(payload["data"])
    results: dict[str, Any] = {}
    options: dict[str, Any] = {"default_root_dir": "/proc/self/cwd", "limit_val_batches": 1}
    holmes = {"async_checkpoint": True}

    def keep() -> ModelCheckpoint:
        return ModelCheckpoint(
            filename="{step}", save_last=True, save_top_k=2, monitor="val_loss", every_n_train_steps=2
        )

    checkpoint = keep()
    whole = fit(
        data, "pp2xdp2", callbacks=[checkpoint], holmes=holmes, val_check_interval=2, limit_train_batches=4, **options
    )
    results["whole"] = (whole.trainer.strategy.data_parallel_rank, whole.losses)
    results["best"] = checkpoint.best_model_path
    results["kept"] = sorted(Path(p).name for p in checkpoint.best_k_models)
    whole.trainer.strategy.barrier()  # one rank of each cluster removes old checkpoints
    saved = own / "checkpoints"
    results["names"] = sorted(p.name for p in saved.iterdir())
    manifest = Manifest.load(saved / "last.ckpt")
    results["files"] = sorted(manifest.present_files(saved / "last.ckpt"))
    whole.trainer.strategy.barrier()

    # make a middle checkpoint the last one, in both clusters; resume with stages on other ranks
    first = saved / results["kept"][0]
    if rank % 2 == 0:
        for name in ("last.ckpt", "last-v1.ckpt"):
            shutil.rmtree(saved / name, ignore_errors=True)
        shutil.copytree(first, saved / "last.ckpt")
    whole.trainer.strategy.barrier()
    last = "/proc/self/cwd/checkpoints/last.ckpt"
    options["limit_train_batches"] = 4
    ran = fit(data, "pp4xdp1", ckpt_path=last, **options)
    results["resumed"] = (ran.trainer.strategy.data_parallel_rank, ran.losses)
    ran = fit(data, "pp2xdp2", callbacks=[keep()], ckpt_path="last", **options)
    results["last"] = (ran.trainer.strategy.data_parallel_rank, ran.losses)
    ran.trainer.strategy.barrier()
    if rank == 2:  # the second cluster loses its part
        shutil.rmtree(saved / first.name)
    ran.trainer.strategy.barrier()
    try:
        fit(data, "pp2xdp2", ckpt_path=f"/proc/self/cwd/checkpoints/{first.name}", **options)
    except CheckpointError as error:
        results["lost"] = str(error)
    return results
