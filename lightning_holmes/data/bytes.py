"""FileBytes: the bytes of files as a language-modelling data set.

This module lists and reads the files; `WindowDataModule` makes windows, split and loaders. A token is a
byte, so the vocabulary is 256 and no tokenizer is needed.

    FileBytes("stdlib", sequence_length=128)             # the running Python's own library sources
    FileBytes(["docs", "notes.txt"], max_bytes=1_000_000)
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_holmes.data.windows import WindowDataModule
from lightning_holmes.errors import ConfigurationError

STDLIB = "stdlib"

# folders of the standard library that are left out: third-party packages, tests, tables
_STDLIB_SKIPPED_FOLDERS = {
    *("__pycache__", "dist-packages", "encodings", "idlelib", "lib-dynload", "pydoc_data", "site-packages"),
    *("test", "tests", "turtledemo"),
}


class ByteSource:
    """Bytes held in memory, one token each."""

    def __init__(self, data: bytes) -> None:
        self._bytes = np.frombuffer(data, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._bytes)

    def read(self, start: int, stop: int) -> Tensor:
        return torch.from_numpy(self._bytes[start:stop].astype(np.int64))


class FileBytes(WindowDataModule):
    """Windows of the bytes of files, in an order that is the same in every process.

    `paths` names files or folders (searched recursively, in sorted order, without hidden names), or is "stdlib":
    the sources of the running Python, which every machine has. Hosts with different Python versions have
    different sources, and would train on different data.

    At most `max_bytes` are read, from the start of the list. Each window of `sequence_length` bytes is one
    sample; `val_fraction` of them, drawn by `seed`, are kept for validation.
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
        if not self.paths:
            raise ConfigurationError('paths=[] names no file: give files, folders or "stdlib".')
        if max_bytes < 2:
            raise ConfigurationError(f"max_bytes={max_bytes} is too small: give 2 or more.")
        self.max_bytes = max_bytes

    def build_source(self) -> ByteSource:
        data = bytearray()
        for path in find_files(self.paths):
            if len(data) >= self.max_bytes:
                break
            try:
                with path.open("rb") as file:
                    data += file.read(self.max_bytes - len(data))
            except OSError as error:
                raise ConfigurationError(
                    f"paths: {path} cannot be read ({error.strerror}): leave it out or allow reading it."
                ) from error
        return ByteSource(bytes(data))

    def describe_source(self) -> str:
        return f"paths={self.paths} (max_bytes={self.max_bytes})"


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
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in _walk(root, skipped_folders=_STDLIB_SKIPPED_FOLDERS, suffix=".py")
        if not path.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise ConfigurationError(
            f'paths="stdlib": this Python keeps no .py files under {root}: name a folder of text instead.'
        )
    return files


def _walk(root: Path, *, skipped_folders: set[str], suffix: str) -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped_folders and name[0] != "."]
        found += [Path(folder, name) for name in names if name.endswith(suffix) and name[0] != "."]
    return sorted(path for path in found if path.is_file())
