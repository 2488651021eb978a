"""The code that the GPU tests run in their processes: several NCCL ranks that share one device."""

import os
import subprocess
import sys
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

import lightning_holmes
from recipes.gpt import GPT

SEQUENCE, GLOBAL_BATCH, STEPS = 32, 8, 4


class Windows(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return GLOBAL_BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 256, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class EveryNth(Sampler[int]):
    """Sampler of one replica's samples, so that all replicas together see the global batch in order."""

    def __init__(self, count: int, rank: int, replicas: int) -> None:
        self.indices = range(rank, count, replicas)

    def __iter__(self) -> Any:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"].detach().clone()
        self.values.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))


class Data(GPT):
    """The recipe's GPT with its own loader."""

    def train_dataloader(self) -> Any:
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        sampler = EveryNth(GLOBAL_BATCH * STEPS, place["rank"], place["num_replicas"])
        return DataLoader(Windows(), batch_size=GLOBAL_BATCH // place["num_replicas"], sampler=sampler)


def train(options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train and return the losses of each step and the final weights on the host."""
    seed_everything(0)
    module = Data(hidden_size=64, num_layers=4, num_heads=4, sequence_length=SEQUENCE, tie_embeddings=options["tied"])
    strategy: Any = "auto"
    if options["holmes"] is not None:
        strategy = lightning_holmes.HolmesStrategy(**options["holmes"])
    losses = Losses()
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]) if options["holmes"] is not None else 1,
        strategy=strategy,
        precision=options["precision"],
        max_epochs=1,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    trainer.fit(module)
    return losses.values, {name: value.float().cpu() for name, value in module.state_dict().items()}


class Validated(Data):
    """Logs a loss directly and with a torchmetrics object in validation, on the module's device."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.compute_loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.mean(loss)
        self.log("val_mean", self.mean)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def stop_and_resume(options: dict[str, Any]) -> dict[str, Any]:
    """Train two epochs, of which the second one resumes from the first one's checkpoint in another layout; return
    each rank's results."""
    folder, accelerator, world_size = (
        options["folder"],
        options.get("accelerator", "gpu"),
        int(os.environ["WORLD_SIZE"]),
    )
    found: dict[str, Any] = {"losses": [], "metrics": []}
    resumed = None
    for epochs, holmes in enumerate(options["holmes"], start=1):
        seed_everything(0)
        losses = Losses()
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            num_nodes=world_size if holmes is not None else 1,
            strategy="auto" if holmes is None else lightning_holmes.HolmesStrategy(**holmes),
            max_epochs=epochs,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[losses, ModelCheckpoint(f"{folder}/epoch{epochs}", filename="end")],
        )
        module = Validated(hidden_size=64, num_layers=4, num_heads=4, sequence_length=SEQUENCE)
        trainer.fit(module, ckpt_path=resumed)
        resumed = f"{folder}/epoch{epochs}/end.ckpt"
        found["losses"] += losses.values
        found["metrics"].append({name: float(value) for name, value in trainer.callback_metrics.items()})
        found["device"] = str(next(iter(trainer.optimizers[0].state.values()))["exp_avg"].device)
    return found


def train_on_node(options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train as train() does, with an optimizer node that rank 0 starts; the ranks declare that they are on different
    hosts."""
    if os.environ["RANK"] != "0":
        return train(options)
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['HOLMES_NODE_PORT']}"
    command = [sys.executable, "-m", "lightning_holmes.optim.node", address, "0", "1"]
    with subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, stdin=subprocess.DEVNULL) as node:
        try:
            return train(options)
        finally:
            node.kill()


def train_all(cases: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(case) for case in cases]


class Deep(LightningModule):
    """Twelve layers of 16 MiB each and little else: almost all memory of a step is parameters, gradients and states."""

    width, batch = 2048, 2

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(self.width, self.width, bias=False) for _ in range(12))
        for layer in self.layers:
            torch.nn.init.orthogonal_(layer.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False)

    def train_dataloader(self) -> Any:
        inputs = torch.randn(6 * self.batch, self.width, generator=torch.Generator().manual_seed(1))
        return DataLoader(inputs, batch_size=self.batch)


class PeakMemory(Callback):
    """Records the peak device memory from the third step on, and makes torch raise in one step if the host would wait
    for the device."""

    def __init__(self) -> None:
        self.peak = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.cuda.reset_peak_memory_stats()
        self.peak = torch.cuda.max_memory_allocated()


class Unwaiting(lightning_holmes.HolmesStrategy):
    """Makes torch raise if the fourth batch's step would wait for the device."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch = self.lightning_module.trainer.global_step  # type: ignore[union-attr]
        torch.cuda.set_sync_debug_mode("error" if batch == 3 else "default")
        try:
            return super().training_step(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def peak_memory(options: dict[str, Any]) -> dict[str, Any]:
    """Run six steps of two replicas on the same samples and return the peak memory above the amount allocated before
    the trainer was made."""
    seed_everything(0)
    module, losses, peak = Deep(), Losses(), PeakMemory()
    in_shards = options["in_shards"]
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        strategy=Unwaiting(sharding="parameters", num_microbatches=2) if in_shards else "ddp",
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses, peak],
    )
    trainer.fit(module)
    parameters = 4 * sum(p.numel() for p in module.parameters())
    return {
        "losses": losses.values,
        "peak": peak.peak,
        "parameters": parameters,
        "layer": parameters // 12,
        "activations": 32 * 2**20,  # includes the workspace of cuBLAS
    }
