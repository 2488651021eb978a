"""Every way to read a parameter's value in a hook is seen, so that what a rank lacks is brought or refused, never read as NaN.

Baseline: none; each operation is asked whether it told of the parameter, or was refused.
"""

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_holmes.comm.absent import Absence, Source, placeholder, refusing_in_threads
from lightning_holmes.errors import AbsentValueError
from lightning_holmes.strategy.tripwires import _Watch

READS: dict[str, Callable[[Any, Any], Any]] = {
    "==": lambda p, s: p == 1,
    "!=": lambda p, s: p != 0,
    "<": lambda p, s: p < 1,
    "in": lambda p, s: 1.0 in p,
    "number -": lambda p, s: 1 - p,
    "tensor -": lambda p, s: torch.ones(3, 3) - p,
    "sum": lambda p, s: sum([p]),
    "@": lambda p, s: p @ p,
    "**": lambda p, s: p**2,
    "-": lambda p, s: -p,
    "abs": lambda p, s: abs(p),
    "max": lambda p, s: max(s, s),
    "index": lambda p, s: p[0],
    "iterate": lambda p, s: list(p),
    "item": lambda p, s: s.item(),
    "float": lambda p, s: float(s),
    "int": lambda p, s: int(s),
    "bool": lambda p, s: bool(s),
    "range": lambda p, s: range(s.long()),
    "repr": lambda p, s: repr(p),
    "tolist": lambda p, s: p.tolist(),
    "numpy": lambda p, s: p.detach().numpy(),
    "asarray": lambda p, s: np.asarray(p.data),
    "data": lambda p, s: p.data,
    "clone": lambda p, s: p.clone(),
    "to": lambda p, s: p.to(torch.float64),
    "view": lambda p, s: p.view(-1),
    "norm": lambda p, s: p.norm(),
    "equal": lambda p, s: torch.equal(p, p),
    "allclose": lambda p, s: torch.allclose(p, p),
    "isnan": lambda p, s: torch.isnan(p).any(),
    "stack": lambda p, s: torch.stack([p]),
    "cat": lambda p, s: torch.cat((p,)),
    "foreach": lambda p, s: torch._foreach_norm([p]),
    "vector": lambda p, s: nn.utils.parameters_to_vector([p]),
    "keyword": lambda p, s: torch.add(torch.ones(3, 3), other=p),
    "weight": lambda p, s: nn.functional.linear(torch.ones(1, 3), weight=p),
    "copy_": lambda p, s: torch.zeros(3, 3).copy_(p),
    "assign": lambda p, s: torch.zeros(3, 3).__setitem__(slice(None), p),
    "tensor": lambda p, s: torch.tensor(p),
    "as_tensor": lambda p, s: torch.as_tensor(p),
    "as_tensor, cast": lambda p, s: torch.as_tensor(p, dtype=torch.float64),
    "full": lambda p, s: torch.full((2,), s.requires_grad_(False)),
    "deepcopy": lambda p, s: copy.deepcopy(p),
    "save": lambda p, s: torch.save(p, io.BytesIO()),
    "pickle": lambda p, s: pickle.dumps(p),
    "state_dict": lambda p, s: nn.ParameterList([p]).state_dict(),
    "storage": lambda p, s: bytes(p.untyped_storage()),
    "dlpack": lambda p, s: torch.from_dlpack(p.detach()),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore")
def test_a_read_is_seen(name: str) -> None:
    parameter, scalar = nn.Parameter(torch.rand(3, 3)), nn.Parameter(torch.tensor(2.0))
    told = []
    with _Watch({id(parameter): "p", id(scalar): "s"}, lambda kind, names: told.append(kind)):
        READS[name](parameter, scalar)
    assert "value" in told


@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore")
def test_a_read_of_what_is_not_here_is_refused_in_a_thread(name: str) -> None:
    absence, parameters = Absence(), (nn.Parameter(torch.rand(3, 3)), nn.Parameter(torch.tensor(2.0)))
    for parameter in parameters:
        absence.hide(parameter, Source(absence=absence, what="p", cure="", blank=placeholder(parameter.detach())))
    with refusing_in_threads(), ThreadPoolExecutor(1) as thread:
        read = thread.submit(READS[name], *parameters)
    with pytest.raises(AbsentValueError, match="p is read in a thread of its own, or outside of steps and hooks"):
        read.result(timeout=60)
    # torch asks modes only, not the parameter's class
    if name not in ("tensor", "as_tensor", "as_tensor, cast", "full"):
        with pytest.raises(AbsentValueError, match="p is read in a thread of its own, or outside of steps and hooks"):
            READS[name](*parameters)
