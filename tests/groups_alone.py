"""The ProcessGroups of a job that has only one process."""

from types import SimpleNamespace

import torch

from lightning_holmes.comm.mesh import ProcessGroups

ALONE = ProcessGroups(
    pipeline_rank=0,
    data_parallel_rank=0,
    pipeline=None,
    data_parallel=None,
    p2p=None,
    builder=SimpleNamespace(rank=0, device=torch.device("cpu")),  # type: ignore[arg-type]
)
