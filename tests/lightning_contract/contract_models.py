"""The module that the cases train, its data, and callbacks that record what happens.

    run.fit(Net(), batches(4), batches(2))
    calls = Calls("on_train_start", "on_train_batch_end")     # a callback: calls.names, in order

The module has two layers of width four and is deterministic, so that only the layout differs between runs.
"""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from quiet import Recorder
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

WIDTH = 4


class Rows(Dataset[Tensor]):
    """``count`` rows of four numbers; the first number of a row is its index divided by 100."""

    def __init__(self, count: int, start: int = 0) -> None:
        self.rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(11 + start))
        self.rows[:, 0] = torch.arange(start, start + count) / 100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Stream(IterableDataset[Tensor]):
    """The same rows, as a dataset without a length."""

    def __init__(self, count: int, start: int = 0) -> None:
        self.rows = Rows(count, start)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.rows[index] for index in range(len(self.rows)))


def batches(count: int = 4, start: int = 0, **options: Any) -> DataLoader[Tensor]:
    """Make a loader of ``count`` batches of two rows, in order."""
    return DataLoader(Rows(2 * count, start), batch_size=2, **options)


def stream(count: int = 4) -> DataLoader[Tensor]:
    """Make the same loader without a length."""
    return DataLoader(Stream(2 * count), batch_size=2)


def indices(batch: Tensor) -> list[int]:
    """Return the indices of the rows in a batch."""
    return [round(float(row[0]) * 100) for row in batch]


class Net(pl.LightningModule):
    """Two layers and a squared error; logs "loss", "val_loss" and "test_loss"."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return rows

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - 0.5).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Calls(pl.Callback):
    """Records the names of these hooks as they are called in ``names``, and what ``look(trainer, module)`` returns in ``seen``."""

    def __init__(self, *hooks: str, look: Any = None) -> None:
        self.names: list[str] = []
        self.seen: list[Any] = []
        for hook in hooks:
            setattr(self, hook, self._noting(hook, look))

    def _noting(self, name: str, look: Any) -> Any:
        def hook(trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            self.names.append(name)
            if look is not None:
                self.seen.append(look(trainer, module))

        return hook

    def count(self, name: str) -> int:
        return self.names.count(name)


class Lines(Recorder):
    """It keeps how the runs ended, too."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def finalize(self, status: str) -> None:
        self.ended.append(status)

    def column(self, name: str) -> list[float]:
        """Return the logged values of a name, in order."""
        return [values[name] for _, values in self.lines if name in values]


class Batches(pl.Callback):
    """Records the row indices of each batch of ``train`` and ``validation``."""

    def __init__(self) -> None:
        self.train: list[list[int]] = []
        self.validation: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_idx: int) -> None:
        self.train.append(indices(batch))

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Tensor, *rest: Any) -> None:
        self.validation.append(indices(batch))


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Return whether two such copies are equal, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())
