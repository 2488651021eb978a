"""Convert checkpoints between formats, one value at a time: folders, plain files, and the safetensors of Hugging Face.

write_file(open_source(Path("last.ckpt")), Path("plain.ckpt"))
read_whole(Path("last.ckpt"))       # the same as torch.load of plain.ckpt
"""

import io
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_holmes.checkpoint import atomic, resume
from lightning_holmes.checkpoint.file_systems import FileSystems
from lightning_holmes.checkpoint.folder import FolderReader, all_values
from lightning_holmes.checkpoint.loading import load_folder
from lightning_holmes.checkpoint.manifest import DTYPES, PLAN, Manifest, missing_files
from lightning_holmes.checkpoint.meeting import Meeting
from lightning_holmes.checkpoint.parts import Deferred, Value, named_values, same_memory
from lightning_holmes.checkpoint.restricted import damaged_records, load_file
from lightning_holmes.checkpoint.saving import FolderSave
from lightning_holmes.checkpoint.torch_file import read_tensor, records_of, write_streamed
from lightning_holmes.comm.value_file import compact
from lightning_holmes.errors import CheckpointError
from lightning_holmes.pipeline import tree

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A value of a source: a tensor of ``dtype`` and ``shape``, or another object if ``dtype`` is None. Items with equal
    ``place`` are the same value under several names."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    place: Any
    read: Callable[[], Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor; 0 for other objects."""
        if self.dtype is None:
            return 0
        return torch.Size(self.shape).numel() * torch.empty(0, dtype=self.dtype).element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened checkpoint. ``rest`` is everything but the states; ``groups`` are the optimizers' parameter groups, None
    if only weights were saved."""

    items: dict[Value, Item]
    rest: dict[str, Any]
    groups: list[list[dict[str, Any]]] | None = None
    plan: str = ""
    advance: list[Advance] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum({item.place: item.num_bytes for item in self.items.values()}.values())

    def read(self, item: Item) -> Any:
        """Return the value of an item, and report its bytes to the callbacks in ``advance``."""
        value = item.read()
        for advance in self.advance:
            advance(item.num_bytes)
        return value


def open_source(path: Path, *, weights_only: bool = True) -> Source:
    """Open a checkpoint of either format. ``weights_only=False`` is for a folder that you trust.

    Raises:
        CheckpointError: the checkpoint is damaged or torn.
        FileNotFoundError: there is no checkpoint at ``path``.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    return _open_folder(path, weights_only) if path.is_dir() else _open_file(path)


def _open_folder(path: Path, weights_only: bool) -> Source:
    torn = missing_files(path)
    manifest = Manifest.load(path) if not torn else None
    if manifest is None:
        raise CheckpointError(torn[0])
    missing = sorted(set(manifest.files) - manifest.present_files(path))
    if missing:
        hosts = sorted({manifest.files[name].host for name in missing})
        raise CheckpointError(
            f"{path} lacks {', '.join(missing[:3])}, written on the hosts {hosts}: copy them here first"
        )
    checkpoint = load_folder(path, 0, lambda value: [value], weights_only=weights_only)
    reader = FolderReader(manifest, path)

    def item(name: Value, entry: Any) -> Item:
        return Item(
            dtype=None if entry.dtype is None else DTYPES[entry.dtype],
            shape=entry.shape,
            place=entry,
            read=lambda: reader.read({name: entry})[name],
        )

    del checkpoint["state_dict"]
    optimizers = checkpoint.pop("optimizer_states", None)
    return Source(
        items={name: item(name, entry) for name, entry in all_values(manifest)},
        rest=checkpoint,
        groups=None if optimizers is None else [o["param_groups"] for o in optimizers],
        plan=(path / PLAN).read_text(encoding="utf-8"),
    )


def _open_file(path: Path) -> Source:
    damaged = damaged_records(path)
    if damaged:
        raise CheckpointError(f"{path} is damaged: the checksum of {', '.join(damaged[:3])} is wrong")
    checkpoint = load_file(path)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} is no checkpoint of Lightning's: it has no state_dict")
    records = records_of(path, checkpoint) if zipfile.is_zipfile(path) else {}
    rest = dict(checkpoint)
    plan = resume.take_plan(rest)
    state_dict, optimizers = rest.pop("state_dict"), rest.pop("optimizer_states", None)
    by_number = [{**o, "state": {str(n): entries for n, entries in o["state"].items()}} for o in optimizers or []]

    def item(name: Value, value: Any) -> Item:
        if not isinstance(value, Tensor):
            return Item(dtype=None, shape=(), place=name, read=lambda: value)
        record = records.get(value.untyped_storage().data_ptr())
        place = same_memory(name, value)
        read = lambda: read_tensor(path, record, value)  # noqa: E731
        return Item(dtype=value.dtype, shape=tuple(value.shape), place=place, read=read)

    return Source(
        items={name: item(name, value) for name, value in named_values(state_dict, by_number).items()},
        rest=rest,
        groups=None if optimizers is None else [o["param_groups"] for o in optimizers],
        plan=plan,
    )


def write_folder(source: Source, target: Path) -> None:
    """Write a checkpoint as a folder."""
    rest = dict(source.rest)
    if source.groups is not None:
        rest["optimizer_states"] = [{"param_groups": groups} for groups in source.groups]
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    token = uuid.uuid4().hex[:8]
    target.parent.mkdir(parents=True, exist_ok=True)
    FolderSave(
        target=target,
        token=token,
        file_systems=FileSystems(of_rank=(0,)),
        values={n: Deferred(place=i.place, read=_reading(source, i)) for n, i in source.items.items()},
        order=[name[1] for name in source.items if name[0] == "state_dict"],
        num_optimizers=len(source.groups or []),
        rest=buffer.getvalue(),
        plan=source.plan,
    ).run(Meeting(None, 0, 1, token, timedelta(days=1)))


def _reading(source: Source, item: Item) -> Callable[[], Any]:
    return lambda: source.read(item)


def write_file(source: Source, target: Path) -> None:
    """Write a checkpoint as one file that plain Lightning reads."""
    blanks: dict[Any, Tensor] = {}
    items: dict[int, Item] = {}

    def stand_in(item: Item) -> Any:
        if item.dtype is None:
            return item.read()
        if item.place not in blanks:
            blanks[item.place] = blank = torch.empty(item.shape, dtype=item.dtype)  # its memory is never touched
            items[id(blank)] = item
        return blanks[item.place]

    checkpoint = _assembled(source, stand_in)

    def read(tensor: Tensor) -> Tensor | None:
        item = items.get(id(tensor))
        return None if item is None else compact(source.read(item))

    with atomic.writing(target) as temporary:
        write_streamed(temporary, checkpoint, read)


def read_whole(folder: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a folder as the dictionary that torch.load returns for a file of plain Lightning; the arguments are those of torch.load.

    Raises:
        CheckpointError: the folder is damaged or torn, or holds more than tensors and plain data while ``weights_only`` is not
            False.
    """
    source = open_source(Path(folder), weights_only=weights_only is not False)
    values: dict[Any, Any] = {}

    def moved(tensor: Tensor) -> Tensor:
        place = map_location
        if callable(place):
            storage = place(tensor.untyped_storage(), "cpu")
            place = None if storage is None else storage.device
        elif isinstance(place, Mapping):
            place = place.get("cpu")
        return tensor if place is None else tensor.to(place)

    def value(item: Item) -> Any:
        if item.place not in values:
            values[item.place] = tree.map_tensors(moved, item.read())
        return values[item.place]

    return _assembled(replace(source, rest=tree.map_tensors(moved, source.rest)), value)


def _assembled(source: Source, value_of: Callable[[Item], Any]) -> dict[str, Any]:
    """The checkpoint's dictionary as plain Lightning saves it."""
    checkpoint = dict(source.rest)
    resume.add_plan(checkpoint, source.plan)
    state_dict = {name[1]: value_of(item) for name, item in source.items.items() if name[0] == "state_dict"}
    checkpoint["state_dict"] = state_dict
    if source.groups is not None:
        checkpoint["optimizer_states"] = [
            _numbered(source, index, groups, value_of) for index, groups in enumerate(source.groups)
        ]
    return checkpoint


def _numbered(
    source: Source, index: int, groups: list[dict[str, Any]], value_of: Callable[[Item], Any]
) -> dict[str, Any]:
    """An optimizer's state as plain Lightning saves it: parameters are numbered by their position over all groups."""
    places = {str(name): place for place, name in enumerate(n for g in groups for n in g["params"])}
    state: dict[int, dict[str, Any]] = {}
    for name, item in source.items.items():
        if name[0] == f"optimizer_{index}":
            state.setdefault(places[name[2]], {})[name[3]] = value_of(item)
    numbers = iter(range(len(places)))
    described = [{**g, "params": [next(numbers) for _ in g["params"]]} for g in groups]
    return {"state": dict(sorted(state.items())), "param_groups": described}


def weights(source: Source) -> Iterator[tuple[str, Item]]:
    """Yield the name and item of each tensor of the module's state."""
    for name, item in source.items.items():
        if name[0] == "state_dict" and item.dtype is not None:
            yield name[1], item
