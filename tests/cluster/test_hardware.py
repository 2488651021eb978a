"""Results of probe_host on machines of every kind, and its warnings about values that it could not read."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from trees import Machine, ipv4_gid, write

from lightning_holmes.cluster import interfaces
from lightning_holmes.cluster.hardware import HostInventory, probe_host
from lightning_holmes.cluster.record import read_json, to_json
from lightning_holmes.errors import ConfigurationError

IB_GID = "fe80:0000:0000:0000:0c42:a103:0065:bd1e"
LINK_LOCAL = "fe80:0000:0000:0000:0e42:a1ff:fe65:bd1e"
ZERO = ":".join(["0000"] * 8)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in list(os.environ):
        if name.startswith(("HOLMES_", "SLURM_", "MASTER_")):
            monkeypatch.delenv(name)
    made = Machine(tmp_path)
    made.install(monkeypatch)
    return made


def probe(machine: Machine) -> HostInventory:
    inventory = probe_host(machine_root=str(machine.root))
    assert read_json(HostInventory, to_json(inventory), source="itself") == inventory
    return inventory


def roce_gids(address: str, ndev: str) -> list[tuple[str, str | None, str | None]]:
    return [
        (LINK_LOCAL, "IB/RoCE v1", ndev),
        (LINK_LOCAL, "RoCE v2", ndev),
        (ZERO, None, None),
        (ipv4_gid(address), "IB/RoCE v1", ndev),
        (ipv4_gid(address), "RoCE v2", ndev),
    ]


def test_infiniband(machine: Machine) -> None:
    machine.rdma("mlx5_0", gids=[(IB_GID, None, None)])
    machine.interface("eth0", addresses=["10.0.0.5/24", "fe80::1/64", "2001:db8::5/64"], speed="25000", driver="ice")
    inventory = probe(machine)
    (port,) = inventory.rdma
    assert (port.name, port.kind, port.up, port.state) == ("mlx5_0", "infiniband", True, "ACTIVE")
    assert port.rate_bytes_per_s == 25e9
    assert (port.sm_lid, port.subnet_prefix) == (1, "fe80:0000:0000:0000")
    (eth0,) = inventory.interfaces
    assert (eth0.kind, eth0.speed_bytes_per_s, eth0.up) == ("ethernet", 25e9 / 8, True)
    assert eth0.addresses == ("10.0.0.5/24", "2001:db8::5/64")
    assert [(nic.name, nic.kind, nic.addresses) for nic in inventory.nics()] == [
        ("mlx5_0", "infiniband", ()),
        ("eth0", "ethernet", ("10.0.0.5", "2001:db8::5")),
    ]
    assert inventory.warnings == ()


def test_roce_takes_addresses_and_state_from_its_interface(machine: Machine) -> None:
    machine.rdma("mlx5_0", layer="Ethernet", sm_lid="0x0", gids=roce_gids("10.9.0.3", "ens1"))
    machine.interface("ens1", addresses=["10.9.0.3/16"], speed="100000", driver="mlx5_core")
    machine.interface("eth0", addresses=["10.0.0.5/24"], driver="ice")
    inventory = probe(machine)
    (port,) = inventory.rdma
    assert (port.kind, port.interface, port.sm_lid) == ("roce", "ens1", None)
    assert port.addresses == ("10.9.0.3/16",) and port.up
    assert [interface.name for interface in inventory.interfaces] == ["eth0"]  # ens1 is reached as mlx5_0

    machine.interface("ens1", addresses=["10.9.0.3/16"], up=False)
    (port,) = probe(machine).rdma
    assert port.state == "ACTIVE" and not port.up and port.addresses == ("10.9.0.3/16",)


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
def test_a_made_up_device_with_a_real_interface(machine: Machine, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # as the testbed sets it up: no device link, a few files, in a separate tree
    here = machine.root / "made-up/class/infiniband/mlx5_0/ports/1"
    for name, text in {
        "link_layer": layer,
        "state": "4: ACTIVE",
        "rate": "1 Gb/sec",
        "sm_lid": "0x1",
        "gids/0": LINK_LOCAL,
        "gid_attrs/ndevs/0": "fast0",
        "gid_attrs/types/0": "RoCE v2",
    }.items():
        write(here / name, text)
    monkeypatch.setenv("HOLMES_SYSFS_ROOT", str(machine.root / "made-up"))
    for up in (True, False):
        machine.interface("fast0", addresses=["10.1.0.2/24"], up=up)
        (port,) = probe(machine).rdma
        assert (port.interface, port.addresses, port.up) == ("fast0", ("10.1.0.2/24",), up)
        assert port.rate_bytes_per_s == 125e6


def test_several_devices_and_ports(machine: Machine) -> None:
    for index in (10, 2):
        machine.rdma(f"mlx5_{index}", gids=[(IB_GID, None, None)], pci=f"pci0000:00/0000:{index}:00.0")
    machine.rdma("mlx4_0", port=1, gids=[(IB_GID, None, None)], pci="pci0000:00/0000:05:00.0")
    machine.rdma("mlx4_0", port=2, layer="Ethernet", state="1: DOWN", pci="pci0000:00/0000:05:00.0")
    ports = {port.name: port for port in probe(machine).rdma}
    assert list(ports) == ["mlx4_0:1", "mlx4_0:2", "mlx5_2", "mlx5_10"]
    assert (ports["mlx4_0:2"].kind, ports["mlx4_0:2"].up) == ("roce", False)


def test_bonds_virtio_veth_and_bridges(machine: Machine) -> None:
    bond = machine.interface("bond0", addresses=["10.0.0.1/24"], speed="50000")
    write(bond / "bonding/slaves", "eno1 eno2")
    for name in ("eno1", "eno2"):
        (machine.interface(name, driver="ice", speed="25000") / "master").symlink_to(bond)
    machine.interface("ens3", addresses=["10.2.0.1/24"], driver="virtio_net", speed="-1")
    write(machine.interface("eth7", addresses=["10.3.0.1/24"], speed="10000") / "iflink", "9")
    (machine.interface("docker0", addresses=["172.17.0.1/16"]) / "bridge").mkdir()
    machine.interface("dummy0")
    machine.interface("eno9", driver="ice", up=False)
    machine.default_route("ens3")
    inventory = probe(machine)
    found = {interface.name: interface for interface in inventory.interfaces}
    assert list(found) == ["ens3", "bond0", "eno9", "eth7"]  # the interface with the default route first
    assert inventory.main_interface == "ens3"
    assert (found["bond0"].kind, found["bond0"].members) == ("bond", ("eno1", "eno2"))
    assert found["bond0"].speed_bytes_per_s == 6.25e9
    assert (found["ens3"].kind, found["ens3"].speed_bytes_per_s) == ("virtio", None)
    assert (found["eth7"].kind, found["eth7"].speed_bytes_per_s) == ("veth", None)
    assert not found["eno9"].up


def test_loopback_only_if_there_is_nothing_else(machine: Machine) -> None:
    assert [interface.name for interface in probe(machine).interfaces] == ["lo"]
    machine.interface("docker0", addresses=["172.17.0.1/16"])
    assert [interface.name for interface in probe(machine).interfaces] == ["docker0"]
    machine.interface("eth0", addresses=["10.0.0.1/24"])
    assert [interface.name for interface in probe(machine).interfaces] == ["eth0"]


def test_sysfs_of_another_network_namespace_is_not_believed(machine: Machine) -> None:
    here = machine.interface("eth0", addresses=["10.0.0.1/24"], speed="100000", driver="ice")
    write(here / "address", "02:99:99:99:99:99")
    inventory = probe(machine)
    assert inventory.interfaces[0].speed_bytes_per_s is None
    assert any("another network namespace" in warning for warning in inventory.warnings)


def test_what_is_missing_is_named(machine: Machine) -> None:
    (warning,) = probe(machine).warnings
    assert warning.startswith(f"{machine.root}/sys/class/infiniband: ")
    machine.rdma("mlx5_0", layer=None, rate=None)
    machine.rdma("mlx5_1", rate="fast", gids=[(IB_GID, None, None)], sm_lid="x")
    machine.rdma("mlx5_2", layer="Unspecified")
    machine.rdma("mlx5_3", layer="Ethernet", gids=roce_gids("10.9.0.3", "gone"))
    write(machine.root / "sys/class/infiniband/irdma0/node_type", "4: RNIC")
    write(machine.root / "sys/class/infiniband/notadevice", "")
    inventory = probe(machine)
    text = "\n".join(inventory.warnings)
    for words in (
        "mlx5_0/ports/1/link_layer: No such file",
        "mlx5_0/ports/1/link_layer: None is neither",
        "mlx5_1/ports/1/rate: 'fast' is not a rate",
        "mlx5_1/ports/1/sm_lid: 'x' is not a number",
        "'Unspecified' is neither InfiniBand nor Ethernet",
        "'gone' is not in the network namespace",
        "iWARP",
        "notadevice/ports: Not a directory",
    ):
        assert words in text
    assert [port.name for port in inventory.rdma] == ["mlx5_1", "mlx5_3"]
    assert inventory.rdma[0].rate_bytes_per_s is None
    assert inventory.rdma[1].addresses == ("10.9.0.3/24",)  # from the GIDs


def test_gpus_are_counted(machine: Machine) -> None:
    for index in range(4):
        machine.gpu(f"pci0000:00/0000:{index}2:00.0")
    machine.gpu("pci0000:00/0000:00:1f.0", vendor="0x1a03", kind="0x030000")  # the board's own display
    assert probe(machine).num_gpus == 4
    write(machine.root / "proc/driver/nvidia/gpus/0000:12:00.0/information", "Model: \t NVIDIA H100\nIRQ: 5")
    assert probe(machine).num_gpus == 1


def test_the_main_interface_is_the_one_that_reaches_the_master(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it is behind an RDMA card, and whatever the default route says."""
    machine.rdma("mlx5_0", layer="Ethernet", sm_lid="0x0", gids=roce_gids("10.9.0.3", "ens1"))
    machine.interface("ens1", addresses=["10.9.0.3/16"], speed="100000", driver="mlx5_core")
    machine.interface("eth0", addresses=["10.0.0.5/24"], driver="ice")
    machine.interface("eth1", addresses=["10.2.0.5/24"], driver="ice")
    route = "eth0 00000000 0100000A 0003 0 0 100 00000000 0 0 0"
    write(
        machine.root / "proc/net/route",
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n" + route,
    )
    ways = {"10.2.7.1": "10.2.0.5", "10.9.1.1": "10.9.0.3", "10.0.0.1": "10.0.0.5", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(interfaces, "source_address", ways.get)

    def main(master: str | None) -> tuple[str | None, str]:
        inventory = probe_host(machine_root=str(machine.root), master_addr=master)
        return inventory.main_interface, inventory.interfaces[0].name

    assert main("10.2.7.1") == ("eth1", "eth1")
    assert main("10.9.1.1") == ("ens1", "ens1")
    # this host is the master, which is reached over the loopback; the master is unknown; there is no route to it
    assert main("127.0.0.1") == main(None) == main("10.77.0.1") == ("eth0", "eth0")


def test_names_and_clusters_from_the_environment(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_HOST_NAME", "node7")
    monkeypatch.setenv("HOLMES_CLUSTER", " berlin ")
    monkeypatch.setenv("MASTER_ADDR", "not.numeric.example")
    inventory = probe(machine)
    assert (inventory.name, inventory.identity, inventory.cluster) == ("node7", "node7", "berlin")


GOOD = to_json(HostInventory(name="a", identity="a"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": " "}, "name: the text is empty"),
        ({"rdma": [{"name": "m", "kind": "wifi"}]}, "rdma[0].kind: 'wifi'"),
        ({"rdma": [{"name": "m"}]}, "rdma[0]: the key 'kind' is missing"),
        (
            {"interfaces": [{"name": "e", "kind": "x", "up": 1}]},
            "interfaces[0].up: 1 is not allowed; write true or false",
        ),
        (
            {"interfaces": [{"name": "e", "kind": "x", "up": True, "addresses": ["1.2.3"]}]},
            "interfaces[0].addresses[0]: '1.2.3' does not appear to be",
        ),
        ({"interfaces": [{"name": "e", "kind": "x", "up": True}] * 2}, "repeated: e"),
        ({"warnings": "text"}, "warnings: 'text' is not allowed; write a list"),
        ({"name": "x" * 5000}, "at most 4096"),
        ({"__class__": "os"}, "unknown key '__class__'"),
    ],
)
def test_hostile_inventories(change: dict[str, object], words: str) -> None:
    with refusal(words, start="rank 3: "):
        read_json(HostInventory, json.dumps(json.loads(GOOD) | change), source="rank 3")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "rdma", "kind"]), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["name", "identity", "rdma", "interfaces", "num_gpus", "cluster"]), _JSON))
def test_any_json_is_read_or_refused(data: dict[str, object]) -> None:
    try:
        inventory = read_json(HostInventory, json.dumps(data), source="rank 3")
    except ConfigurationError as error:
        assert "rank 3" in str(error)
    else:
        assert read_json(HostInventory, to_json(inventory), source="again") == inventory
