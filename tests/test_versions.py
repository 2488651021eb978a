"""The versions promised in pyproject.toml are tested: the oldest by `make oldest`, the newest by `make test`."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
OURS = {"hf", "lora", "plot", "wandb", "recipes"}


def promised() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in sorted(OURS & set(extras)) for line in extras[name])]
    found = [Requirement(line) for line in lines]
    return [requirement for requirement in found if requirement.name != project["name"]]


def pinned(name: str) -> dict[str, set[Version]]:
    versions: dict[str, set[Version]] = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith("#"):
            (specifier,) = (requirement := Requirement(line)).specifier
            versions.setdefault(canonicalize_name(requirement.name), set()).add(Version(specifier.version))
    return versions


def test_the_oldest_versions_that_are_promised_are_tested() -> None:
    versions = pinned("constraints-oldest.txt")
    for requirement in promised():
        (oldest,) = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
        assert versions[canonicalize_name(requirement.name)] == {oldest}, requirement


def test_the_versions_that_are_installed_are_promised() -> None:
    versions = pinned("constraints.txt")
    for requirement in promised():
        assert all(requirement.specifier.contains(v) for v in versions[canonicalize_name(requirement.name)]), (
            requirement
        )
