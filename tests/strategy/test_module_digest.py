"""A digest distinguishes modules of different costs, and is the same in every process."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from lightning_holmes.strategy.module_digest import digest_module
from recipes.gpt import GPT

BASE = """
from torch import nn

def helper(x):
    return x

class Base(nn.Module):
    def forward(self, x):
        return helper(x)
"""
MODULE = """
import lightning as L
import torch
from based import Base, helper

class Config:
    def __init__(self):
        self.names = {"one", "two", "three"}

class Layer(Base):
    def __init__(self):
        super().__init__()
        self.config, self.opaque, self.act = Config(), object(), helper
        self.table = {name: torch.bfloat16 for name in ("b", "a", "c")}
        self.made = lambda x: x

class Model(L.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.ModuleList([Layer()])
"""


class Block(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)


class Model(LightningModule):
    def __init__(self, width: int = 4, **attributes: Any) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        self.layers = nn.ModuleList([Block(**attributes), nn.Linear(2, 2)])


@dataclass
class Config:
    heads: int = 2
    dtype: torch.dtype = torch.float32


def mixed(heads: int) -> Any:
    """Return a record with an opaque field, of which only the class counts: it may be a logger, with the folder of a run."""
    return SimpleNamespace(heads=heads, opaque=object())


@pytest.mark.parametrize("given", [{"gradient_checkpointing": True}, {"num_heads": 8}, {"dropout": 0.1}])
def test_arguments_of_the_packages_own_gpt_count(given: dict[str, Any]) -> None:
    assert digest_module(GPT()) == digest_module(GPT()) != digest_module(GPT(**given))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (2, 3),
        (2, np.int64(3)),
        (True, False),
        (None, 0.0),
        ("a", "b"),
        (torch.float32, torch.bfloat16),
        ((1, [2, {"a": 3}]), (1, [2, {"a": 4}])),
        ({"a", "b"}, {"a", "c"}),
        (Config(), Config(heads=3)),
        (Config(), Config(dtype=torch.bfloat16)),
        (SimpleNamespace(heads=2), SimpleNamespace(heads=3)),
        (F.gelu, F.relu),
        (partial(F.dropout, p=0.1), partial(F.dropout, p=0.2)),
        (torch.ones(2), torch.ones(3)),
        (Config, Block),
    ],
)
def test_attributes_of_submodules_count(one: Any, other: Any) -> None:
    assert digest_module(Model(given=one)) == digest_module(Model(given=one)) != digest_module(Model(given=other))


def test_hyperparameters_count() -> None:
    assert digest_module(Model()) == digest_module(Model(4)) != digest_module(Model(5))


def test_what_differs_from_start_to_start_does_not_count() -> None:
    assert digest_module(Model(held=mixed(1))) == digest_module(Model(held=mixed(2))) is not None
    assert digest_module(Model(held=object())) == digest_module(Model(held=object())) is not None
    cyclic: dict[str, Any] = {"heads": 2}
    cyclic["self"] = cyclic
    assert digest_module(Model(held=cyclic)) == digest_module(Model(held=cyclic)) is not None
    trained = Model()
    trained.eval()
    assert digest_module(Model()) != digest_module(trained), "what runs without dropout costs less"


def test_the_files_of_all_classes_count_and_nothing_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "based.py").write_text(BASE)
    (tmp_path / "modelled.py").write_text(MODULE)

    def digest() -> str | None:
        for name in ("based", "modelled"):
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        return digest_module(module.Model())

    first = digest()
    assert first is not None and digest() == first
    (tmp_path / "based.py").write_text(BASE.replace("return x", "return 2 * x"))
    assert digest() != first, "a base class's file"
    (tmp_path / "based.py").write_text(BASE)
    told = "from modelled import Model; from lightning_holmes.strategy.module_digest import digest_module as d; print(d(Model()))"
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    other = subprocess.run(
        [sys.executable, "-c", told], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert digest() == first == other.stdout.strip()


class Unreadable(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("not now")


def test_of_what_cannot_be_read_there_is_none() -> None:
    assert digest_module(Model(held=Unreadable())) is None


def test_of_a_class_without_a_file_there_is_none() -> None:
    space: dict[str, Any] = {"__name__": "nowhere", "L": LightningModule}
    exec("class Typed(L):\n    pass", space)
    assert digest_module(space["Typed"]()) is None
