"""Why the optimizer is sharded: its whole state does not fit on some rank."""

from lightning_holmes.plan.sharding_choice import ShardingFacts, lack_of_memory

GIB = 2**30


def facts(state: float = 1.0, free: float = 10.0) -> ShardingFacts:
    return ShardingFacts(state_bytes=int(state * GIB), free_bytes=int(free * GIB))


def test_the_rank_that_cannot_hold_the_state_is_named() -> None:
    lack = lack_of_memory([facts(), facts(state=9.5), facts()])
    assert lack == "9.5 GiB of state do not fit the 10 GiB that are free on rank 1"
    assert lack_of_memory([facts(), facts(state=8.9)]) is None
    assert lack_of_memory([facts(state=0.5, free=-1.0)]) is not None
