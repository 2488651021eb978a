"""A fit on two stages whose second epoch reads a parameter that the first epoch did not read."""

from pathlib import Path
from typing import Any

import torch
from test_later_batches import PARAMETERS, Blocks, Compiled, fit

from lightning_holmes import HolmesStrategy


def staged(payload: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": payload["schedule"]}
    made = Compiled if payload["compiled"] else Blocks
    fit(made(PARAMETERS[payload["name"]]), Path(payload["folder"]), HolmesStrategy(**options), devices=2)
