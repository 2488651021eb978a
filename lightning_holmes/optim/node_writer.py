"""NodeWriter: lets an optimizer node write its part of a checkpoint folder, where it sees the folder.

writer = NodeWriter(link, unit_of, version=lambda: parameters.version)
if writer.sees(folder):
    wait = writer.start(folder / "__0_1.distcp", [("up.weight", ""), ("up.weight", "exp_avg")])     # as of now
    written = wait()
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from lightning_holmes.errors import HolmesError
from lightning_holmes.optim.node.link import NodeLink
from lightning_holmes.optim.node.part_file import NEXT_TO

_PROBE = ".probe"


class NodeWriter:
    """Of one node. Its places are those of part_file.py.

    Args:
        unit_of: where on the node a parameter is, by name.
        version: gives that of the values and states that are to be written.
    """

    def __init__(self, link: NodeLink, unit_of: Mapping[str, int], version: Callable[[], int]) -> None:
        self._link, self._unit_of, self._version = link, unit_of, version
        self.name = link.peer

    def sees(self, folder: Path) -> bool:
        """Whether the node sees what this process writes to ``folder``, and can write there, too."""
        probe = folder / f"{_PROBE}-{uuid.uuid4().hex}"
        try:
            probe.touch()
        except OSError:
            return False
        try:
            return bool(self._link.ask({"ask": "sees", "folder": os.path.abspath(folder), "name": probe.name})["sees"])
        finally:
            for path in (probe, probe.with_name(probe.name + NEXT_TO)):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def start(self, path: Path, places: Collection[tuple[str, str]]) -> Callable[[], dict[str, Any]]:
        """Let the node write ``places`` to ``path`` as they are now. What this gives waits until they are written, and says where:
        "entries", (name, key, Placed as a dictionary) of each, "bytes" and "host".

        Raises:
            HolmesError: it could not; also when it is waited for.
        """
        units: dict[int, dict[str, list[str]]] = {}
        for name, key in places:
            names = units.setdefault(self._unit_of[name], {"values": [], "states": []})["states" if key else "values"]
            if name not in names:
                names.append(name)
        wait = self._link.start_save({"path": os.path.abspath(path), "version": self._version(), "units": units})

        def written() -> dict[str, Any]:
            answer = wait()
            if "error" in answer:
                raise HolmesError(f"{self.name}: {answer['error']}")
            return answer

        return written
