"""Steps as on accelerators, run on CPUs: batches are treated as accelerator tensors, results travel outside of the messages,
and host reads of tensors are recorded."""

import os
import traceback
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import lightning_holmes
from lightning_holmes import HolmesStrategy
from lightning_holmes.pipeline import checksum

PACKAGE = str(Path(lightning_holmes.__file__).parent) + os.sep
READS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.equal,
    torch.equal,
    Tensor.__bool__,
    Tensor.__float__,
)
OPERATORS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")


def reader() -> str:
    """Return the innermost file of this package on the call stack, or "?"."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
    return next((file.removeprefix(PACKAGE) for file in files if file.startswith(PACKAGE)), "?")


class NotedFunctions(TorchFunctionMode):
    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.found.add(reader())
        return func(*args, **(kwargs or {}))


class NotedOperators(TorchDispatchMode):
    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in OPERATORS:
            self.found.add(reader())
        return func(*args, **(kwargs or {}))


class Noting(HolmesStrategy):
    """Records which files read tensors on the host, from the third batch on, when shapes are known and collectives are chosen."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert isinstance(module, Stack)
        if module.trainer.global_step < 2:
            return super().training_step(*args, **kwargs)
        with NotedFunctions(module.found), NotedOperators(module.found):
            return super().training_step(*args, **kwargs)


class Stack(pl.LightningModule):
    found: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.outputs: list[float] = []

    def setup(self, stage: str) -> None:
        groups = self.trainer.strategy._job.groups  # type: ignore[attr-defined]
        if groups.p2p is not None:
            groups.p2p._everyone = groups.pipeline  # as where tensors do not travel through gloo

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        hidden = batch[0]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return {"loss": hidden.square().mean(), "hidden": hidden}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs += [float(outputs["loss"]), float(outputs["hidden"].sum())]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(strategy: Any, *, differs: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Stack()
    inputs = torch.randn(24, 4)
    if differs and os.environ.get("RANK") == "1":
        inputs[-1] += 1  # in the last batch
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, DataLoader(TensorDataset(inputs), batch_size=4))
    except lightning_holmes.HolmesError as error:
        return {"error": str(error), "steps": trainer.global_step}
    return {"outputs": module.outputs, "reads": sorted(Stack.found)}


def on_each_rank(_: None) -> list[dict[str, Any]]:
    checksum.is_on_host = lambda tensor: False  # type: ignore[assignment]
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "1f1b"}
    found = [train(Noting(**options)), train(HolmesStrategy(**options), differs=True)]
    Stack.found.clear()
    return [*found, train(Noting(sharding="parameters", num_microbatches=2))]
