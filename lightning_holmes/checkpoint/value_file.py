"""ValueFile: a file of values one after the other, each written by torch.save, with its place and a checksum.

with ValueFile(path) as file:
    placed = file.add(tensor)              # offset and length in bytes, crc32, dtype, shape
"""

import contextlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The place of a value in a file: ``length`` bytes from ``offset`` on. ``dtype`` is None if the value is no tensor."""

    offset: int
    length: int
    crc32: int
    dtype: str | None
    shape: tuple[int, ...]


class Outlet:
    """A file that :func:`save_to` writes to. It keeps the system's own error, since torch reports a full disk as "unexpected pos"."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def seek(self, *place: int) -> int:
        return self._file.seek(*place)


def save_to(outlet: Outlet, value: Any) -> None:
    """Write ``value`` by torch.save. Raises OSError if the system does."""
    try:
        torch.save(value, cast(IO[bytes], outlet))
    except RuntimeError:
        if outlet.error is not None:
            raise outlet.error from None
        raise


class _Checked(Outlet):
    """A file that is written with a running checksum."""

    crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)


class ValueFile:
    """Writes values to a new file at ``path``, from one thread at a time. At the end of ``with`` the file is on the disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.close()

    def add(self, value: Any) -> Placed:
        """Write a value after the others. Raises OSError if the system does."""
        offset, checked = self._file.tell(), _Checked(self._file)
        dtype: str | None = None
        shape: tuple[int, ...] = ()
        if isinstance(value, Tensor):
            dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
            value = compact(value)
        with _without_torchs_checksums():
            save_to(checked, value)
        length = self._file.tell() - offset
        return Placed(offset=offset, length=length, crc32=checked.crc32, dtype=dtype, shape=shape)

    def finish(self) -> int:
        """Wait until the file is on the disk; return its size in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def compact(value: Tensor) -> Tensor:
    """The tensor on the host, in a storage of its own size: torch.save writes whole storages."""
    value = value.detach().cpu().contiguous()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


@contextlib.contextmanager
def _without_torchs_checksums() -> Iterator[None]:
    """Turn off torch.save's own checksums, which cost as much time as all the rest of it; ours are faster."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
