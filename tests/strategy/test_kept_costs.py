"""Costs that are kept belong to hosts, not to ranks: a launcher may number the nodes otherwise the next time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_holmes.cluster.measure import fingerprint
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.strategy.kept_costs import Costs, distrust_costs, load_costs, save_costs

LAYER = LayerCost(forward=1.0, backward=2.0)
COSTS = Costs(
    model=ModelCost(unit="seconds", microbatch_samples=1, before=LAYER, layers=(LAYER, LAYER), after=LAYER),
    speeds=(1.0, 0.9, 0.5, 0.4),
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
    distrust_costs(later)
    assert load_costs("one", first) is None and load_costs("another", later) is None
    assert load_costs("of other hosts", elsewhere) is not None
    save_costs("one", COSTS, first)
    assert load_costs("one", first) is not None and load_costs("another", first) is None
    (mark,) = tmp_path.glob("slow-*.json")
    mark.write_text("half a num")
    assert load_costs("another", first) is not None
    monkeypatch.setenv("HOLMES_CACHE_DIR", str(mark))  # a file where the folder would be
    distrust_costs(first)  # in a thread that must not fail
    assert "before a rank became slow" in capsys.readouterr().err
