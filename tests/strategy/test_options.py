"""Options: what is refused by itself, and the views that are made of the arguments."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import ConfigurationError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_parallel_size": 0}, 'pipeline_parallel_size=0 must be "auto" or a whole number'),
        ({"num_microbatches": True}, "num_microbatches=True"),
        ({"tensor_parallel_size": "auto"}, "tensor_parallel_size='auto' must be a whole number"),
        ({"num_chunks": 0}, "num_chunks=0"),
        ({"schedule": "2f2b"}, "schedule='2f2b' is unknown"),
        ({"partition": "equal"}, "partition='equal' is not known"),
        ({"num_chunks": 2, "schedule": "gpipe"}, "num_chunks=2 needs"),
        ({"num_chunks": 3, "schedule": "zero_bubble_v"}, "leave num_chunks out"),
        ({"num_chunks": 1, "schedule": "interleaved_1f1b"}, "needs num_chunks of at least 2"),
        ({"tensor_parallel_size": 2, "schedule": "zero_bubble"}, "split backward"),
        ({"profile": "guess"}, "profile='guess' is not known"),
        ({"process_group_backend": "mpi"}, '"gloo", "nccl" or None'),
        ({"activation_dtype": "fp8"}, '"bf16" or None'),
        ({"save_distributed_checkpoint": "yes"}, 'True, False or "auto"'),
        ({"monitor": 0}, "monitor=0"),
        ({"port_range": (29600, 29500)}, "the first and the last port"),
        ({"port_range": 29500}, "the first and the last port"),
    ],
)
def test_what_is_wrong_by_itself_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        HolmesStrategy(**arguments)


def test_views_follow_the_arguments() -> None:
    options = HolmesStrategy(schedule="zero_bubble_v", activation_dtype="bf16", port_range=[29500, 29600])._options  # type: ignore[arg-type]
    assert options.plan_options.num_chunks == 2 and options.sent_dtype == torch.bfloat16
    assert options.ports == (29500, 29600) and not options.chooses_schedule
    assert options.gradient_options.grad_dtype == options.training_options.grad_dtype == "fp32"
    arguments = options.arguments()
    assert arguments["num_chunks"] == 2 and arguments["port_range"] == (29500, 29600)
    assert not {"topology", "plan"} & set(arguments)


def test_a_plan_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"plan\.yaml"):
        HolmesStrategy(plan=str(tmp_path / "plan.yaml"))
