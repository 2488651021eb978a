"""Writes values one after the other into a file, each by torch.save, with its place and a checksum.

with path.open("wb") as file:
    entry = write_value(file, tensor, path.name)        # offset and length in bytes, crc32, dtype, shape
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

import torch
from torch import Tensor

from lightning_holmes.checkpoint.manifest import ValueEntry


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


def write_value(file: IO[bytes], value: Any, name: str) -> ValueEntry:
    """Write a value after the others of ``file``, whose name is ``name``. Raises OSError if the system does."""
    offset, checked = file.tell(), _Checked(file)
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    if isinstance(value, Tensor):
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        value = value.detach().cpu().contiguous()
        if value.untyped_storage().nbytes() != value.nbytes:  # torch.save writes whole storages
            value = value.clone()
    with _without_torchs_checksums():
        save_to(checked, value)
    length = file.tell() - offset
    return ValueEntry(file=name, offset=offset, length=length, crc32=checked.crc32, dtype=dtype, shape=shape)


@contextlib.contextmanager
def _without_torchs_checksums() -> Iterator[None]:
    """Turn off torch.save's own checksums, which cost as much time as all the rest of it; ours are faster."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
