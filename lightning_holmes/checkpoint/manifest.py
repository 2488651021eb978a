"""Manifest: the contents of a checkpoint folder, the place of each value's bytes, and their checksums.

The manifest is the last file written, so a folder without it, or with files shorter than it says, is torn. It is JSON
with a checksum of itself, and cannot run code.
"""

import json
import stat
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from lightning_holmes.checkpoint.parts import Value
from lightning_holmes.cluster.record import read_json, record
from lightning_holmes.errors import CheckpointError, ConfigurationError

MANIFEST = "manifest.json"
REST = "meta.pt"
PLAN = "plan.yaml"
FORMAT = "lightning_holmes checkpoint 1"

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of the folder. ``file_system`` is the number of the file system that has it; None: every file system of the job has it."""

    num_bytes: int
    file_system: int | None = None
    host: str = ""


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEntry:
    """The place of a value saved by torch.save: ``length`` bytes of ``file`` from ``offset`` on. A value that is not a
    tensor has no ``dtype``."""

    file: str
    offset: int
    length: int
    crc32: int
    dtype: str | None = None
    shape: tuple[int, ...] = ()


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a folder. ``state_dict[name]`` and ``optimizers[index][parameter name][key]`` are the values; ``state_dict``
    is in the module's own order. ``rest_crc32`` is the checksum of the file with everything else."""

    id: str
    files: dict[str, FileEntry]
    state_dict: dict[str, ValueEntry]
    optimizers: list[dict[str, dict[str, ValueEntry]]]
    rest_crc32: int
    versions: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT

    def to_bytes(self) -> bytes:
        """Serialise the manifest for :meth:`from_bytes`."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        return body + b"\n" + f"{zlib.crc32(body):08x}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> "Manifest":
        """Read a manifest.

        Raises:
            CheckpointError: the manifest is damaged, or of another format.
        """
        body, _, check = data.rstrip(b"\n").rpartition(b"\n")
        try:
            if check != f"{zlib.crc32(body):08x}".encode():
                raise ValueError("its checksum differs")
            manifest = read_json(cls, body, source=MANIFEST)
            manifest.check()
        except (ValueError, ConfigurationError) as error:
            raise CheckpointError(f"{source} is damaged: {error}") from None
        return manifest

    def check(self) -> None:
        """Raise ValueError if the manifest is of another format, names files outside of the folder, or has values outside of their files or of an
        unknown dtype."""
        if self.format != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT!r}; read it with the version that wrote it")
        for name in self.files:
            if name != Path(name).name or name in ("", ".", "..") or "\0" in name:
                raise ValueError(f"it names a file outside of the folder: {name!r}")
        for (*_, name), entry in self.values():
            file = self.files.get(entry.file)
            if (
                file is None
                or file.file_system is None
                or not 0 <= entry.offset <= entry.offset + entry.length <= file.num_bytes
            ):
                raise ValueError(f"the bytes of {name!r} lie outside of {entry.file}")
            if entry.dtype is not None and entry.dtype not in DTYPES:
                raise ValueError(f"{name!r} has the unknown type {entry.dtype!r}")

    def values(self) -> Iterator[tuple[Value, ValueEntry]]:
        """Yield the name and the place of every value."""
        for name, entry in self.state_dict.items():
            yield ("state_dict", name), entry
        for index, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.items():
                for key, entry in state.items():
                    yield (f"optimizer_{index}", "state", parameter, key), entry

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read the manifest of a checkpoint folder. Raises CheckpointError if it is missing or damaged."""
        path = folder / MANIFEST
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would wait for its writer
                raise OSError("it is no file")
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{folder} is no whole checkpoint: {path} cannot be read ({error})") from None
        return cls.from_bytes(data, str(path))

    def present_files(self, folder: Path) -> frozenset[str]:
        """The files that ``folder`` has at full length."""
        return frozenset(name for name, entry in self.files.items() if _size(folder / name) == entry.num_bytes)


def missing_files(folder: Path) -> list[str]:
    """Messages that say why a folder is not a whole checkpoint; empty if it is.

    If several file systems hold the checkpoint, a folder is whole if it has the files of one of them.
    """
    try:
        manifest = Manifest.load(folder)
    except CheckpointError as error:
        return [str(error)]
    present = manifest.present_files(folder)
    common = [n for n, entry in manifest.files.items() if entry.file_system is None]
    systems = {entry.file_system for entry in manifest.files.values()} - {None}
    lacking = {s: [n for n, e in manifest.files.items() if e.file_system == s and n not in present] for s in systems}
    lost = [n for n in common if n not in present]
    if lacking and all(lacking.values()):
        lost += min((len(names), names) for names in lacking.values())[1]
    return [f"{folder / name} is missing or cut off" for name in lost]


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1
