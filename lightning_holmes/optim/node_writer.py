"""NodeWriter: lets an optimizer node write its part of a checkpoint folder, if the node can access the folder.

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
    """Writes checkpoint parts on one node. Places are (parameter name, key of its state), as in part_file.py.

    Args:
        unit_of: the index of each parameter's unit, by name.
        version: returns the version of the values and states to write.
    """

    def __init__(self, link: NodeLink, unit_of: Mapping[str, int], version: Callable[[], int]) -> None:
        self._link, self._unit_of, self._version = link, unit_of, version
        self.name = link.peer

    def sees(self, folder: Path) -> bool:
        """Whether the node sees files that this process writes to ``folder``, and can write there, too."""
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
        """Let the node write the present values of ``places`` to ``path``.

        Returns:
            A function that waits until they are written, and returns "entries", with (name, key, Placed as a dictionary) for each
            place, "bytes" and "host".

        Raises:
            HolmesError: the node could not write them; the returned function may raise it, too.
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
