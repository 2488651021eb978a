"""The folder format: files to which every rank writes its part, and a manifest.

A folder holds ``__<rank>_0.distcp`` (a rank's values, each written by torch.save), ``meta.pt`` (everything else of
Lightning's checkpoint), ``plan.yaml`` and ``manifest.json`` (written last). :class:`FolderReader` reads it without
unpickling anything but tensors and plain data, checks every byte, and reads single values.
"""

import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from lightning_holmes.checkpoint.manifest import Manifest, ValueEntry
from lightning_holmes.checkpoint.parts import Item, Value
from lightning_holmes.checkpoint.torch_file import load_bytes
from lightning_holmes.checkpoint.value_file import write_value
from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.errors import CheckpointDamagedError, CheckpointError


def part_file(rank: int) -> str:
    """The name of the file with a rank's values."""
    return f"__{rank}_0.distcp"


def write_part(path: Path, items: Iterable[Item]) -> dict[Value, ValueEntry]:
    """Write a rank's values to ``path``, one after the other, and wait until they are on the disk."""
    entries: dict[Value, ValueEntry] = {}
    with path.open("wb") as file:
        for names, value in items:
            entries |= dict.fromkeys(names, write_value(file, value, path.name))
        file.flush()
        os.fsync(file.fileno())
    return entries


Fetch = Callable[["FolderReader", Sequence[ValueEntry]], dict[ValueEntry, bytes]]
"""Gets the bytes of values from other ranks' file systems."""


class FolderReader:
    """Reads single values of a checkpoint folder.

    Args:
        manifest: the folder's manifest.
        folder: the path at which this rank sees the folder; None if it does not.
        fetch: gets the bytes of values whose files this rank does not see from ranks that do; all ranks then call
            it together. None if every rank sees all files.
    """

    def __init__(self, manifest: Manifest, folder: Path | None, fetch: "Fetch | None" = None) -> None:
        self.manifest = manifest
        self.folder = folder
        self.present = frozenset() if folder is None else manifest.present_files(folder)
        self._fetch = fetch
        self.sees_all = fetch is None

    def read(self, entries: Mapping[Value, ValueEntry]) -> dict[Value, Any]:
        """Return the values of ``entries``. If not every rank sees all files, all ranks must call, each with its own entries.

        Raises:
            CheckpointError: a value is damaged, or its file is not found.
        """
        places: dict[ValueEntry, Any] = {}
        far = {entry for entry in entries.values() if entry.file not in self.present}
        fetched = {} if self._fetch is None else self._fetch(self, sorted(far, key=lambda e: (e.file, e.offset)))
        near = sorted(
            (e for e in dict.fromkeys(entries.values()) if e.file in self.present), key=lambda e: (e.file, e.offset)
        )
        for file_name, entries_of_file in itertools.groupby(near, key=lambda e: e.file):
            with self._path(file_name).open("rb") as file:
                places |= {entry: self.decode(entry, read_at(file, entry)) for entry in entries_of_file}
        for entry in far:
            if entry not in fetched:
                raise self.not_here(entry)
            places[entry] = self.decode(entry, fetched.pop(entry))
        return {name: places[entry] for name, entry in entries.items()}

    def raw(self, entry: ValueEntry) -> bytes:
        """The bytes of a value whose file this rank sees."""
        with self._path(entry.file).open("rb") as file:
            return read_at(file, entry)

    def _path(self, file_name: str) -> Path:
        """The path of a file in :attr:`present`."""
        assert self.folder is not None
        return self.folder / file_name

    def not_here(self, entry: ValueEntry) -> CheckpointError:
        """The error for a value whose file this rank does not see."""
        host = self.manifest.files[entry.file].host
        return CheckpointError(
            f"{entry.file} of the checkpoint {self.folder or self.manifest.id} is missing or cut off here; it was written on host {host!r}: copy it from "
            f"there, or start a rank there"
        )

    def decode(self, entry: ValueEntry, data: bytes) -> Any:
        """The value that :meth:`raw` returns the bytes of. Raises CheckpointError if it is damaged."""
        source = f"{self.folder or 'checkpoint'}/{entry.file} (bytes {entry.offset} to {entry.offset + entry.length})"
        if len(data) != entry.length or zlib.crc32(data) != entry.crc32:
            raise CheckpointDamagedError(f"{source} is damaged: its checksum differs from the one in the manifest")
        value = load_bytes(data, source)
        found = (str(value.dtype).removeprefix("torch."), tuple(value.shape)) if isinstance(value, Tensor) else None
        if found != (None if entry.dtype is None else (entry.dtype, entry.shape)):
            raise CheckpointError(f"{source} holds another value than the manifest says: {found}")
        return value


def read_at(file: IO[bytes], entry: ValueEntry) -> bytes:
    """Read the bytes of a value, as immutable bytes: io.BytesIO copies anything else."""
    file.seek(entry.offset)
    return file.read(entry.length)


class FolderStateDict(MutableMapping[str, Any]):
    """The module's state in a folder, as a mapping that reads a value when it is used; hooks may set and delete entries."""

    def __init__(self, reader: FolderReader) -> None:
        self._reader = reader
        self._entries = dict(reader.manifest.state_dict)
        self._own: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        entry = self._entries[name]
        if entry.file not in self._reader.present:
            raise self._reader.not_here(entry)
        return self._reader.decode(entry, self._reader.raw(entry))

    def __setitem__(self, name: str, value: Any) -> None:
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._own.pop(name, None)
        self._entries.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._entries, *self._own]))

    def __len__(self) -> int:
        return len(set(self._entries) | set(self._own))

    def read_many(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of ``names``; see :meth:`FolderReader.read`."""
        names = list(names)
        wanted: dict[Value, ValueEntry] = {("state_dict", n): self._entries[n] for n in names if n not in self._own}
        found = self._reader.read(wanted)
        return {n: self._own[n] if n in self._own else found["state_dict", n] for n in names}


class FolderOptimizerState(Mapping[str, Any]):
    """An optimizer's states in a folder, by parameter name, each read when it is used; :meth:`read_many` reads several at once.

    Args:
        entries: the places of a state's values, by the names of the parameter and of the value.
    """

    def __init__(self, reader: FolderReader, entries: Mapping[str, Mapping[str, ValueEntry]]) -> None:
        self._reader = reader
        self._entries = entries
        self.is_near = reader.sees_all
        """Whether each rank sees all files, so that it can read at any time without the other ranks."""

    def renamed(self, keys: Mapping[str, str]) -> "FolderOptimizerState":
        """Return those of the states that have one of ``keys``, by the names that have these keys."""
        found = {name: self._entries[key] for name, key in keys.items() if key in self._entries}
        return FolderOptimizerState(self._reader, found)

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._entries:
            raise KeyError(name)
        give_back_freed_memory()  # of the state before, which may be large
        return self.read_many([name])[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def read_many(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the states of those of ``names`` that have one; see :meth:`FolderReader.read`."""
        wanted = [((name, key), entry) for name in names for key, entry in self._entries.get(name, {}).items()]
        states: dict[str, dict[str, Any]] = {}
        for (name, key), value in self._reader.read(dict(wanted)).items():
            states.setdefault(name, {})[key] = value
        return states
