"""Convert checkpoints between formats: folders, plain files, and (hf_export.py) folders of Hugging Face.

write_file(open_source(Path("last.ckpt")), Path("plain.ckpt"))
read_whole(Path("last.ckpt"))       # the same as torch.load of plain.ckpt
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_holmes.checkpoint import atomic, run_state
from lightning_holmes.checkpoint.file_systems import FileSystems
from lightning_holmes.checkpoint.folder import FolderReader
from lightning_holmes.checkpoint.loading import load_folder
from lightning_holmes.checkpoint.manager import bytes_of
from lightning_holmes.checkpoint.manifest import PLAN, Manifest, ValueEntry, missing_files
from lightning_holmes.checkpoint.membership import Membership
from lightning_holmes.checkpoint.parts import Item, Value, items_of, named_values, num_bytes
from lightning_holmes.checkpoint.plain import numbered
from lightning_holmes.checkpoint.saving import FolderSave
from lightning_holmes.checkpoint.torch_file import damaged_records, load_file, save_file
from lightning_holmes.errors import CheckpointError
from lightning_holmes.pipeline import tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened checkpoint.

    Attributes:
        order: the names of all values.
        items: yields each value once, with its names; a value is in memory only until the next one.
        rest: everything but the states.
        groups: the optimizers' parameter groups; None if only weights were saved.
        num_bytes: bytes of all tensors.
        advance: called with the bytes of each value that was read.
    """

    order: Sequence[Value]
    items: Callable[[], Iterator[Item]]
    rest: dict[str, Any]
    groups: list[list[dict[str, Any]]] | None
    plan: str
    num_bytes: int
    advance: list[Callable[[int], None]] = field(default_factory=list)

    def read(self) -> Iterator[Item]:
        """Yield :attr:`items`, and report the bytes of each."""
        for names, value in self.items():
            yield names, value
            for advance in self.advance:
                advance(num_bytes(value))

    def weights(self) -> dict[str, Tensor]:
        """The tensors of the module's state by name; no other value stays in memory."""
        found = {n: value for names, value in self.read() for n in names if n[0] == "state_dict"}
        return {n[1]: found[n] for n in self.order if isinstance(found.get(n), Tensor)}

    def whole(self, moved: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Any]:
        """Return the checkpoint's dictionary as plain Lightning saves it, with ``moved(tensor)`` in place of each tensor."""
        values: dict[Value, Any] = {}
        for names, value in self.read():
            values |= dict.fromkeys(names, tree.map_tensors(moved, value))
        checkpoint: dict[str, Any] = tree.map_tensors(moved, dict(self.rest))
        run_state.add_plan(checkpoint, self.plan)
        checkpoint["state_dict"] = {name[1]: values[name] for name in self.order if name[0] == "state_dict"}
        if self.groups is not None:
            states: list[dict[str, dict[str, Any]]] = [{} for _ in self.groups]
            for name, value in values.items():
                if name[0] != "state_dict":
                    states[int(name[0].removeprefix("optimizer_"))].setdefault(name[2], {})[name[3]] = value
            checkpoint["optimizer_states"] = list(map(numbered, states, self.groups))
        return checkpoint


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
    if torn:
        raise CheckpointError(torn[0])
    manifest = Manifest.load(path)
    missing = sorted(set(manifest.files) - manifest.present_files(path))
    if missing:
        hosts = sorted({manifest.files[name].host for name in missing})
        raise CheckpointError(f"{path} lacks {', '.join(missing[:3])}, written on the hosts {hosts}: copy them here")
    checkpoint = load_folder(path, Membership(), weights_only=weights_only)
    reader = FolderReader(manifest, path)
    names: dict[ValueEntry, list[Value]] = {}
    for name, entry in manifest.values():
        names.setdefault(entry, []).append(name)
    del checkpoint["state_dict"]
    optimizers = checkpoint.pop("optimizer_states", None)
    return Source(
        order=[name for name, _ in manifest.values()],
        items=lambda: ((of_one, reader.decode(entry, reader.raw(entry))) for entry, of_one in names.items()),
        rest=checkpoint,
        groups=None if optimizers is None else [o["param_groups"] for o in optimizers],
        plan=(path / PLAN).read_text(encoding="utf-8"),
        num_bytes=sum(entry.length for entry in names),
    )


def _open_file(path: Path) -> Source:
    rest = load_file(path, damaged=damaged_records(path))
    plan = run_state.take_plan(rest)
    state_dict, optimizers = rest.pop("state_dict"), rest.pop("optimizer_states", None)
    by_number = [{**o, "state": {str(n): entries for n, entries in o["state"].items()}} for o in optimizers or []]
    values = named_values(state_dict, by_number)
    items = items_of(values)
    return Source(
        order=list(values),
        items=lambda: iter(items),
        rest=rest,
        groups=None if optimizers is None else [o["param_groups"] for o in optimizers],
        plan=plan,
        num_bytes=sum(num_bytes(value) for _, value in items),
    )


def write_folder(source: Source, target: Path) -> None:
    """Write a checkpoint as a folder."""
    rest = dict(source.rest)
    if source.groups is not None:
        rest["optimizer_states"] = [{"param_groups": groups} for groups in source.groups]
    target.parent.mkdir(parents=True, exist_ok=True)
    FolderSave(
        target=target,
        token=uuid.uuid4().hex[:8],
        file_systems=FileSystems(of_rank=(0,)),
        items=source.read(),
        order=[name[1] for name in source.order if name[0] == "state_dict"],
        num_optimizers=len(source.groups or []),
        rest=bytes_of(rest),
        plan=source.plan,
    ).run(Membership())


def write_file(source: Source, target: Path) -> None:
    """Write a checkpoint as one file that plain Lightning reads. The whole checkpoint passes through memory."""
    with atomic.writing(target) as temporary:
        save_file(temporary, source.whole())


def read_whole(folder: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a folder as the dictionary that torch.load returns for a file of plain Lightning; the arguments are those of torch.load.

    Raises:
        CheckpointError: the folder is damaged or torn, or holds more than tensors and plain data while ``weights_only`` is not
            False.
    """

    def moved(tensor: Tensor) -> Tensor:
        place = map_location
        if callable(place):
            storage = place(tensor.untyped_storage(), "cpu")
            place = None if storage is None else storage.device
        elif isinstance(place, Mapping):
            place = place.get("cpu")
        return tensor if place is None else tensor.to(place)

    return open_source(Path(folder), weights_only=weights_only is not False).whole(moved)
