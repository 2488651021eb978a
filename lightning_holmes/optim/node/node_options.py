"""NodeOptions: the options with which an optimizer node is started, from its command line or HOLMES_NODE_MEMORY."""

import os
import re
from dataclasses import dataclass

from lightning_holmes.errors import ConfigurationError

MEMORY = "HOLMES_NODE_MEMORY"
"""The environment variable that limits the memory of a node's process, if its command line does not."""
IN_MEMORY = "memory"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The options of one node.

    Attributes:
        states: the folder for parameters and optimizer states, or "memory"; None: the setting of the workers.
        memory_bytes: the memory limit of the process; None: 0.8 of the host's free memory if states are on disk, else no limit.
        num_on_host: the number of nodes on this host.
    """

    states: str | None = None
    memory_bytes: int | None = None
    num_on_host: int = 1

    @classmethod
    def given(cls, states: str | None, memory: str | None, num_on_host: int = 1) -> "NodeOptions":
        """Make options from the arguments of a command line; without ``memory`` the environment variable is read.

        Raises:
            ConfigurationError: ``memory`` is not a number of bytes.
        """
        memory = memory or os.environ.get(MEMORY)
        limit = None if memory is None else parse_bytes(memory)
        return cls(states=states, memory_bytes=limit, num_on_host=num_on_host)

    def folder(self, told: str, *, name: str) -> str | None:
        """Return the folder for states, given the workers' setting ``told``; None: states stay in memory.

        Raises:
            ConfigurationError: node and workers name different folders.
        """
        states = told if self.states is None else self.states
        if told not in (IN_MEMORY, states):
            raise ConfigurationError(
                f"{name} was started with --states {states}, and the workers have optimizer_states={told!r}: leave one of them out"
            )
        return None if states == IN_MEMORY else states


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as 512M, 1.5G or 4096; units are powers of 1024.

    Raises:
        ConfigurationError: ``text`` has another form.
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigurationError(f"--memory {text!r} is no number of bytes; write 512M, 8G or 1.5T")
    return int(float(found[1]) * _UNITS[found[2].upper()])
