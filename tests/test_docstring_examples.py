"""The examples in module docstrings call what the modules have, with arguments that it takes."""

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from parsing import parsed

import lightning_holmes

PLACEHOLDER = object()


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(lightning_holmes.__path__, "lightning_holmes."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def example_calls(docstring: str) -> Iterator[ast.Call]:
    """The calls in the indented lines of a docstring, those that are Python; statements may take several lines."""
    block: list[str] = []
    for line in [*docstring.splitlines()[1:], ""]:
        if line.startswith("    "):
            block.append(line)
            continue
        yield from _calls(block)
        block = []


def _calls(block: list[str]) -> Iterator[ast.Call]:
    lines = textwrap.dedent("\n".join(block)).splitlines()
    try:
        trees = [parsed("\n".join(lines))]
    except SyntaxError:
        trees = []
        for line in lines:
            try:
                trees.append(parsed(line.strip()))
            except SyntaxError:
                continue
    for tree in trees:
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def called(module: ModuleType, call: ast.Call) -> Any:
    """The function or class of the package that ``call`` names: ``name(...)`` or ``Class.method(...)``; None for others."""
    function = call.func
    if isinstance(function, ast.Name):
        found = getattr(module, function.id, None)
    elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner = getattr(module, function.value.id, None)
        found = getattr(owner, function.attr, None) if inspect.isclass(owner) else None
    else:
        return None
    if inspect.isclass(found) and issubclass(found, Exception):
        return None
    return found if callable(found) and getattr(found, "__module__", "").startswith("lightning_holmes") else None


def test_examples_in_module_docstrings_fit_the_signatures() -> None:
    checked, wrong = 0, []
    for module in modules():
        for call in example_calls(module.__doc__ or ""):
            target = called(module, call)
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            is_open = any(isinstance(a, ast.Starred) or (isinstance(a, ast.Constant) and a.value is ...) for a in given)
            if target is None or is_open or any(keyword.arg is None for keyword in call.keywords):
                continue
            checked += 1
            try:
                inspect.signature(target).bind(*call.args, **{k.arg: PLACEHOLDER for k in call.keywords if k.arg})
            except TypeError as error:
                wrong.append(f"{module.__name__}: {ast.unparse(call)}: {error}")
    assert checked > 100, checked
    assert not wrong, "\n".join(wrong)
