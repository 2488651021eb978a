"""What the processes of the tests of models larger than a process run, and plain Lightning in one process."""

import gc
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from memory_limit import resident_mb
from quiet import quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_holmes import HolmesStrategy
from lightning_holmes.models import HFCausalLM
from recipes.gpt import GPT

VOCABULARY, SEQUENCE = 256, 16
SEED = 11


class Windows(Dataset):
    """Token windows; the model shifts the labels."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (SEQUENCE,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Regressor(pl.LightningModule):
    """Built by configure_model as users write it: in-place initialisation, computed buffers, a copied bias, a value read from a tensor."""

    def __init__(self, on_meta: bool = False) -> None:
        super().__init__()
        self.on_meta = on_meta
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is not None:
            return
        with torch.device("meta") if self.on_meta else torch.device("cpu"):
            self.stem = nn.Linear(4, 8)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(float(rate)))
                for rate in torch.linspace(0.0, 0.2, 4).tolist()
            )
            self.token = nn.Parameter(torch.zeros(8))
            self.head = nn.Linear(8, 8)
        nn.init.trunc_normal_(self.token, std=0.1)
        nn.init.orthogonal_(self.head.weight) if not self.on_meta else None
        with torch.no_grad():
            self.head.bias.copy_(self.stem.bias)
        self.register_buffer("scale", 10.0 ** -(torch.arange(8) / 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale + self.token
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ReadsValues(Regressor):
    """A module whose configure_model cannot run without memory: NumPy reads a value of the new weights."""

    def configure_model(self) -> None:
        super().configure_model()
        self.largest = float(self.head.weight.detach().numpy().max())


class Unset(Regressor):
    """A module with a parameter that nothing initialises."""

    def configure_model(self) -> None:
        super().configure_model()
        self.gain = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def trainer(holmes: dict[str, Any] | None, **options: Any) -> pl.Trainer:
    return quiet_trainer(
        "auto" if holmes is None else HolmesStrategy(**holmes),
        devices=1 if holmes is None else int(os.environ.get("WORLD_SIZE", 1)),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **{"max_epochs": 1} | options,
    )


def regression() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, generator=generator)
    return DataLoader(torch.utils.data.TensorDataset(x, torch.randn(16, 8, generator=generator)), 8)


def build(name: str, folder: str) -> Any:
    pl.seed_everything(SEED, verbose=False)
    if name == "gpt":
        return GPT(hidden_size=16, num_layers=4, num_heads=2, sequence_length=SEQUENCE, defer_init=True, warmup_steps=1)
    if name == "pretrained":
        return HFCausalLM(pretrained=str(Path(folder) / "small"), warmup_steps=1, learning_rate=0.01)
    if name == "hf":
        return HFCausalLM(config=str(Path(folder) / "small"), defer_init=True)
    return {"plain_code": Regressor, "reads_values": ReadsValues, "unset": Unset, "meta": lambda: Regressor(True)}[
        name
    ]()


def held(strategy: Any, module: nn.Module) -> set[str]:
    """Return the names of the parameters that this rank holds values of."""
    pipeline = strategy._run.pipeline
    return set(pipeline.local_parameters)


class Start(pl.Callback):
    """Keeps the weights and buffers with which a run begins, as far as this rank holds them. They are taken in the first
    batch: a rank of two stages has no values before."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self.weights:
            return
        mine = held(trainer.strategy, pl_module) if isinstance(trainer.strategy, HolmesStrategy) else None
        for name, value in [*pl_module.named_parameters(), *pl_module.named_buffers()]:
            if mine is None or name in mine or name in dict(pl_module.named_buffers()):
                self.weights[name] = value.detach().clone()


def fit(name: str, folder: str, holmes: dict[str, Any] | None) -> dict[str, Any]:
    """Fit, then validate twice with the same trainer; return the initial weights and the losses, or the error."""
    module, start = build(name, folder), Start()
    loader = regression() if isinstance(module, Regressor) else DataLoader(Windows(16), 8)
    run = trainer(holmes, callbacks=[start], max_epochs=2)
    losses: list[float] = []
    try:
        run.fit(module, loader, loader)
        losses.append(float(run.callback_metrics["val_loss"]))
        for _ in range(2):
            losses.append(run.validate(module, loader, verbose=False)[0]["val_loss"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"start": start.weights, "losses": losses}


def fit_all(payload: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: fit(name, payload["folder"], payload["holmes"]) for name in payload["cases"]}


def with_sgd(module: Any) -> Any:
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    return module


def fit_to(epochs: int, run: pl.Trainer, module: pl.LightningModule, loader: DataLoader, **options: Any) -> float:
    """Fit up to ``epochs`` epochs; return the validation loss."""
    run.fit_loop.max_epochs = epochs
    run.fit(module, loader, loader, **options)
    return float(run.callback_metrics["val_loss"])


def go_on(payload: dict[str, Any]) -> dict[str, Any]:
    """Run fits that follow each other, on one module and from a file. Return the losses, the state dicts of two checkpoints,
    and the bytes of parameters that this process holds after the first fit. With SGD: where a gradient is nearly zero,
    Adam's step depends on rounding alone."""
    torch.set_num_threads(1)
    os.environ |= payload.get("env", {})
    folder, holmes = Path(payload["folder"]), payload["holmes"] | {"save_distributed_checkpoint": False}
    found: dict[str, Any] = {}
    for name in payload["cases"]:
        module, run, loader = with_sgd(build(name, str(folder))), trainer(holmes), DataLoader(Windows(16), 8)
        losses: list[float] = []
        files = [folder / f"{name}-{kind}-{os.environ.get('WORLD_SIZE', 1)}.ckpt" for kind in ("first", "second")]

        losses.append(fit_to(1, run, module, loader))
        memory = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
        run.save_checkpoint(files[0])
        losses.append(fit_to(2, run, module, loader))
        losses.append(run.validate(module, loader, verbose=False)[0]["val_loss"])
        run.save_checkpoint(files[1])
        losses.append(fit_to(3, run, module, loader))
        losses.append(fit_to(2, trainer(holmes), with_sgd(build(name, str(folder))), loader, ckpt_path=files[0]))
        other = trainer(holmes)
        other.num_sanity_val_steps = 1
        losses.append(fit_to(1, other, with_sgd(build(name, str(folder))), loader))
        saved = [torch.load(file, weights_only=False)["state_dict"] for file in files]
        found[name] = {"losses": losses, "saved": saved, "bytes": sum(memory.values())}
    return found


def measure(payload: dict[str, Any]) -> dict[str, float]:
    """Return by model the growth of this rank's peak memory, MB, while it validates; a toy run before takes imports and
    connections out of the measurement."""
    torch.set_num_threads(1)
    grown = {}
    for name, holmes in payload["models"].items():
        fit("gpt", payload["folder"], holmes)  # for what is imported and connected only once
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_mb("VmRSS")
        pl.seed_everything(SEED, verbose=False)
        if name == "pretrained":
            module: Any = HFCausalLM(pretrained=str(Path(payload["folder"]) / "large"))
        else:
            module = GPT(hidden_size=1024, num_layers=8, num_heads=8, sequence_length=SEQUENCE, defer_init=True)
        trainer(holmes).validate(module, DataLoader(Windows(4), 4), verbose=False)
        grown[name] = resident_mb("VmHWM") - before
        del module
    return grown
