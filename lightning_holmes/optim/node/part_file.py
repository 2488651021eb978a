"""PartFile: what an optimizer node writes of a checkpoint folder: values and states of its units, as of one commit, in one file.

    file = PartFile(path, {unit: Wanted(values=names, states=names)})
    file.run()                              # while units go on: one that is about to change is written before

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
"""What a node appends to the name of a file that it has found, to show that it can write beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Names of parameters of a unit: whose values, and whose states."""

    values: Collection[str]
    states: Collection[str]


class PartFile:
    """At ``path``, in a folder that is there.

    Raises:
        OSError: it cannot be made.
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
        """Write what is wanted of ``unit``, whose lock is held. What fails is told by :meth:`run`."""
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
        """Write all that is left, and wait until it is on the disk; what is where, as plain data, or what failed."""
        for unit in self._wanted:
            unit.meet(self.write)
        try:
            if self._error is not None:
                raise self._error
            size = self._file.finish()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            with contextlib.suppress(OSError):  # of a full disk, once more
                self._file.close()
        return {"entries": self._entries, "bytes": size, "host": socket.gethostname()}


def can_write_beside(folder: str, name: str) -> bool:
    """Whether this process sees the file ``name`` in ``folder``, and can write there: it leaves an empty file."""
    try:
        if name not in {path.name for path in Path(folder).iterdir()}:
            return False
        Path(folder, name + NEXT_TO).touch(exist_ok=False)
    except OSError:
        return False
    return True
