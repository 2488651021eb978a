"""Names, addresses and rates of a testbed, which are computed without touching the machine."""

import ipaddress
import re
from pathlib import Path

import pytest

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from testbed.errors import TestbedError
from testbed.layout import Layout, TestbedOptions, make_layout
from testbed.made_up_sysfs import write_counters, write_devices, write_port

TWO_CLUSTERS = """
clusters:
  - name: north
    hosts:
      - {name: n, count: 2, devices: 1, nics: [{name: mlx5_0, kind: infiniband, bandwidth: 1 Gbit/s},
                                               {name: enp1s0, kind: ethernet, bandwidth: 100 Mbit/s}]}
  - name: south
    hosts:
      - {name: s.0, devices: 1, nics: [{name: mlx5_0, kind: roce}, {name: mlx5_1, kind: roce}]}
      - {name: s.1, devices: 1}
"""
LINK = "links: [{ends: [north, south], transport: ethernet, bandwidth: 40 Mbit/s, latency: 1 ms}]"


def layout_of(text: str, **options: object) -> Layout:
    return make_layout(Topology.from_yaml_text(text), TestbedOptions(**options), bed_id="t")  # type: ignore[arg-type]


def test_fast_cards_share_a_network_inside_a_cluster_and_ethernet_is_everywhere() -> None:
    layout = layout_of(TWO_CLUSTERS)
    fabrics = {f"{host.name}.{nic.name}": nic.fabric for host, nic in layout.nics()}
    assert fabrics["n-0.mlx5_0"] == fabrics["n-1.mlx5_0"]
    assert len({fabrics[name] for name in ("n-0.mlx5_0", "s.0.mlx5_0", "s.0.mlx5_1")}) == 3
    ethernets = {host.ethernet.fabric for host in layout.hosts}
    assert len(ethernets) == 1 and ethernets.isdisjoint(fabrics[name] for name in fabrics if "mlx5" in name)
    assert layout.host("s.1").ethernet.name == "eth0", "a host without Ethernet gets some"
    addresses = [nic.address for _, nic in layout.nics()]
    assert len(set(addresses)) == len(addresses)
    for _, nic in layout.nics():
        for _, other in layout.nics():
            same = (
                ipaddress.ip_interface(f"{nic.address}/16").network
                == ipaddress.ip_interface(f"{other.address}/16").network
            )
            assert same == (nic.fabric == other.fabric)


def test_interfaces_of_rdma_devices_have_other_names_and_all_fit() -> None:
    layout = layout_of(TWO_CLUSTERS + LINK)
    names = [*layout.bridges, *(name for trunk in layout.trunks for name in (trunk.inner, trunk.outer))]
    names += [name for _, nic in layout.nics() for name in (nic.interface, nic.port)]
    assert all(len(name) <= 15 for name in names)
    assert [nic.interface for nic in layout.host("n-0").nics] == ["ib0", "enp1s0"]
    assert [nic.interface for nic in layout.host("s.0").nics] == ["roce0", "roce1", "eth0"]
    assert all(host.namespace.startswith("holmes-t-") for host in layout.hosts)


def test_rates_come_from_the_topology_or_from_what_stands_in_for_it() -> None:
    def rates(layout: Layout) -> dict[str, float | None]:
        return {f"{host.name}.{nic.name}": nic.bandwidth_bytes_per_s for host, nic in layout.nics()}

    own = rates(layout_of(TWO_CLUSTERS))
    assert own["n-0.mlx5_0"] == 125e6 and own["n-0.enp1s0"] == 12.5e6 and own["s.1.eth0"] is None
    given = rates(layout_of(TWO_CLUSTERS, rdma_bandwidth_bytes_per_s=2e6, ethernet_bandwidth_bytes_per_s=1e6))
    assert {name: 1e6 if "e" in name.rpartition(".")[2] else 2e6 for name in given} == given


def test_links_cap_what_goes_from_one_cluster_to_the_other() -> None:
    layout = layout_of(TWO_CLUSTERS + LINK)
    number = layout.host("n-0").ethernet.fabric
    caps = {
        trunk.bridge: [(cap.destination_key, cap.bandwidth_bytes_per_s) for cap in trunk.caps]
        for trunk in layout.trunks
    }
    subnet = f"0x0a{64 + number:02x}"
    assert caps == {
        f"br{number}c0": [(f"{subnet}0100/0xffffff00+16", 5e6)],
        f"br{number}c1": [(f"{subnet}0000/0xffffff00+16", 5e6)],
    }
    assert layout_of(TWO_CLUSTERS).trunks == ()


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (TWO_CLUSTERS + LINK.replace("transport: ethernet", "transport: roce"), {}, "by Ethernet alone, not by roce"),
        (TWO_CLUSTERS.replace("enp1s0", "a_name_of_16_let"), {}, "'a_name_of_16_let'.*15"),
        (TWO_CLUSTERS.replace("100 Mbit/s", "10 bit/s"), {}, "enp1s0.*8 kbit/s"),
        (TWO_CLUSTERS.replace("s.1", "s 1"), {}, "'s 1' cannot be a machine's name"),
        (TWO_CLUSTERS, {"cpu_share": 0}, "cpu_share: 0 is not allowed; .*greater than 0"),
        (TWO_CLUSTERS, {"cpu_share": 0.01}, "cpu_period_s=0.2"),
        (TWO_CLUSTERS, {"host_cpu_shares": {"x": 1}}, "CPU shares for x; the hosts are n-0"),
        (TWO_CLUSTERS, {"prefix": "Holmes"}, "prefix: 'Holmes' is not allowed"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(text: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        layout_of(text, **options)


def test_a_nic_is_found_by_host_and_name() -> None:
    layout = layout_of(TWO_CLUSTERS)
    host, nic = layout.nic("s.0.mlx5_1")
    assert (host.name, nic.name) == ("s.0", "mlx5_1")
    with pytest.raises(TestbedError, match=re.escape("n-0 has no NIC 'eth7'; it has mlx5_0, enp1s0")):
        layout.nic("n-0.eth7")
    with pytest.raises(TestbedError, match=re.escape("no host 'x'; there are n-0, n-1, s.0, s.1")):
        layout.nic("x.eth0")
    with pytest.raises(TestbedError, match=re.escape("write HOST.NIC, such as n-0.mlx5_0")):
        layout.nic("eth0")


def test_the_made_up_sysfs_says_which_fabric_a_card_is_on(tmp_path: Path) -> None:
    layout = layout_of(TWO_CLUSTERS)
    ports = {}
    for host in layout.hosts:
        write_devices(tmp_path / host.folder, host)
        for nic in host.nics:
            ports[f"{host.name}.{nic.name}"] = (
                tmp_path / host.folder / "class" / "infiniband" / nic.name / "ports" / "1"
            )

    def read(nic: str, name: str) -> str:
        return (ports[nic] / name).read_text().strip()

    assert read("n-0.mlx5_0", "link_layer") == "InfiniBand" and read("s.0.mlx5_0", "link_layer") == "Ethernet"
    assert read("n-0.mlx5_0", "state") == "4: ACTIVE" and read("n-0.mlx5_0", "rate").startswith("1 Gb/sec")
    assert read("n-0.mlx5_0", "sm_lid") == read("n-1.mlx5_0", "sm_lid")
    prefixes = {name: read(name, "gids/0")[:19] for name in ("n-0.mlx5_0", "n-1.mlx5_0")}
    assert len(set(prefixes.values())) == 1 and read("n-0.mlx5_0", "gids/0") != read("n-1.mlx5_0", "gids/0")
    types = [read("s.0.mlx5_0", f"gid_attrs/types/{index}") for index in range(4)]
    assert types == ["IB/RoCE v1", "RoCE v2"] * 2
    host, nic = layout.nic("s.0.mlx5_0")
    mapped = ipaddress.IPv6Address(read("s.0.mlx5_0", "gids/3"))
    assert str(mapped.ipv4_mapped) == nic.address
    assert read("s.0.mlx5_0", "gid_attrs/ndevs/3") == "roce0"
    assert not ports["n-0.enp1s0"].exists(), "Ethernet cards are no RDMA devices"
    write_port(tmp_path / host.folder, nic, up=False, bandwidth_bytes_per_s=5e9)
    write_counters(tmp_path / host.folder, nic, received_bytes=400, sent_bytes=80)
    assert read("s.0.mlx5_0", "state") == "1: DOWN" and read("s.0.mlx5_0", "rate").startswith("40 Gb/sec")
    assert (read("s.0.mlx5_0", "counters/port_rcv_data"), read("s.0.mlx5_0", "counters/port_xmit_data")) == (
        "100",
        "20",
    )
