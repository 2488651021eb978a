"""When "auto" shards the optimizer: first by memory, then by the measurements on the slowest rank."""

from lightning_holmes.plan.sharding_choice import ShardingFacts, choose_sharding, needs_times

GIB = 2**30


def facts(state: float = 1.0, free: float = 10.0, whole: float = 0.02, shares: float = 0.03) -> ShardingFacts:
    return ShardingFacts(state_bytes=int(state * GIB), free_bytes=int(free * GIB), whole_s=whole, sharded_s=shares)


def test_it_is_on_where_one_rank_cannot_hold_the_state_whatever_it_costs() -> None:
    choice = choose_sharding([facts(), facts(state=9.5), facts()])
    assert choice.on and "9.5 GiB of state" in choice.reason and "rank 1" in choice.reason
    assert not needs_times([facts(state=9.5)])


def test_it_is_off_where_there_is_nothing_to_win() -> None:
    choice = choose_sharding([facts(state=0.01, shares=0.0)])
    assert not choice.on and "only 10 MiB" in choice.reason
    assert not needs_times([facts(state=0.01)])


def test_otherwise_the_slowest_rank_decides() -> None:
    assert needs_times([facts()])
    assert not choose_sharding([facts(whole=0.02, shares=0.01), facts(whole=0.02, shares=0.03)]).on
    on = choose_sharding([facts(whole=0.01, shares=0.02), facts(whole=0.03, shares=0.03)])
    assert on.on and on.describe().startswith("Sharded optimizer: on, measured 30.0 ms")
