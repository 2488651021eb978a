"""The commands of lightning-holmes that are not Trainer runs: one module for each, with ``main(args)``.

A module is imported only when its command is called.
"""

from collections.abc import Sequence
from importlib import import_module

from lightning_holmes.errors import ConfigurationError

# name: (module, what it does in one line)
COMMANDS: dict[str, tuple[str, str]] = {
    "topology": (
        "lightning_holmes.commands.topology_command",
        "this host's network cards, or a job's clusters and links",
    ),
    "convert": ("lightning_holmes.commands.convert", "a checkpoint as a folder, a plain file or safetensors"),
    "optimizer-node": (
        "lightning_holmes.commands.optimizer_node",
        "this host as an optimizer node of a job, by the job's own script",
    ),
}

_BENCHED = "it is in tests/ of the repository, where docs/benchmarks.md has its commands"
REMOVED: dict[str, str] = {
    "bench": _BENCHED,
    "testbed": _BENCHED,
    "status": "torchrun's output and the run's loggers tell how a job stands",
    "tokenize": "write the tokens as recipes/make_tokens.py does",
    "plan --html": "--plot draws the step, and --format json has the figures",
    "plan --recomputation": "a module that recomputes is planned as it is",
    "topology --plot": "the table and --format yaml have all that it showed",
    "topology --port_range": "sysctl net.ipv4.ip_local_port_range narrows the ports of all sockets",
    "topology --refresh": "nothing is kept: each run measures at its start",
}
"""Commands and options of an earlier version, each with what to do instead."""


def refuse_removed(args: Sequence[str]) -> None:
    """Raise ConfigurationError if a command line has one of REMOVED."""
    for name in (*args[:1], *(f"{args[0]} {arg.partition('=')[0]}" for arg in args[1:])):
        if name in REMOVED:
            raise ConfigurationError(f"lightning-holmes {name} is gone: {REMOVED[name]}")


def run_command(name: str, args: list[str]) -> None:
    """Run the command ``name`` with its command line ``args``. Raises HolmesError for errors that the user can fix."""
    import_module(COMMANDS[name][0]).main(args)
