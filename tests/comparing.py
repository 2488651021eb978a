"""Compares what a run gave with what its baseline gave."""

import math
from typing import Any

import torch
from torch import Tensor, nn


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors by name, to 1e-5 of the largest entry of each."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5 * float(value.abs().max() + 1e-3), msg=name)


def differences(plain: Any, staged: Any, path: str = "", relative: float = 1e-5) -> list[str]:
    """Return where two results (numbers, texts, tensors, and dicts and lists of them) differ, as text."""
    if isinstance(plain, dict) and isinstance(staged, dict):
        found = [f"{path}.{k}: only in one" for k in plain.keys() ^ staged.keys()]
        for key in plain.keys() & staged.keys():
            found += differences(plain[key], staged[key], f"{path}.{key}", relative)
        return found
    if isinstance(plain, (list, tuple)) and isinstance(staged, (list, tuple)):
        if len(plain) != len(staged):
            return [f"{path}: lengths {len(plain)} and {len(staged)}: {str(plain)[:200]} and {str(staged)[:200]}"]
        pairs = enumerate(zip(plain, staged, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{path}[{i}]", relative)]
    if isinstance(plain, Tensor) and isinstance(staged, Tensor):
        if plain.shape != staged.shape:
            return [f"{path}: shapes {tuple(plain.shape)} and {tuple(staged.shape)}"]
        if torch.allclose(plain.double(), staged.double(), rtol=relative, atol=relative, equal_nan=True):
            return []
        return [f"{path}: tensors differ by {float((plain.double() - staged.double()).abs().max()):.2e}"]
    if isinstance(plain, (int, float)) and isinstance(staged, (int, float)):
        close = math.isclose(plain, staged, rel_tol=relative, abs_tol=relative)
        return [] if close or (math.isnan(plain) and math.isnan(staged)) else [f"{path}: {plain} and {staged}"]
    return [] if plain == staged else [f"{path}: {plain!r} and {staged!r}"]


def assert_alike(
    name: str, plain: dict[str, Any], ranks: list[dict[str, Any]], *, relative: float = 1e-5, ignore: str = ""
) -> None:
    """Assert that every rank found in a case what plain Lightning did, but for paths with ``ignore``. The result of a case that
    failed is its "error"; no case runs after it."""
    for rank, results in enumerate([plain, *ranks], start=-1):
        place = "plain" if rank < 0 else f"rank {rank}"
        assert name in results, f"{place}: an earlier case ended the run: {list(results)[-1]}"
        result = results[name]
        assert not (isinstance(result, dict) and "error" in result), f"{place}: {result['error']}"
        found = [
            line for line in differences(plain[name], result, relative=relative) if not ignore or ignore not in line
        ]
        assert not found, f"{place} differs from plain Lightning:\n" + "\n".join(found[:20])
