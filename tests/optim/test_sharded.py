"""A sharded optimizer gives the numbers of the unsharded one. Baseline: the plain loop in sharded_workers.py.
Tolerance 1e-5 relative (fp32)."""

from launch import launch
from sharded_workers import OPTIMIZERS


def test_four_replicas_give_the_numbers_of_a_plain_loop() -> None:
    for done in launch(4, "sharded_workers:run_all", timeout_s=120):
        assert set(done) == set(OPTIMIZERS)
