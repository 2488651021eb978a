"""Models that no process holds whole: built by configure_model without memory, or read in parts from a folder.

Initial weights must not depend on the layout; pretrained weights, and losses from them, are those of plain Lightning in one
process (1e-5 relative, fp32). Peak memory of a rank is measured in a run that only validates: no gradients, no states.
"""

import gc
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launch import chosen, forked_executable, launch
from memory_limit import resident_mb
from quiet import quiet_trainer
from tanh_net import ByGradient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_holmes import HolmesStrategy
from lightning_holmes.models import HFCausalLM
from recipes.gpt import GPT

pytestmark = pytest.mark.xdist_group("large_models")

VOCABULARY, SEQUENCE = 256, 16
SEED = 11


def windows(count: int) -> Any:
    """Return token windows; the model shifts the labels."""
    draws = (torch.Generator().manual_seed(index) for index in range(count))
    tokens = (torch.randint(0, VOCABULARY, (SEQUENCE,), generator=draw) for draw in draws)
    return [{"input_ids": window, "labels": window} for window in tokens]


class Regressor(ByGradient):
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


class Start(pl.Callback):
    """Keeps the weights and buffers with which a run begins, as far as this rank holds them. They are taken in the first
    batch: a rank of two stages has no values before."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self.weights:
            return
        strategy: Any = trainer.strategy
        mine = set(strategy._run.pipeline.local_parameters) if isinstance(strategy, HolmesStrategy) else None
        for name, value in [*pl_module.named_parameters(), *pl_module.named_buffers()]:
            if mine is None or name in mine or name in dict(pl_module.named_buffers()):
                self.weights[name] = value.detach().clone()


def fit(name: str, folder: str, holmes: dict[str, Any] | None) -> dict[str, Any]:
    """Fit, then validate twice with the same trainer; return the initial weights and the losses, or the error."""
    module, start = build(name, folder), Start()
    loader = regression() if isinstance(module, Regressor) else DataLoader(windows(16), 8)
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
    os.environ |= payload.get("env", {})
    folder, holmes = Path(payload["folder"]), payload["holmes"] | {"save_distributed_checkpoint": False}
    name, loader = payload["name"], DataLoader(windows(16), 8)
    module, run = with_sgd(build(name, str(folder))), trainer(holmes)
    files = [folder / f"{name}-{kind}-{os.environ.get('WORLD_SIZE', 1)}.ckpt" for kind in ("first", "second")]

    losses: list[float] = [fit_to(1, run, module, loader)]
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
    return {"losses": losses, "saved": saved, "bytes": sum(memory.values())}


def measure(payload: dict[str, Any]) -> dict[str, float]:
    """Return by model the growth of this rank's peak memory, MB, while it validates; a toy run before takes imports and
    connections out of the measurement."""
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
        trainer(holmes).validate(module, DataLoader(windows(4), 4), verbose=False)
        grown[name] = resident_mb("VmHWM") - before
        del module
    return grown


SEEDED = ["gpt", "hf", "plain_code", "meta", "reads_values"]
LLAMA = {"model_type": "llama", "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
MODEL_MB = 400.0


def write_llama(path: Path, width: int, layers: int, shard: str) -> None:
    """Write a Llama with save_pretrained, in several files."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        **LLAMA, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path, max_shard_size=shard)
    assert len(list(path.glob("*.safetensors"))) > 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_llama(path / "small", 32, 4, "40KB")
    return path


@pytest.fixture(scope="module")
def in_shards(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Results of two replicas that share all parameters: neither holds the whole module."""
    holmes = {"sharding": "parameters", "num_microbatches": 2}
    payload = {"folder": str(folder), "cases": [*chosen(request, "name"), "unset"], "holmes": holmes}
    return launch(2, "test_large_models:fit_all", payload, timeout_s=200)


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results of one process with the strategy, and of two stages."""
    payload = {"folder": str(folder), "cases": [*chosen(request, "name"), "unset"]}
    one, two = ({"holmes": {"pipeline_parallel_size": size, "num_microbatches": 2}} for size in (1, 2))
    return fit_all(payload | one), launch(2, "test_large_models:fit_all", payload | two, timeout_s=200)


@pytest.mark.parametrize("name", [*SEEDED, "pretrained"])
def test_weights_and_losses_do_not_depend_on_the_layout(name: str, results: Any) -> None:
    alone, staged = results[0][name], [rank[name] for rank in results[1]]
    assert "error" not in alone, alone
    whole = alone["start"]
    for result in staged:
        assert "error" not in result, result
        for key, value in result["start"].items():
            assert torch.equal(value, whole[key]), key
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert set(whole) == set().union(*(result["start"] for result in staged))
    if name != "reads_values":
        assert all(len(result["start"]) < len(whole) for result in staged), "a stage has all weights"


@pytest.mark.parametrize("name", [*SEEDED, "pretrained"])
def test_in_shards_weights_and_losses_are_those_of_one_process(name: str, results: Any, in_shards: Any) -> None:
    """The initial weights and the losses equal those of one process, in training and in two validations after the fit, for
    which parameters stay sharded. With dropout each replica draws its own random numbers, so losses are not compared."""
    alone = results[0][name]
    for rank in in_shards:
        assert "error" not in rank[name], rank[name]
        assert rank[name]["start"].keys() == alone["start"].keys()
        for key, value in rank[name]["start"].items():
            assert torch.equal(value, alone["start"][key]), key
        if name in ("gpt", "hf", "pretrained"):
            assert rank[name]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.parametrize(("name", "stages"), [("gpt", 2), ("pretrained", 1)])
def test_on_optimizer_nodes_no_worker_has_the_module(name: str, stages: int, folder: Path) -> None:
    """The module is built on the node and stays there after a fit; the next fit, an evaluation and a checkpoint begin from there."""
    payload: dict[str, Any] = {"folder": str(folder), "name": name}
    expected = go_on(payload | {"holmes": {"pipeline_parallel_size": 1, "num_microbatches": 2}})
    payload["holmes"] = {"optimizer_nodes": 1, "num_microbatches": 2, "pipeline_parallel_size": stages}
    payload["env"] = {"PYTHON_EXEC": forked_executable()}  # the interpreter of the optimizer nodes that rank 0 starts
    for rank in launch(2, "test_large_models:go_on", payload, timeout_s=200):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["bytes"] < expected["bytes"] / 50
        for found, wanted in zip(rank["saved"], expected["saved"], strict=True):
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5 * float(value.abs().max()), msg=key)


def test_pretrained_weights_and_losses_are_those_of_plain_lightning(results: Any, folder: Path) -> None:
    plain = fit("pretrained", str(folder), None)
    for result in [results[0]["pretrained"], *(rank["pretrained"] for rank in results[1])]:
        for key, value in result["start"].items():
            assert torch.equal(value, plain["start"][key]), key
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_what_nothing_initialises_is_named_on_every_rank(results: Any, in_shards: Any) -> None:
    for result in [results[0]["unset"], *(rank["unset"] for rank in (*results[1], *in_shards))]:
        assert "nothing gives gain a value" in result["error"]


def test_peak_memory_of_a_rank_is_under_half_of_the_model(folder: Path) -> None:
    write_llama(folder / "large", 1024, 8, "100MB")  # 400 MB
    payload = {
        "folder": str(folder),
        "models": {
            "configure_model": {"pipeline_parallel_size": 4},
            "pretrained": {"pipeline_parallel_size": 4},
            "shared out": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        },
    }
    ranks = launch(4, "test_large_models:measure", payload, timeout_s=200)
    for name in payload["models"]:
        grown = [rank[name] for rank in ranks]
        print(f"{name}: peak memory grew by {', '.join(f'{mb:.0f}' for mb in grown)} MB on the four ranks")
        assert max(grown) < MODEL_MB / 2
