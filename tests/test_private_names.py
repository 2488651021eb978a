"""No private name of torch, Lightning or torchmetrics is used outside torch_private.py and lightning_private.py.

Read from the code: imports of such names, attributes of these libraries, and private attributes of any object that
the file itself does not define, since such objects come from other modules.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsing import parsed

ROOT = Path(__file__).resolve().parent.parent / "lightning_holmes"
HOME = {"torch": "torch_private.py"} | dict.fromkeys(
    ("lightning", "lightning_utilities", "pytorch_lightning", "torchmetrics"), "lightning_private.py"
)
PACKAGE_OF_LIGHTNING = "lightning_holmes.lightning_package"  # its names pl and fabric are Lightning's
# Methods that a class of the package overrides, each with a test in tests/test_lightning_private.py or
# test_torch_private.py.
OVERRIDDEN = {
    ("cli.py", "_add_subcommands"),
    ("cli.py", "_prepare_subcommand_parser"),
    ("cli.py", "_run_subcommand"),
    ("models/hf.py", "_apply"),
}
# Names of other libraries: a named tuple's public methods, documented names of os, and names of argparse,
# jsonargparse and transformers' models.
OTHERS = {
    *("_fields", "_replace", "_asdict", "_exit", "_actions", "_subcommands_action"),
    *("_init_weights", "_keys_to_ignore_on_load_unexpected"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def defined_in(tree: ast.AST) -> set[str]:
    """Return the private names that a file gives to its own classes and their objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def library_of(node: ast.AST, imported: dict[str, str]) -> str:
    """Return the library that an expression like ``torch.nn.modules`` belongs to; empty for other objects."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return imported.get(node.id, "") if isinstance(node, ast.Name) else ""


def private_uses(file: str, text: str, package: set[str]) -> Iterator[str]:
    """Yield every violation as "file:line name". ``package``: private names that classes of the package define."""
    tree = parsed(text)
    own, imported = defined_in(tree), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                origin = alias.name if isinstance(node, ast.Import) else node.module or ""
                library = "lightning" if origin == PACKAGE_OF_LIGHTNING else origin.split(".")[0]
                if library in HOME:
                    imported[(alias.asname or alias.name).split(".")[0]] = library
                    parts = f"{origin}.{alias.name}".split(".")
                    if any(is_private(part) for part in parts) and file != HOME[library]:
                        yield f"{file}:{node.lineno} {alias.name}"
    if file in HOME.values():
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if library_of(node.value, imported):
                names = [node.attr]
            elif is_self(node.value):
                names = [node.attr] if node.attr not in package else []
            elif node.attr not in own or is_super(node.value):
                names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            names = [name for name in names if is_private(name) and name not in own]
        elif isinstance(node, ast.Constant) and node.value in wrapped_names():
            names = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
            names = [k.arg for k in node.keywords if k.arg is not None and is_private(k.arg) and k.arg not in own]
        for name in names:
            if name not in OTHERS and (file, name) not in OVERRIDDEN:
                yield f"{file}:{node.lineno} {name}"


@functools.cache
def wrapped_names() -> frozenset[str]:
    """Return the private attributes that the two files wrap; other files may not even contain them as strings."""
    found = set()
    for file in HOME.values():
        for node in ast.walk(parsed((ROOT / file).read_text(encoding="utf-8"))):
            name = getattr(node, "attr", getattr(node, "value", None))
            if isinstance(name, str) and is_private(name) and name.isidentifier():
                found.add(name)
    return frozenset(found)


def test_private_names_of_torch_and_lightning_stay_in_their_files() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    package = {name for text in texts.values() for name in defined_in(parsed(text))}
    assert [use for file, text in texts.items() for use in private_uses(file, text, package)] == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from lightning.fabric.utilities.data import _set_sampler_epoch", "_set_sampler_epoch"),
        ("from lightning_holmes.lightning_package import pl\npl.trainer._call_hook", "_call_hook"),
        ("def f():\n    from torch.utils import _pytree", "_pytree"),
        ("from torch._subclasses import FakeTensor", "FakeTensor"),
        ("import torch\ntorch._foreach_add_([], 1)", "_foreach_add_"),
        ("import torch.distributed as dist\ndist.distributed_c10d._get_default_store()", "_get_default_store"),
        ("def f(trainer): return trainer._active_loop", "_active_loop"),
        ("def f(loop): loop._data_fetcher = None", "_data_fetcher"),
        ("def f(metric): return getattr(metric, '_computed', None)", "_computed"),
        ("NAMES = ('_trainer', 'other')", "_trainer"),
        ("def f(run, callback): run.replace(callback, _summary=None)", "_summary"),
        ("class A:\n    def f(self): return self._reset_optimizers()", "_reset_optimizers"),
        ("class A(B):\n    def _build(self): return super()._build()", "_build"),
    ],
)
def test_a_private_name_is_found(text: str, name: str) -> None:
    uses = set(private_uses("strategy/a.py", text, set()))
    assert len(uses) == 1 and uses.pop().endswith(f" {name}")


def test_ones_own_private_names_are_free() -> None:
    text = (
        "class A:\n    def f(self, other):\n        self._x = other._x\n        return self._y, getattr(self, '_x')\n"
    )
    assert list(private_uses("a.py", text, {"_x", "_y"})) == []
