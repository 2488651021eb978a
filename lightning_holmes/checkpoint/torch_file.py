"""Read and write files of torch.save one storage at a time: a checkpoint can be larger than memory.

Such a file is an uncompressed zip archive with a pickle and one record for each storage. torch can write a file
with holes in place of the storages (``torch.serialization.skip_data``) and map a file without reading it (``mmap=True``);
this module finds the offsets of the storages.
"""

import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.checkpoint.restricted import load_file
from lightning_holmes.comm.value_file import Outlet, save_to
from lightning_holmes.errors import CheckpointError
from lightning_holmes.pipeline import tree

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR = b"PK\x07\x08"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRecord:
    """The place of one storage's bytes in the file."""

    name: str
    offset: int
    num_bytes: int


def storage_records(path: Path) -> list[StorageRecord]:
    """The records of a file's storages, ordered by offset, without empty ones."""
    records = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            folder, _, number = info.filename.rpartition("/")
            if not (folder.endswith("/data") and number.isdigit()) or info.file_size == 0:
                continue
            file.seek(info.header_offset)
            header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            offset = info.header_offset + _LOCAL_HEADER.size + header[9] + header[10]
            records.append(StorageRecord(name=info.filename, offset=offset, num_bytes=info.file_size))
    return sorted(records, key=lambda record: record.offset)


def records_of(path: Path, mapped: Any) -> dict[int, StorageRecord]:
    """The record of each storage of ``mapped``, the memory-mapped content of ``path``, by the address of the storage. Raises CheckpointError."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tree.tensors_of(mapped)}
    addresses = sorted(address for address, storage in storages.items() if storage.nbytes() > 0)
    records = storage_records(path)
    sizes = [storages[address].nbytes() for address in addresses]
    starts = {address - record.offset for address, record in zip(addresses, records, strict=False)}
    if sizes != [record.num_bytes for record in records] or len(starts) > 1:
        raise CheckpointError(
            f"{path} cannot be converted: its tensors do not lie in it as torch {torch.__version__} writes them. Write it anew by "
            f"torch.save(torch.load(PATH, map_location='cpu'), NEW)"
        )
    return dict(zip(addresses, records, strict=True))


def read_tensor(path: Path, record: StorageRecord | None, like: Tensor) -> Tensor:
    """Read the tensor ``like``, which maps the file, into new memory."""
    if record is None:
        return like.clone()
    data = bytearray(record.num_bytes)
    with path.open("rb") as file:
        file.seek(record.offset)
        file.readinto(data)
    storage = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.size(), like.stride())


def write_streamed(path: Path, skeleton: Any, read: Callable[[Tensor], Tensor | None]) -> None:
    """Write the same file as torch.save, one storage at a time.

    Args:
        skeleton: the object to save. The memory of large tensors need not be filled.
        read: returns the contiguous tensor to write in place of one of the skeleton's; None if the skeleton's has the values.
    """
    with torch.serialization.skip_data(), path.open("wb") as empty:
        save_to(Outlet(empty), skeleton)
    mapped = load_file(path)
    records = records_of(path, mapped)
    written: dict[str, int] = {}
    with path.open("r+b") as file:
        for tensor, place in zip(tree.tensors_of(skeleton), tree.tensors_of(mapped), strict=True):
            record = records.get(place.untyped_storage().data_ptr())
            if record is None or record.name in written:
                continue
            source = read(tensor)
            source = tensor if source is None else source
            data: Any = torch.empty(0, dtype=torch.uint8).set_(source.untyped_storage()).numpy()
            assert len(data) == record.num_bytes
            file.seek(record.offset)
            file.write(memoryview(data))
            written[record.name] = zlib.crc32(data)
            del source, data  # otherwise two tensors are in memory while the next one is read
        _write_checksums(file, path, {r.name: r for r in records.values()}, written)


def _write_checksums(file: Any, path: Path, records: dict[str, StorageRecord], checksums: dict[str, int]) -> None:
    """Write the checksums of filled records to the places of the zip format: after the data and in the central directory."""
    with zipfile.ZipFile(path) as archive:
        position = archive.start_dir
        count = len(archive.infolist())
    for _ in range(count):
        file.seek(position)
        header = _CENTRAL_HEADER.unpack(file.read(_CENTRAL_HEADER.size))
        name = file.read(header[10]).decode()
        if name in checksums:
            crc = struct.pack("<I", checksums[name])
            file.seek(position + 16)
            file.write(crc)
            after = records[name].offset + records[name].num_bytes
            file.seek(after)
            if file.read(4) == _DESCRIPTOR:
                file.seek(after + 4)
                file.write(crc)
        position += _CENTRAL_HEADER.size + header[10] + header[11] + header[12]
