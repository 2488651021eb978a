"""Parts of a folder that other processes write for this rank: values that are held elsewhere, such as on an optimizer node.

own, parts = split(values, writers, temporary, rank)       # from here on the values held elsewhere may change
entries, size, host = parts[0].wait()
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_holmes.checkpoint.folder import part_file
from lightning_holmes.checkpoint.manifest import ValueEntry
from lightning_holmes.checkpoint.parts import Deferred, PartWriter, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class ElsewherePart:
    """A file that another process is writing; ``places``: the place of each of its values."""

    file: str
    places: Mapping[Value, Any]
    written: Callable[[], Mapping[str, Any]]

    def wait(self) -> tuple[dict[Value, ValueEntry], int, str]:
        """Wait until the file is written; return its values' entries, its bytes and the host that wrote it. Raises the writer's error."""
        told = self.written()
        of_place = {(name, key): ValueEntry(file=self.file, **placed) for name, key, placed in told["entries"]}
        return {value: of_place[place] for value, place in self.places.items()}, told["bytes"], told["host"]


def split(
    values: Mapping[Value, Any], writers: Collection[PartWriter], folder: Path, rank: int
) -> tuple[dict[Value, Any], list[ElsewherePart]]:
    """Start ``writers`` writing their values of ``values``, those of rank ``rank``, into ``folder``, one file per writer. Return the values that
    are left for this rank, and the files."""
    own, of_writer = dict(values), {id(writer): dict[Value, Any]() for writer in writers}
    for name, value in values.items():
        if isinstance(value, Deferred) and id(value.writer) in of_writer:
            of_writer[id(value.writer)][name] = value.place
            del own[name]
    parts = []
    for number, writer in enumerate(writers, start=1):
        places = of_writer[id(writer)]
        if places:
            file = part_file(rank, number)
            parts.append(
                ElsewherePart(file=file, places=places, written=writer.start(folder / file, set(places.values())))
            )
    return own, parts
