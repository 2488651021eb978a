"""Windows of a long sequence, as a language-modelling data set.

This module has the map-style data set over non-overlapping windows, the split into training and validation windows and
the data loaders. `FileBytes` and `TokenFile` provide the tokens.

Every item is `{"input_ids": (S,), "labels": (S,)}`, both int64; the labels are already shifted, so
`labels[i]` is the token that follows `input_ids[i]`. With `shift_labels=False` there are no labels: a model that
shifts labels itself, like every Hugging Face model and `HFCausalLM`, is trained on the input.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_holmes.data.counting import CountedDataModule
from lightning_holmes.errors import ConfigurationError


class TokenSource(Protocol):
    """A long sequence of tokens; picklable, so that it can be sent to data workers."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Return tokens `start` to `stop` as a new int64 tensor."""
        ...


class TokenWindows(Dataset[dict[str, Tensor]]):
    """The windows numbered `indices` of a token source: window `i` begins at token `i * sequence_length`."""

    def __init__(
        self, source: TokenSource, indices: Tensor, sequence_length: int, *, shift_labels: bool = True
    ) -> None:
        self.source = source
        self.indices = indices
        self.sequence_length = sequence_length
        self.shift_labels = shift_labels

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(self.indices[index]) * self.sequence_length
        tokens = self.source.read(start, start + self.sequence_length + 1)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]} if self.shift_labels else {"input_ids": tokens[:-1]}


class WindowDataModule(CountedDataModule):
    """Training and validation windows of one token source.

    The validation windows are drawn by `seed`; the split depends on nothing else, so that it is the same in
    every process. Training windows are shuffled by `seed` and the epoch, and assigned to the replicas; the loader's
    state counts samples, so that a run resumes from a checkpoint in mid-epoch with any number of replicas.
    `trainer.test` and `trainer.predict` read the validation windows, too.
    """

    def __init__(
        self,
        *,
        sequence_length: int,
        batch_size: int,
        val_fraction: float,
        num_workers: int,
        seed: int,
        shift_labels: bool,
    ) -> None:
        super().__init__(
            sequence_length=sequence_length,
            least_length=1,
            batch_size=batch_size,
            val_fraction=val_fraction,
            num_workers=num_workers,
            seed=seed,
        )
        self.shift_labels = shift_labels
        self.train_windows: TokenWindows | None = None
        self.val_windows: TokenWindows | None = None

    @abstractmethod
    def build_source(self) -> TokenSource:
        """Open and return the token source; called once in every process."""

    @abstractmethod
    def describe_source(self) -> str:
        """Return how error messages name the token source."""

    def setup(self, stage: str | None = None) -> None:
        if self.train_windows is not None:
            return
        if self.trainer is not None:
            check_labels(self.trainer.lightning_module, shifted=self.shift_labels)
        source = self.build_source()
        num_windows = (len(source) - 1) // self.sequence_length
        num_val_windows = 0
        if self.val_fraction > 0.0:
            num_val_windows = max(1, int(num_windows * self.val_fraction))
        if num_windows - num_val_windows < 1:
            needed = self.sequence_length * (2 if num_val_windows else 1) + 1
            raise ConfigurationError(
                f"{self.describe_source()} holds {len(source)} tokens: too few for one training window of "
                f"sequence_length={self.sequence_length}"
                + (f" beside the validation windows (val_fraction={self.val_fraction})" if num_val_windows else "")
                + f". Give at least {needed} tokens or a smaller sequence_length."
            )
        order = torch.randperm(num_windows, generator=torch.Generator().manual_seed(self.seed))
        train_indices = order[num_val_windows:].sort().values
        val_indices = order[:num_val_windows].sort().values
        shift = self.shift_labels
        self.train_windows = TokenWindows(source, train_indices, self.sequence_length, shift_labels=shift)
        self.val_windows = TokenWindows(source, val_indices, self.sequence_length, shift_labels=shift)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        assert self.train_windows is not None, "setup() comes first"
        if self.batch_size > len(self.train_windows):
            raise ConfigurationError(
                f"batch_size={self.batch_size} is more than the {len(self.train_windows)} training windows "
                f"of {self.describe_source()}: give a smaller batch_size or more data."
            )
        return self.make_train_loader(self.train_windows)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[DataLoader[dict[str, Tensor]]]:
        assert self.val_windows is not None, "setup() comes first"
        if len(self.val_windows) == 0:
            return []  # Lightning's way to say: no validation
        return DataLoader(self.val_windows, **self.loader_options())

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        loader = self.val_dataloader()
        if isinstance(loader, list):
            raise ConfigurationError(
                f"val_fraction={self.val_fraction} keeps nothing of {self.describe_source()} to test or predict on: give a larger val_fraction."
            )
        return loader


def check_labels(module: Any, *, shifted: bool) -> None:
    """Refuse labels that would be shifted twice: a model would learn the token after the next. Raises ConfigurationError."""
    if shifted and getattr(module, "shifts_labels", False):
        raise ConfigurationError(
            f"shift_labels=True shifts the labels, and {type(module).__name__} shifts them again: give the data module "
            "shift_labels=False."
        )
