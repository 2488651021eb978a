"""The commands of lightning-holmes that are not Trainer runs: one module for each, with ``main(args)``.

A module is imported only when its command is called.
"""

from importlib import import_module

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


def run_command(name: str, args: list[str]) -> None:
    """Run the command ``name`` with its command line ``args``. Raises HolmesError for errors that the user can fix."""
    import_module(COMMANDS[name][0]).main(args)
