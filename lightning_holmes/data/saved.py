"""SavedDataset: a Hugging Face data set that `save_to_disk` wrote, as a language-modelling data module.

This module reads the folder, collates samples of different lengths and makes the loaders. The order of samples and resuming
in mid-epoch are in counting.py. Needs the extra: `pip install lightning-holmes[data]`.

    SavedDataset("tokenized", batch_size=8)                          # a column "input_ids" of token lists
    SavedDataset("stories", tokenizer="models/llama", sequence_length=512)   # a column "text"

A batch is `{"input_ids", "attention_mask", "labels"}`, each (B, S) int64, S being the length of the longest sample. The labels are
not shifted, as everywhere in Hugging Face and in `HFCausalLM`; labels of padding are -100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_holmes.data.counting import CountedDataModule
from lightning_holmes.data.tokenizing import FolderTokenizer
from lightning_holmes.errors import ConfigurationError, needs_extra

_IGNORED = -100
_VALIDATION = ("validation", "valid", "val", "test")


class SavedDataset(CountedDataModule):
    """The samples of a folder that `datasets`' `save_to_disk` wrote, shuffled by `seed` and the epoch.

    The folder holds one data set, of which `val_fraction`, drawn by `seed`, is kept for validation; or several splits:
    "train" for training and "validation" (or "valid", "val", "test") for validation. `trainer.test` and
    `trainer.predict` read "test", or else the validation samples. Samples are the token lists of the column `column`, or
    texts if `tokenizer` names a folder. Samples are cut to `sequence_length`. With token lists, a column "labels" is used if
    the data set has one.
    """

    def __init__(
        self,
        path: str,
        *,
        column: str | None = None,
        tokenizer: str | None = None,
        sequence_length: int = 1024,
        batch_size: int = 8,
        val_fraction: float = 0.01,
        pad_token_id: int = 0,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            sequence_length=sequence_length,
            least_length=2,
            batch_size=batch_size,
            val_fraction=val_fraction,
            num_workers=num_workers,
            seed=seed,
        )
        self.path = path
        self.column = column or ("input_ids" if tokenizer is None else "text")
        self.tokenizer = tokenizer
        self.pad_token_id = pad_token_id
        self._train: Any = None
        self._val: Any = None
        self._test: Any = None
        self._collator: Collator | None = None

    def setup(self, stage: str | None = None) -> None:
        if self._train is not None:
            return
        found = _load(self.path)
        if isinstance(found, Mapping):
            if "train" not in found:
                raise ConfigurationError(
                    f"path={self.path!r} has the splits {', '.join(found)}, but no split 'train': save one, or give the folder of one split."
                )
            train, val = found["train"], next((found[name] for name in _VALIDATION if name in found), None)
            test = found.get("test", val)
        else:
            num_val = max(1, int(len(found) * self.val_fraction)) if self.val_fraction > 0.0 else 0
            order = torch.randperm(len(found), generator=torch.Generator().manual_seed(self.seed))
            val = found.select(order[:num_val].sort().values.tolist()) if num_val else None
            train, test = found.select(order[num_val:].sort().values.tolist()), val
        if self.column not in train.column_names:
            raise ConfigurationError(
                f"path={self.path!r} has the columns {', '.join(train.column_names)}, but not column={self.column!r}. Give the "
                "column of token lists, or that of texts and a tokenizer folder."
            )
        if len(train) < self.batch_size:
            raise ConfigurationError(
                f"batch_size={self.batch_size} is more than the {len(train)} training samples of {self.path!r}: give a "
                "smaller batch_size or more data."
            )
        self._collator = Collator(
            column=self.column,
            tokenizer=None if self.tokenizer is None else FolderTokenizer(self.tokenizer),
            sequence_length=self.sequence_length,
            pad_token_id=self.pad_token_id,
        )
        self._train, self._val, self._test = train, val, test

    def train_dataloader(self) -> DataLoader[Any]:
        assert self._train is not None, "setup() comes first"
        return self.make_train_loader(self._train, collate_fn=self._collator)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        if self._val is None or len(self._val) == 0:
            return []  # Lightning's way to say: no validation
        return DataLoader(self._val, collate_fn=self._collator, **self.loader_options())

    def test_dataloader(self) -> DataLoader[Any]:
        if self._test is None or len(self._test) == 0:
            raise ConfigurationError(
                f"path={self.path!r} has no samples to test or predict on: give it a split 'test', or a larger val_fraction."
            )
        return DataLoader(self._test, collate_fn=self._collator, **self.loader_options())


class Collator:
    """Collate samples of different lengths into one batch, padded at the end to the longest."""

    def __init__(
        self, *, column: str, tokenizer: FolderTokenizer | None, sequence_length: int, pad_token_id: int
    ) -> None:
        self.column = column
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.pad_token_id = pad_token_id

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        tokens = self._tokens(samples)
        labels = tokens
        if self.tokenizer is None and "labels" in samples[0]:
            labels = [list(sample["labels"]) for sample in samples]
            for sample_tokens, sample_labels in zip(tokens, labels, strict=True):
                if len(sample_tokens) != len(sample_labels):
                    raise ConfigurationError(
                        f"a sample has {len(sample_tokens)} {self.column}, but {len(sample_labels)} labels: each token needs "
                        "its own label, -100 where it does not count."
                    )
        length = min(self.sequence_length, max(len(sample) for sample in tokens))
        shape = (len(samples), length)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.full(shape, _IGNORED),
        }
        for row, (sample_tokens, sample_labels) in enumerate(zip(tokens, labels, strict=True)):
            count = min(length, len(sample_tokens))
            batch["input_ids"][row, :count] = torch.tensor(sample_tokens[:count])
            batch["attention_mask"][row, :count] = 1
            batch["labels"][row, :count] = torch.tensor(sample_labels[:count])
        return batch

    def _tokens(self, samples: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        values = [sample[self.column] for sample in samples]
        if self.tokenizer is not None:
            end = [] if self.tokenizer.end is None else [self.tokenizer.end]
            values = [[*tokens, *end] for tokens in self.tokenizer.encode([str(text).encode() for text in values])]
        for value in values:
            if isinstance(value, str) or not len(value):
                raise ConfigurationError(
                    f"column={self.column!r} has the sample {value!r:.60}, which is no list of tokens. Give the column of token "
                    "lists, or name a tokenizer folder for texts; leave out empty samples."
                )
        return values


def _load(path: str) -> Any:
    if not Path(path).is_dir():
        raise ConfigurationError(
            f"path={path!r}: there is no such folder (looked in {Path.cwd()}). Give one that save_to_disk wrote; nothing is "
            "downloaded."
        )
    with needs_extra("SavedDataset", "data"):
        import datasets
    try:
        return datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"path={path!r} holds no data set that save_to_disk wrote: {error}") from error
