"""Tests that share a launch run in one worker of xdist: without an xdist_group each worker would launch it again, and
no message would say so."""

import ast
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).parent
LAUNCHES = {"launch", "launch_raw", "run_cases", "run_fits"}


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def arguments_of(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in function.args.args}


def has(nodes: Iterable[ast.AST], word: str) -> bool:
    return any(word in ast.unparse(node) for node in nodes)


def ungrouped(source: str) -> list[str]:
    """Return the tests of a file without an xdist_group that use one of its module or session fixtures that launches
    processes, directly, through a function of the file or through another such fixture."""
    body = ast.parse(source).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    kept = [f for f in functions if has(f.decorator_list, "scope='module'") or has(f.decorator_list, "scope='session'")]
    helpers, calling = [f for f in functions if f not in kept and not f.name.startswith("test_")], set(LAUNCHES)
    while more := {f.name for f in helpers if names_in(f) & calling} - calling:
        calling |= more
    launching = {f.name for f in kept if names_in(f) & calling}
    while more := {f.name for f in kept if arguments_of(f) & launching} - launching:
        launching |= more
    if has((node for node in body if isinstance(node, ast.Assign) and "pytestmark" in names_in(node)), "xdist_group"):
        return []
    tests = [f for f in functions if f.name.startswith("test_") and arguments_of(f) & launching]
    return [f.name for f in tests if not has(f.decorator_list, "xdist_group")]


def test_tests_that_share_a_launch_are_of_one_group() -> None:
    found = {str(path.relative_to(TESTS)): ungrouped(path.read_text()) for path in sorted(TESTS.rglob("test_*.py"))}
    assert not {path: names for path, names in found.items() if names}
