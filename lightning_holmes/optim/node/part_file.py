"""PartFile: an optimizer node's part of a checkpoint folder: values and states of its units, as of one commit, in one file.

    file = PartFile(path, {unit: Wanted(values=names, states=names)})
    file.run()                              # while training goes on: a unit that is about to change is written first

A place in the file is (parameter name, key of its state), with the key "" for its value.
"""

import contextlib
import socket
import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_holmes.comm.value_file import ValueFile
from lightning_holmes.optim.node.unit import Unit

NEXT_TO = ".node"
"""The suffix of the file that a node creates beside a file it has found, to show that it can write there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The names of a unit's parameters whose values, and whose states, are to be written."""

    values: Collection[str]
    states: Collection[str]


class PartFile:
    """The file at ``path``, in an existing folder.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, wanted: Mapping[Unit, Wanted]) -> None:
        self._file = ValueFile(path)
        self._wanted = dict(wanted)
        self._lock = threading.Lock()
        self._entries: list[tuple[str, str, dict[str, Any]]] = []
        self._error: Exception | None = None
        for unit in wanted:
            unit.expect(self.write)

    def write(self, unit: Unit) -> None:
        """Write the wanted values and states of ``unit``, whose lock is held. :meth:`run` reports errors."""
        with self._lock:
            if self._error is None:
                try:
                    self._write(unit, self._wanted[unit])
                except Exception as error:
                    self._error = error

    def _write(self, unit: Unit, wanted: Wanted) -> None:
        if wanted.values:
            with unit.values() as flat:
                for name, value in unit.layout.views(flat).items():
                    if name in wanted.values:
                        self._add(name, "", value)
        if wanted.states:
            with unit.states(wanted.states) as states:
                for name, state in states.items():
                    for key, value in state.items():
                        self._add(name, key, value)

    def _add(self, name: str, key: str, value: Any) -> None:
        self._entries.append((name, key, asdict(self._file.add(value))))

    def run(self) -> dict[str, Any]:
        """Write the remaining units, and wait until everything is on the disk.

        Returns:
            As plain data "entries", with the place of each value, "bytes" and "host"; or "error", if something failed.
        """
        for unit in self._wanted:
            unit.meet(self.write)
        try:
            if self._error is not None:
                raise self._error
            size = self._file.finish()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            with contextlib.suppress(OSError):  # a full disk may fail again here
                self._file.close()
        return {"entries": self._entries, "bytes": size, "host": socket.gethostname()}


def can_write_beside(folder: str, name: str) -> bool:
    """Whether this process sees the file ``name`` in ``folder``, and can write there: it creates an empty file, and leaves it there."""
    try:
        if name not in {path.name for path in Path(folder).iterdir()}:
            return False
        Path(folder, name + NEXT_TO).touch(exist_ok=False)
    except OSError:
        return False
    return True
