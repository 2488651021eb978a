"""Parts of a folder that are not this rank's to write: values that stand elsewhere, say on an optimizer node, and are written from there.

own, parts = split(values, writers, temporary, rank)       # from here on what stands elsewhere may change
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
    """A file that is being written by somebody else; ``places`` of its values."""

    file: str
    places: Mapping[Value, Any]
    written: Callable[[], Mapping[str, Any]]

    def wait(self) -> tuple[dict[Value, ValueEntry], int, str]:
        """Where its values are, its bytes, and the host that has written it. Raises what has failed."""
        told = self.written()
        of_place = {(name, key): ValueEntry(file=self.file, **placed) for name, key, placed in told["entries"]}
        return {value: of_place[place] for value, place in self.places.items()}, told["bytes"], told["host"]


def split(
    values: Mapping[Value, Any], writers: Collection[PartWriter], folder: Path, rank: int
) -> tuple[dict[Value, Any], list[ElsewherePart]]:
    """Let ``writers`` start to write what they can into ``folder``, each a file; and what is left for this rank. ``values`` are those of
    rank ``rank``."""
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
