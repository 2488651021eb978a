"""Topology files: reading, writing, and the message for every mistake."""

import copy
import inspect
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from refusals import refusal

from lightning_holmes.cluster import topology as topology_module
from lightning_holmes.cluster.topology import Cluster, Host, Link, Nic, Topology
from lightning_holmes.errors import ConfigurationError, HolmesError
from lightning_holmes.plan.plan import Plan

GOOD = """\
clusters:
  - name: berlin
    hosts:
      - name: node
        count: 2
        devices: 4
        nics:
          - {name: mlx5_0, kind: infiniband, bandwidth: 200 Gbit/s}
          - {name: eth0, kind: ethernet}
  - name: paris
    hosts:
      - {name: gpu, devices: 8}
links:
  - ends: [berlin, paris]
    transport: ethernet
    bandwidth: 25 Gbit/s
    latency: 50 us
"""


def test_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(GOOD)
    topology = Topology.from_yaml(path)
    nics = (
        Nic(name="mlx5_0", kind="infiniband", bandwidth_bytes_per_s=25e9),
        Nic(name="eth0", kind="ethernet", bandwidth_bytes_per_s=None),
    )
    assert topology == Topology(
        clusters=(
            Cluster(
                name="berlin",
                hosts=(Host(name="node-0", devices=4, nics=nics), Host(name="node-1", devices=4, nics=nics)),
            ),
            Cluster(name="paris", hosts=(Host(name="gpu", devices=8),)),
        ),
        links=(Link(ends=("berlin", "paris"), transport="ethernet", bandwidth_bytes_per_s=3.125e9, latency_s=50e-6),),
    )
    assert topology.num_devices == 16
    assert [topology.cluster_of_rank(rank).name for rank in (0, 7, 8, 15)] == ["berlin", "berlin", "paris", "paris"]
    with pytest.raises(ConfigurationError, match=r"rank 16 .*topology\.yaml.* 0 to 15"):
        topology.cluster_of_rank(16)


def test_the_examples_in_docstring_and_docs_are_valid() -> None:
    docs = Path(__file__).parents[2] / "docs" / "launching.md"
    for text, devices in ((topology_module.__doc__ or "", 32), (docs.read_text().split("## Topology files")[1], 32)):
        indented = [line[4:] for line in text.splitlines() if line.startswith("    ")]
        assert Topology.from_yaml_text("\n".join(indented)).num_devices == devices


def test_hosts_with_role_optimizer_are_no_workers() -> None:
    text = GOOD.replace(
        "- {name: gpu, devices: 8}", "- {name: cpu, count: 2, role: optimizer}\n      - {name: gpu, devices: 8}"
    )
    topology = Topology.from_yaml_text(text + "optimizer_hosts:\n  - {name: far}\n")
    assert replace(topology, optimizer_hosts=()) == Topology.from_yaml_text(GOOD)
    found = [(host.name, host.cluster) for host in topology.optimizer_hosts]
    assert found == [("far", None), ("cpu-0", "paris"), ("cpu-1", "paris")]
    assert Topology.from_yaml_text(topology.to_yaml()) == topology


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("{name: cpu, role: server}", "'server' is not allowed; write optimizer"),
        ("{name: cpu, role: optimizer, devices: 2}", "has a name, and perhaps a count, but no devices"),
        ("{name: gpu, role: optimizer}", "each may be given once; repeated: gpu"),
    ],
)
def test_mistakes_about_roles_are_named(host: str, words: str) -> None:
    text = GOOD.replace("- {name: gpu, devices: 8}", f"- {host}\n      - {{name: gpu, devices: 8}}")
    with pytest.raises(ConfigurationError, match=words):
        Topology.from_yaml_text(text)


@given(
    name=st.text(
        st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Co", "Cn", "Zl", "Zp")), min_size=1
    ).filter(lambda text: text.strip() != ""),
    bandwidth=st.floats(min_value=1e-300, max_value=1e300),
    latency=st.floats(min_value=0, max_value=1e6),
)
def test_round_trip_is_exact(name: str, bandwidth: float, latency: float) -> None:
    nic = Nic(name=name, kind="roce", bandwidth_bytes_per_s=bandwidth)
    topology = Topology(
        clusters=(
            Cluster(name=name, hosts=(Host(name=name, devices=1, nics=(nic,)),)),
            Cluster(name=name + "2", hosts=(Host(name=name + "2", devices=3),)),
        ),
        links=(
            Link(ends=(name, name + "2"), transport="ethernet", bandwidth_bytes_per_s=bandwidth, latency_s=latency),
        ),
    )
    assert Topology.from_yaml_text(topology.to_yaml()) == topology


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        *(("200 Gbit/s", 25e9), ("1.5 GB/s", 1.5e9), ("100Mbit/s", 12.5e6), ("10 Gbps", 1.25e9)),
        *(("2 GiB/s", 2.0 * 2**30), ("8 bit/s", 1.0), ("25e9", 25e9), ("25.0e+9", 25e9), ("100000", 1e5)),
        *(("1000 B/s", 1000.0), (".5 kB/s", 500.0)),
    ],
)
def test_bandwidths(text: str, bytes_per_s: float) -> None:
    topology = Topology.from_yaml_text(GOOD.replace("200 Gbit/s", text))
    assert topology.clusters[0].hosts[0].nics[0].bandwidth_bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    ("text", "seconds"), [("2 ms", 2e-3), ("50us", 50e-6), ("300 ns", 300e-9), ("0", 0.0), ("0.25", 0.25), ("1 s", 1.0)]
)
def test_latencies(text: str, seconds: float) -> None:
    assert Topology.from_yaml_text(GOOD.replace("50 us", text)).links[0].latency_s == seconds


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("devices: 4", "device: 4", 6, ["'device'", "did you mean 'devices'", "count"]),
        ("devices: 4", "devices: 0", 6, ["clusters[0].hosts[0].devices", "0 is not", "greater than or equal to 1"]),
        ("devices: 4", "devices: true", 6, ["true is not allowed"]),
        ("devices: 4", 'devices: "4"', 6, ["'4' is not allowed"]),
        ("devices: 4", "devices: 4\n        devices: 5", 7, ["'devices'", "second time"]),
        ("        devices: 4\n", "", 4, ["'devices' is missing"]),
        ("count: 2", "count: 1000000000", 5, ["1000000000", "100000"]),
        ("infiniband", "infinband", 8, ["'infinband'", "did you mean 'infiniband'", "'roce' or 'ethernet'"]),
        ("200 Gbit/s", "0 Gbit/s", 8, ["bandwidth", "'0 Gbit/s'", "positive"]),
        ("200 Gbit/s", ".nan", 8, [".nan is not allowed"]),
        ("200 Gbit/s", "200 Gb/s", 8, ["'Gb/s'", "misread", "bit/s"]),
        ("200 Gbit/s", "200 parsec", 8, ["unknown unit 'parsec'"]),
        ("200 Gbit/s", "200", 8, ["nics[0].bandwidth: 200 ", "'200 Gbit/s'", "'200 B/s'", "no network"]),
        ("200 Gbit/s", "99.9e3", 8, ["99.9e3", "99900 bytes per second"]),
        ("name: eth0", "name: mlx5_0", 9, ["mlx5_0", "already on line 8"]),
        ("name: paris", "name: berlin", 10, ["berlin", "already on line 2"]),
        ("name: gpu", "name: node-1", 12, ["node-1", "already on line 4"]),
        ("name: paris", "name: 7", 10, ["7 is not allowed; write a text", "quotes"]),
        ("[berlin, paris]", "[berlin, pari]", 14, ["'pari'", "did you mean 'paris'", "berlin, paris"]),
        ("[berlin, paris]", "[berlin, berlin]", 14, ["both ends are 'berlin'"]),
        ("[berlin, paris]", "[berlin]", 14, ["links[0].ends", "2 entries are needed, not 1"]),
        ("transport: ethernet", "transport: tcp", 15, ["'tcp'", "ethernet"]),
        ("latency: 50 us", "latency: -50 us", 17, ["'-50 us'", "latency of zero or more"]),
        ("latency: 50 us", "latency: 50", 17, ["links[0].latency: 50 ", "'50 us'", "'50 s'", "no network"]),
        ("latency: 50 us", 'latency: "1.0"', 17, ["'1.0' without a unit is 1 seconds"]),
        ("    latency: 50 us\n", "", 14, ["'latency' is missing"]),
        ("links:", "link:", 13, ["'link'", "did you mean 'links'"]),
        ("      - {name: gpu, devices: 8}", "      []", 12, ["clusters[1].hosts", "at least 1 item", "not 0"]),
        ("      - {name: gpu, devices: 8}", "      - gpu", 12, ["'gpu'", "a mapping with the keys name"]),
        ("{name: gpu, devices: 8}", "{name: gpu, devices: 8", 13, ["not valid YAML"]),
        ("{name: gpu, devices: 8}", "!!python/object:os.system {}", 12, ["'name' is missing"]),
    ],
)
def test_mistakes_name_file_line_and_fix(old: str, new: str, line: int, words: list[str]) -> None:
    assert GOOD.count(old) == 1
    with refusal(*words, start=f"my.yaml, line {line}: "):
        Topology.from_yaml_text(GOOD.replace(old, new), source="my.yaml")


def test_repeated_link() -> None:
    text = GOOD + "  - {ends: [paris, berlin], transport: ethernet, bandwidth: 1 B/s, latency: 0}\n"
    with pytest.raises(ConfigurationError, match=r"line 18: .*already on line 14"):
        Topology.from_yaml_text(text)


@pytest.mark.parametrize("text", ["", "# nothing\n", "clusters: []", "clusters: ", "- 1", "a: b: c", "\0"])
def test_broken_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"broken\.yaml"):
        Topology.from_yaml(path)


@pytest.mark.parametrize(
    "text", ["hunter2\n", "hunter2: ", "- hunter2", "root:hunter2:0:0\nbin:hunter2:1:1", '"hunter2"']
)
def test_what_stands_in_somebody_elses_file_is_not_shown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    for read in (Topology.from_yaml, Plan.load):
        with pytest.raises(ConfigurationError, match="secret, line 1") as raised:
            read(path)
        assert "hunter2" not in str(raised.value) or text == "hunter2: "  # a key is shown


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml"):
        Topology.from_yaml(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x9f")
    with pytest.raises(ConfigurationError, match=r"binary\.yaml"):
        Topology.from_yaml(tmp_path / "binary.yaml")


def test_topologies_made_in_python_are_checked_too() -> None:
    host = Host(name="a", devices=1)
    cluster = Cluster(name="c", hosts=(host,))
    with pytest.raises(ConfigurationError, match=r"Host: devices: 0 is not allowed; .*greater than or equal to 1"):
        Host(name="a", devices=0)
    with pytest.raises(ConfigurationError, match=r"Nic: bandwidth_bytes_per_s: NaN is not allowed; .*finite number"):
        Nic(name="n", kind="roce", bandwidth_bytes_per_s=math.nan)
    with pytest.raises(ConfigurationError, match="'wifi'"):
        Nic(name="n", kind="wifi")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Cluster: hosts: .*at least 1 item"):
        Cluster(name="c", hosts=())
    with pytest.raises(ConfigurationError, match=r"clusters: .*repeated: c"):
        Topology(clusters=(cluster, cluster))
    with pytest.raises(ConfigurationError, match="must join two of the clusters"):
        Topology(
            clusters=(cluster,),
            links=(Link(ends=("c", "d"), transport="roce", bandwidth_bytes_per_s=1.0, latency_s=0.0),),
        )
    with pytest.raises(HolmesError):
        Topology(clusters=())


def test_what_a_topology_is_made_of_is_seen_from_outside() -> None:
    """Trainer configuration files may contain a written-out topology, and processes get copies."""
    topology = Topology.single_cluster(1, 2)
    assert pickle.loads(pickle.dumps(topology)) == copy.deepcopy(topology) == topology
    assert [*inspect.signature(Topology).parameters][:2] == ["clusters", "links"]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--topology", type=Topology)
    nic = {"name": "eth0", "kind": "ethernet", "bandwidth_bytes_per_s": 1e6}
    given = {"clusters": [{"name": "c", "hosts": [{"name": "h", "devices": 1, "nics": [nic]}]}]}
    read = parser.instantiate(parser.parse_object({"topology": given})).topology
    assert isinstance(read, Topology) and read.hosts[0].nics[0].bandwidth_bytes_per_s == 1e6
