"""A step of a pipeline on accelerators reads no tensor value on the host, unless the user logs.

Runs on CPUs, where batches are treated as accelerator tensors and results travel outside of the messages. Baseline: one
process, to 1e-6.
"""

import pytest
from host_read_cases import Stack, train
from launch import launch

HOST_TENSORS = {"comm/p2p.py", "pipeline/checksum.py", "optim/loss_weights.py"}
"""Files that read host tensors only: messages, sums that were copied to the host asynchronously, weights of microbatches."""


def test_a_step_reads_no_values_and_results_and_differing_batches_are_told_all_the_same() -> None:
    Stack.setup = lambda self, stage: None  # type: ignore[method-assign]
    plain = train("auto")["outputs"]
    for trained, differing, in_shards in launch(2, "host_read_cases:on_each_rank"):
        assert trained["outputs"] == pytest.approx(plain, rel=1e-6)
        assert set(trained["reads"]) <= HOST_TENSORS, trained["reads"]
        assert set(in_shards["reads"]) <= HOST_TENSORS, in_shards["reads"]
        assert differing["steps"] == 5 and "another batch" in differing["error"]
