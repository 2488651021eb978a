"""TokenFile: memory-mapped files of tokens as a language-modelling data set.

This module maps and checks flat .bin files (uint16 or uint32, one token after another, no header);
`WindowDataModule` makes windows, split and loaders. Only the windows that are read are copied.

    TokenFile("train.bin", dtype="uint16", vocab_size=50257, sequence_length=1024)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_holmes.data.windows import WindowDataModule
from lightning_holmes.errors import ConfigurationError

TokenDtype = Literal["uint16", "uint32"]

_CHECKED_AT_ONCE = 1 << 22  # tokens; bounds the memory of the vocabulary check


class TokenFileSource:
    """Token files, concatenated to one sequence. Pickled as paths: each data worker maps the files itself."""

    def __init__(self, paths: list[Path], dtype: TokenDtype) -> None:
        self.paths = paths
        self.dtype = dtype
        self._maps: list[NDArray[Any]] = [np.memmap(path, dtype=dtype, mode="r") for path in paths]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.paths, self.dtype)

    def __len__(self) -> int:
        return sum(len(tokens) for tokens in self._maps)

    def read(self, start: int, stop: int) -> Tensor:
        pieces = []
        for tokens in self._maps:
            if start < len(tokens) and stop > 0:
                pieces.append(tokens[max(start, 0) : stop].astype(np.int64))
            start -= len(tokens)
            stop -= len(tokens)
        return torch.from_numpy(np.concatenate(pieces))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Read every token once, and raise ConfigurationError for the first one that is not below `vocab_size`."""
        for path, tokens in zip(self.paths, self._maps, strict=True):
            for start in range(0, len(tokens), _CHECKED_AT_ONCE):
                piece = tokens[start : start + _CHECKED_AT_ONCE]
                if int(piece.max()) < vocab_size:
                    continue
                position = start + int(np.argmax(piece >= vocab_size))
                raise ConfigurationError(
                    f"{path}: token {position} is {int(tokens[position])}, but vocab_size={vocab_size}. "
                    f"Give the vocabulary size of the tokenizer that wrote the file, or the right dtype "
                    f"(now dtype={self.dtype!r})."
                )


class TokenFile(WindowDataModule):
    """Windows of one or several flat token files.

    If `vocab_size` is given, all tokens are checked against it once, before training. Each window of
    `sequence_length` tokens is one sample; `val_fraction` of them, drawn by `seed`, are kept for validation.
    """

    def __init__(
        self,
        paths: str | list[str],
        *,
        dtype: TokenDtype = "uint16",
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
        if dtype not in ("uint16", "uint32"):
            raise ConfigurationError(f"dtype={dtype!r} is not a token dtype: give 'uint16' or 'uint32'.")
        if vocab_size is not None and vocab_size < 1:
            raise ConfigurationError(f"vocab_size={vocab_size} is too small: give 1 or more, or leave it out.")
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        if not self.paths:
            raise ConfigurationError("paths=[] names no file: give one or more token files.")
        self.dtype: TokenDtype = dtype
        self.vocab_size = vocab_size

    def build_source(self) -> TokenFileSource:
        itemsize = np.dtype(self.dtype).itemsize
        for name in self.paths:
            path = Path(name)
            if not path.is_file():
                raise ConfigurationError(
                    f"paths: there is no token file {name!r} (looked in {Path.cwd()}). Give an existing file."
                )
            num_bytes = path.stat().st_size
            if num_bytes == 0 or num_bytes % itemsize:
                raise ConfigurationError(
                    f"{name}: {num_bytes} bytes are no whole number of {self.dtype} tokens ({itemsize} bytes "
                    "each). Give the dtype that the file was written with; the file may also be cut off."
                )
        source = TokenFileSource([Path(name) for name in self.paths], self.dtype)
        if self.vocab_size is not None:
            source.check_vocabulary(self.vocab_size)
        return source

    def describe_source(self) -> str:
        return f"paths={self.paths} (dtype={self.dtype})"
