"""The import order of the package, read from its imports: one direction, no cycles, no torch in cluster/ and plan/.

cluster <- plan <- comm <- {pipeline, optim} <- checkpoint <- strategy <- cli
and inside strategy: {compat, checks} <- options <- job <- planning <- run <- checkpointing <- strategy

All imports count, including those inside functions and under TYPE_CHECKING.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from parsing import parsed

PACKAGE = "lightning_holmes"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

BASE = {"errors", "version", "torch_private", "lightning_package", "lightning_private", "replacements"}
COMM = BASE | {"cluster", "plan", "comm"}
BELOW_STRATEGY = COMM | {"pipeline", "optim", "checkpoint"}
LEAVES = {"models", "data"}
BESIDE_STRATEGY = {"strategy", "callbacks", "loggers", "checking"}

# The parts that each part may import besides itself. The package's own __init__ is called "".
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "torch_private": set(),
    "replacements": set(),
    "lightning_package": {"errors"},
    "lightning_private": {"lightning_package"},
    "cluster": {"errors"},
    "plan": {"errors", "cluster"},
    "comm": BASE | {"cluster", "plan"},
    "pipeline": COMM,
    "optim": COMM,
    "checkpoint": BELOW_STRATEGY,
    "models": COMM,
    "data": COMM,
    **dict.fromkeys(BESIDE_STRATEGY, BELOW_STRATEGY | BESIDE_STRATEGY),
    "": BELOW_STRATEGY | BESIDE_STRATEGY | LEAVES,
    "commands": BELOW_STRATEGY | BESIDE_STRATEGY | LEAVES | {""},
    "cli": BELOW_STRATEGY | BESIDE_STRATEGY | LEAVES | {"", "commands"},
    "__main__": {"cli"},
}
# Inside strategy/: each row may import from itself and from those before it.
STRATEGY: tuple[set[str], ...] = (
    {"admission", "agreement", "batch_source", "building", "compat"}
    | {"removed_arguments", "loaded_state"}
    | {"samples", "snapshots", "user_hooks"},
    {"options", "launcher"},
    {"connection", "optimizer_nodes", "job"},
    {"run_context", "sharding", "gradients", "tracing", "profiling", "planning", "tripwires"},
    {"run", "fit"},
    {"checkpointing", "lightning_collectives"},
    {"strategy", ""},
)
# Lightning and torchmetrics import torch themselves.
TORCH = {"torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "transformers"}


def module_name(path: Path, root: Path) -> str:
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, root: Path, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Return line and full name of every module that a file imports; `from a import b` gives a.b if that is a module."""
    package = module_name(path, root).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield node.lineno, inner if inner in modules else origin


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def row_of(module: str) -> int | None:
    """Return the row of a module of strategy/; None if it has no row, or is not such a module."""
    names = [*module.split("."), ""]
    return next((row for row, members in enumerate(STRATEGY) if names[1] == "strategy" and names[2] in members), None)


def problems(root: Path) -> list[str]:
    """Return every import against the order, every cycle, and every import of torch in cluster/ or plan/."""
    paths = {module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    modules = set(paths)
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        part = part_of(module)
        if part not in ALLOWED:
            found.append(f"{path.name}: {part!r} has no place among the arrows yet; give it one in ALLOWED")
            continue
        row = row_of(module)
        if part == "strategy" and row is None:
            found.append(f"{path.name}: has no place inside strategy/ yet; give it one in STRATEGY")
        graph[module] = set()
        for line, target in imports_of(path, root, modules):
            where = f"{path.relative_to(root.parent)}:{line}"
            if target.split(".")[0] in TORCH and part in {"cluster", "plan"}:
                found.append(f"{where}: {part}/ imports {target}")
            if target.split(".")[0] != root.name:
                continue
            if part_of(target) != part and part_of(target) not in ALLOWED[part]:
                found.append(f"{where}: {part or root.name} may not import {target}")
            if row is not None and (row_of(target) or 0) > row:
                found.append(f"{where}: {module.split('.', 1)[1]} may not import {target}")
            if target != module:
                graph[module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("circle: " + " -> ".join(reversed(error.args[1])))
    return found


def test_the_package_follows_the_arrows() -> None:
    assert (ROOT / "__init__.py").is_file()
    assert problems(ROOT) == []


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/]+\.py\b", text))
    assert len(named) > 40
    assert not [name for name in sorted(named) if not any((base / name).is_file() for base in (ROOT, ROOT.parent))]
