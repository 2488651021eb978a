"""Kept costs belong to hosts, not to ranks: a launcher may number the nodes differently the next time."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_holmes.cluster.measure import fingerprint
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.strategy import kept_costs, profiling
from lightning_holmes.strategy.kept_costs import Costs, distrust_costs, load_costs, save_costs, tell_change

LAYER = LayerCost(forward=1.0, backward=2.0)
COSTS = Costs(
    model=ModelCost(unit="seconds", microbatch_samples=1, before=LAYER, layers=(LAYER, LAYER), after=LAYER),
    speeds=(1.0, 0.9, 0.5, 0.4),
    probed_flops_per_s=(9e9, 8e9, 5e9, 4e9),
    memory=(10.0, 9.0, 5.0, 4.0),
    local_bytes_per_s=(8.0, 8.0, 2.0, 2.0),
    local_latency_s=1e-5,
    described="timed",
)
HOSTS = """
clusters:
  - name: c
    hosts:
      - {name: quick, devices: 2, ranks: [RANKS], nics: [{name: eth, kind: ethernet}]}
      - {name: slow, devices: 2, ranks: [OTHERS], nics: [{name: eth, kind: ethernet}]}
"""


def topology(ranks: str, others: str) -> Topology:
    return Topology.from_yaml_text(HOSTS.replace("RANKS", ranks).replace("OTHERS", others))


def test_each_host_finds_its_own_whatever_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_CACHE_DIR", str(tmp_path))
    first, later = topology("0, 1", "2, 3"), topology("2, 3", "0, 1")
    assert fingerprint(first) == fingerprint(later)
    save_costs("key", COSTS, first)
    again = load_costs("key", first)
    assert again is not None
    assert replace(again, described="timed") == COSTS
    assert "measures anew" in again.described
    found = load_costs("key", later)
    assert found is not None
    assert found.speeds == (0.5, 0.4, 1.0, 0.9) and found.memory == (5.0, 4.0, 10.0, 9.0)
    assert found.local_bytes_per_s == (2.0, 2.0, 8.0, 8.0)
    assert found.probed_flops_per_s == (5e9, 4e9, 9e9, 8e9)


def test_other_hosts_in_a_file_are_no_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_CACHE_DIR", str(tmp_path))
    save_costs("key", COSTS, topology("0, 1", "2, 3"))
    (path,) = tmp_path.glob("costs-*.json")
    data = json.loads(path.read_text())
    data["speeds"]["slow"] = [1.0]
    path.write_text(json.dumps(data))
    assert load_costs("key", topology("0, 1", "2, 3")) is None


def test_what_was_measured_before_a_rank_became_slow_counts_no_more_on_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLMES_CACHE_DIR", str(tmp_path))
    first, later = topology("0, 1", "2, 3"), topology("2, 3", "0, 1")
    elsewhere = Topology.from_yaml_text(
        HOSTS.replace("slow", "other").replace("RANKS", "0, 1").replace("OTHERS", "2, 3")
    )
    save_costs("one", COSTS, first)
    save_costs("another", COSTS, first)
    save_costs("of other hosts", COSTS, elsewhere)
    told: list[str] = []
    monkeypatch.setattr(kept_costs, "rank_zero_info", told.append)
    distrust_costs(later)
    assert load_costs("one", first) is None and load_costs("another", later) is None
    assert told == ["costs that were kept are not taken, since a rank on these hosts has become slow in a run"] * 2
    assert load_costs("of other hosts", elsewhere) is not None
    save_costs("one", COSTS, first)
    assert load_costs("one", first) is not None and load_costs("another", first) is None
    (mark,) = tmp_path.glob("slow-*.json")
    mark.write_text("half a num")
    assert load_costs("another", first) is not None
    monkeypatch.setenv("HOLMES_CACHE_DIR", str(mark))  # a file where the folder would be
    distrust_costs(first)  # it runs in a thread, which must not fail
    assert "before a rank became slow" in capsys.readouterr().err


def test_a_host_that_is_not_as_fast_beside_the_others_as_it_was_is_told() -> None:
    hosts = topology("0, 1", "2, 3")
    for now in ((9e9, 8e9, 5e9, 4e9), (3e9, 3e9, 2e9, 1.5e9), (9e9, 8e9, 3.6e9, 2.8e9), (8e9, 8e9, 5e9, 5e9)):
        assert tell_change(COSTS, now, hosts) is None, "the ratios of hosts have changed by less than 1.5"
    assert tell_change(COSTS, (9e9, 8e9, 2.5e9, 2e9), hosts) == (
        "costs that were kept are not taken, since rank 2 on host slow multiplies matrices 0.50 times as fast as when they were measured, and "
        "rank 0 on host quick 1.00 times"
    )
    one = tell_change(COSTS, (9e9, 8e9, 5e9, 1e9), hosts)
    assert one is not None and "rank 3 on host slow multiplies matrices 0.25 times" in one
    faster = tell_change(COSTS, (9e9, 8e9, 10e9, 8e9), hosts)
    assert faster is not None and "and rank 2 on host slow 2.00 times" in faster


@pytest.mark.parametrize(
    ("name", "probes", "changed"),
    [
        ("as it was", [(9e9, 8e9, 5e9, 4e9)], False),
        ("slow for a moment", [(9e9, 8e9, 1e9, 1e9), (9e9, 8e9, 5e9, 4e9)], False),
        ("one, and then another for a moment", [(9e9, 8e9, 1e9, 1e9), (2e9, 2e9, 5e9, 4e9)], False),
        ("slow", [(9e9, 8e9, 1e9, 1e9), (9e9, 8e9, 1e9, 1e9)], True),
    ],
)
def test_two_short_measurements_must_say_that_a_host_has_changed(
    name: str, probes: list[tuple[float, ...]], changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs as rank 0 does, with the values that all ranks have measured."""
    made, told, left = [], [], list(probes)

    def probe(*args: Any, **kwargs: Any) -> SimpleNamespace:
        made.append(kwargs["seconds"])
        return SimpleNamespace(flops_per_s=0.0)

    monkeypatch.setattr(profiling, "probe_device", probe)
    monkeypatch.setattr(profiling, "_product_dtype", lambda request: None)
    monkeypatch.setattr(profiling, "all_gather_values", lambda mine: list(left.pop(0)))
    monkeypatch.setattr(profiling.dist, "barrier", lambda: None)
    monkeypatch.setattr(profiling, "rank_zero_info", told.append)
    layout = SimpleNamespace(num_hosts=2, topology=topology("0, 1", "2, 3"))
    request: Any = SimpleNamespace(layout=layout, world_size=4, rank=0, device=None)
    assert profiling._has_changed(request, COSTS) is changed
    assert made == [1.0] * len(probes) and len(told) == changed
    layout.num_hosts = 1
    assert not profiling._has_changed(request, COSTS) and len(made) == len(probes)
