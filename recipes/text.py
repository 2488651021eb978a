"""FileBytes and TokenFile: text as windows of tokens, for language models.

    FileBytes("stdlib", sequence_length=128)             # the bytes of the running Python's own library sources
    TokenFile("train.bin", dtype="uint16", sequence_length=1024)

Every item is `{"input_ids": (S,), "labels": (S,)}`, both int64; the labels are already shifted, so `labels[i]` is the token
that follows `input_ids[i]`. With `shift_labels=False` there are no labels: a model that shifts labels itself, like every
Hugging Face model and `HFCausalLM`, is trained on the input.
"""

from __future__ import annotations

import os
import sysconfig
from abc import abstractmethod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_holmes.data import CountedDataModule
from lightning_holmes.errors import ConfigurationError

STDLIB = "stdlib"
# folders of the standard library that are left out: third-party packages, tests, tables
_STDLIB_SKIPPED_FOLDERS = {
    *("__pycache__", "dist-packages", "encodings", "idlelib", "lib-dynload", "pydoc_data", "site-packages"),
    *("test", "tests", "turtledemo"),
}


class Windows(Dataset[dict[str, Tensor]]):
    """The windows numbered `indices` of a sequence of tokens: window `i` begins at token `i * sequence_length`."""

    def __init__(self, tokens: Any, indices: Tensor, sequence_length: int, *, shift_labels: bool) -> None:
        self.tokens = tokens
        self.indices = indices
        self.sequence_length = sequence_length
        self.shift_labels = shift_labels

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(self.indices[index]) * self.sequence_length
        tokens = torch.from_numpy(self.tokens[start : start + self.sequence_length + 1].astype(np.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]} if self.shift_labels else {"input_ids": tokens[:-1]}


class WindowDataModule(CountedDataModule):
    """Training and validation windows of one sequence of tokens.

    `val_fraction` of the windows, drawn by `seed`, are kept for validation; the split depends on nothing else, so that it is
    the same in every process. `trainer.test` and `trainer.predict` read the validation windows, too.
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
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        if sequence_length < 1:
            raise ConfigurationError(f"sequence_length={sequence_length} is too small: give 1 or more.")
        if not 0.0 <= val_fraction < 1.0:
            raise ConfigurationError(
                f"val_fraction={val_fraction} is no fraction of the data: give at least 0 (no validation) and less than 1."
            )
        self.sequence_length = sequence_length
        self.val_fraction = val_fraction
        self.shift_labels = shift_labels
        self.train_windows: Windows | None = None
        self.val_windows: Windows | None = None

    @abstractmethod
    def open_tokens(self) -> Any:
        """Return the tokens, an array or what is sliced like one; called once in every process."""

    def setup(self, stage: str | None = None) -> None:
        if self.train_windows is not None:
            return
        module = None if self.trainer is None else self.trainer.lightning_module
        if self.shift_labels and getattr(module, "shifts_labels", False):  # it would learn the token after the next
            raise ConfigurationError(
                f"shift_labels=True shifts the labels, and {type(module).__name__} shifts them again: give the data module "
                "shift_labels=False."
            )
        tokens = self.open_tokens()
        count = (len(tokens) - 1) // self.sequence_length
        held_out = max(1, int(count * self.val_fraction)) if self.val_fraction > 0.0 else 0
        if count - held_out < self.batch_size:
            raise ConfigurationError(
                f"{len(tokens)} tokens are {count} windows of sequence_length={self.sequence_length}, of which {held_out} are "
                f"held out: too few for batch_size={self.batch_size}. Give more data, shorter windows or a smaller batch."
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))
        self.train_windows, self.val_windows = (
            Windows(tokens, indices.sort().values, self.sequence_length, shift_labels=self.shift_labels)
            for indices in (order[held_out:], order[:held_out])
        )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self.make_train_loader(self.train_windows)

    def val_dataloader(self) -> Any:
        assert self.val_windows is not None, "setup() comes first"
        return DataLoader(self.val_windows, **self.loader_options()) if len(self.val_windows) else []

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    def predict_dataloader(self) -> Any:
        return self.val_dataloader()


class FileBytes(WindowDataModule):
    """Windows of the bytes of files, one token each, in an order that is the same in every process.

    `paths` names files or folders (searched recursively, in sorted order, without hidden names), or is "stdlib": the sources of
    the running Python, which every machine has. Hosts with different Python versions have different sources, and would train
    on different data. At most `max_bytes` are read, from the start of the list.
    """

    def __init__(
        self,
        paths: str | list[str] = STDLIB,
        *,
        max_bytes: int = 8_000_000,
        sequence_length: int = 128,
        batch_size: int = 32,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        seed: int = 0,
        shift_labels: bool = True,
    ) -> None:
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            val_fraction=val_fraction,
            num_workers=num_workers,
            seed=seed,
            shift_labels=shift_labels,
        )
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        self.max_bytes = max_bytes

    def open_tokens(self) -> NDArray[np.uint8]:
        data = bytearray()
        for path in find_files(self.paths):
            if len(data) >= self.max_bytes:
                break
            with path.open("rb") as file:
                data += file.read(self.max_bytes - len(data))
        return np.frombuffer(bytes(data), dtype=np.uint8)


class TokenFile(WindowDataModule):
    """Windows of a flat token file: uint16 or uint32, one token after another, no header. It is memory-mapped, and only the windows
    that are read are copied.

    If `vocab_size` is given, all tokens are checked against it once, before training.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: Literal["uint16", "uint32"] = "uint16",
        vocab_size: int | None = None,
        sequence_length: int = 1024,
        batch_size: int = 8,
        val_fraction: float = 0.01,
        num_workers: int = 0,
        seed: int = 0,
        shift_labels: bool = True,
    ) -> None:
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            val_fraction=val_fraction,
            num_workers=num_workers,
            seed=seed,
            shift_labels=shift_labels,
        )
        self.path = path
        self.dtype = dtype
        self.vocab_size = vocab_size

    def open_tokens(self) -> MappedTokens:
        path, itemsize = Path(self.path), np.dtype(self.dtype).itemsize
        if not path.is_file():
            raise ConfigurationError(f"path={self.path!r}: there is no such token file (looked in {Path.cwd()}).")
        if path.stat().st_size == 0 or path.stat().st_size % itemsize:
            raise ConfigurationError(
                f"{self.path}: {path.stat().st_size} bytes are no whole number of {self.dtype} tokens ({itemsize} bytes each). "
                "Give the dtype that the file was written with; the file may also be cut off."
            )
        tokens = MappedTokens(path, self.dtype)
        if self.vocab_size is not None and (largest := int(tokens.map.max())) >= self.vocab_size:
            raise ConfigurationError(
                f"{self.path}: it holds token {largest}, but vocab_size={self.vocab_size}. Give the vocabulary size of the tokenizer "
                f"that wrote the file, or the right dtype (now dtype={self.dtype!r})."
            )
        return tokens


class MappedTokens:
    """A memory-mapped token file; pickled by its path, so that data workers map it themselves."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype = path, dtype
        self.map: NDArray[Any] = np.memmap(path, dtype=dtype, mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.dtype)

    def __len__(self) -> int:
        return len(self.map)

    def __getitem__(self, window: slice) -> NDArray[Any]:
        return self.map[window]


def find_files(paths: list[str]) -> list[Path]:
    """The files that `paths` name; folders are searched recursively in sorted order."""
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if name == STDLIB:
            files += find_stdlib_sources()
        elif path.is_dir():
            files += _walk(path, skipped_folders={"__pycache__"}, suffix="")
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigurationError(
                f"paths: there is no file or folder {name!r} (looked in {Path.cwd()}). "
                'Give an existing path, or "stdlib" for the sources of the running Python.'
            )
    return files


def find_stdlib_sources() -> list[Path]:
    """The .py files of the running Python's standard library, without tests, tables and installed packages."""
    found = _walk(Path(sysconfig.get_paths()["stdlib"]), skipped_folders=_STDLIB_SKIPPED_FOLDERS, suffix=".py")
    return [path for path in found if not path.name.startswith("_sysconfigdata")]


def _walk(root: Path, *, skipped_folders: set[str], suffix: str) -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped_folders and name[0] != "."]
        found += [Path(folder, name) for name in names if name.endswith(suffix) and name[0] != "."]
    return sorted(path for path in found if path.is_file())
