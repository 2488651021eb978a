"""What discovery adds to a topology: where the ranks are, and the measurements; both ways through YAML and JSON."""

import json

import pytest
from refusals import refusal

from lightning_holmes.cluster.record import read_json, to_json
from lightning_holmes.cluster.topology import Cluster, Host, Link, LinkSpeed, Nic, Topology
from lightning_holmes.errors import ConfigurationError

FILE = """\
clusters:
  - name: berlin
    hosts:
      - {name: b, count: 2, devices: 2}
  - name: paris
    hosts:
      - {name: p, devices: 1}
"""


def discovered() -> Topology:
    nic = Nic(
        name="mlx5_0",
        kind="infiniband",
        bandwidth_bytes_per_s=25e9,
        interface="ib0",
        addresses=("10.1.0.1", "fd00::1"),
        up=False,
        fabric="infiniband/fe80::1",
    )
    speed = LinkSpeed(
        transport="infiniband", bandwidth_bytes_per_s=1e9, latency_s=1e-5, nic_bytes_per_s=25e9, measured=True
    )
    berlin = Cluster(
        name="berlin",
        hosts=(Host(name="b", devices=2, nics=(nic,), ranks=(3, 0)),),
        fabric="infiniband",
        fallback="b: mlx5_0 is down",
        speeds=(speed, LinkSpeed(transport="ethernet", bandwidth_bytes_per_s=1e8)),
    )
    paris = Cluster(name="paris", hosts=(Host(name="p", devices=2, ranks=(1, 2)),))
    return Topology(
        clusters=(berlin, paris),
        links=(
            Link(
                ends=("berlin", "paris"), transport="ethernet", bandwidth_bytes_per_s=1e8, latency_s=0.01, measured=True
            ),
        ),
        warnings=("b: mlx5_0 is down",),
        measured_at_s=1.7e9,
    )


def test_what_was_discovered_goes_through_yaml_and_json() -> None:
    topology = discovered()
    assert Topology.from_yaml_text(topology.to_yaml()) == topology
    assert read_json(Topology, to_json(topology), source="rank 0") == topology
    assert json.loads(to_json(topology))["clusters"][0]["hosts"][0]["ranks"] == [3, 0]


def test_ranks_are_honoured() -> None:
    topology = discovered()
    assert [topology.cluster_of_rank(rank).name for rank in range(4)] == ["berlin", "paris", "paris", "berlin"]
    assert [topology.host_of_rank(rank).name for rank in range(4)] == ["b", "p", "p", "b"]
    assert topology.ranks_of_host("b") == (0, 3)
    assert Topology.from_yaml_text(FILE).ranks_of_host("p") == (4,)
    assert [host.name for _, host in Topology.from_yaml_text(FILE).places()] == ["b-0", "b-0", "b-1", "b-1", "p"]
    with pytest.raises(ConfigurationError, match=r"no host 'x'.* b, p"):
        topology.ranks_of_host("x")


def test_a_file_is_matched_to_live_hosts() -> None:
    topology = Topology.from_yaml_text(FILE, source="t.yaml")
    by_name = topology.with_ranks(["p.example.org", "b-1", "b-0", "b-1", "b-0"])
    assert {host.name: host.ranks for host in by_name.hosts} == {"b-0": (2, 4), "b-1": (1, 3), "p": (0,)}
    by_order = topology.with_ranks(["x", "y", "x", "y", "z"])
    assert {host.name: host.ranks for host in by_order.hosts} == {"b-0": (0, 2), "b-1": (1, 3), "p": (4,)}


@pytest.mark.parametrize(
    ("live", "words"),
    [
        (["x", "x", "y", "y"], ["t.yaml", "b-0, b-1, p", "x, y", "3 and 2"]),
        (["b-0", "b-0", "b-1", "b-1", "q"], ["b-0, b-1, p", "b-0, b-1, q", "the names p are not"]),
        (["x", "y", "y", "z", "z"], ["'b-0'", "devices: 2", "1 ranks run on x", "devices: 1"]),
    ],
)
def test_a_file_that_does_not_fit_the_job(live: list[str], words: list[str]) -> None:
    with refusal(*words):
        Topology.from_yaml_text(FILE, source="t.yaml").with_ranks(live)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("{name: b, devices: 2, ranks: [0]}", 4, ["1 ranks for 2 devices"]),
        ("{name: b, devices: 2, ranks: [0, x]}", 4, ["ranks[1]", "'x' is not allowed"]),
        ("{name: b, devices: 1, count: 2, ranks: [0]}", 4, ["without a count"]),
        ("{name: b, devices: 1, nics: [{name: n, kind: roce, up: 1}]}", 4, ["up", "true or false"]),
        ("{name: b, devices: 1, nics: [{name: n, kind: roce, addresses: [1]}]}", 4, ["addresses[0]", "quotes"]),
    ],
)
def test_mistakes_name_the_line(text: str, line: int, words: list[str]) -> None:
    with refusal(*words, start=f"my.yaml, line {line}: "):
        Topology.from_yaml_text(f"clusters:\n  - name: c\n    hosts:\n      - {text}\n", source="my.yaml")


def test_ranks_of_all_hosts_or_none() -> None:
    placed, free = Host(name="a", devices=1, ranks=(0,)), Host(name="b", devices=1)
    with pytest.raises(ConfigurationError, match="not for b; give all or none"):
        Topology(clusters=(Cluster(name="c", hosts=(placed, free)),))
    with pytest.raises(ConfigurationError, match=r"0 to 1.*rank 1 is missing"):
        Topology(clusters=(Cluster(name="c", hosts=(placed, Host(name="b", devices=1, ranks=(2,)))),))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", ["'clusters'", "missing"]),
        ("[1", ["not valid JSON"]),
        ("[" * 200_000, ["not valid JSON"]),
        ('{"clusters": [{"name": "c", "hosts": []}]}', ["clusters[0].hosts", "at least 1 item"]),
        ('{"clusters": NaN}', ["NaN"]),
        ('{"clusters": [{"name": 7, "hosts": []}]}', ["clusters[0].name", "7 is not allowed; write a text"]),
        ('{"clusters": [], "os": "system"}', ["unknown key 'os'", "Allowed here: clusters, links"]),
        (
            '{"clusters": [{"name": "c", "hosts": [{"name": "h", "devices": 1}]}], "measured_at_s": 1e999}',
            ["measured_at_s", "finite"],
        ),
        ('{"clusters": [{"name": "c", "hosts": [{"name": "h", "devices": true}]}]}', ["devices", "whole number"]),
        (
            '{"clusters": [{"name": "c", "hosts": [{"name": "h", "devices": 9' + "9" * 30 + "}]}]}",
            ["devices", "less than or equal to 4096"],
        ),
    ],
)
def test_hostile_json(text: str, words: list[str]) -> None:
    with refusal("rank 7", *words) as caught:
        read_json(Topology, text, source="rank 7")
    assert len(str(caught.value)) < 600
