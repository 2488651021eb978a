"""Transports of groups: the best card that all members share; the user's settings are respected or refused."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refusal

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology, TransportKind
from lightning_holmes.comm import mesh
from lightning_holmes.comm.group_transports import GroupTransports
from lightning_holmes.comm.user_settings import UserSettings, hca_allows, interface_allows, set_own
from lightning_holmes.errors import ConfigurationError, UnreachableError
from lightning_holmes.plan.transport import TransportChooser


def nic(kind: TransportKind, name: str, *, up: bool = True, fabric: str | None = None, gbit: float = 1.0) -> Nic:
    interface = {"infiniband": f"ib_{name}", "roce": f"rdma_{name}"}.get(kind, name)
    return Nic(
        name=name,
        kind=kind,
        interface=interface,
        addresses=("10.0.0.1",),
        up=up,
        fabric=fabric,
        bandwidth_bytes_per_s=gbit * 125e6,
    )


def cluster(name: str, hosts: Sequence[Sequence[Nic]], devices: int = 1) -> Cluster:
    made = (Host(name=f"{name}{i}", devices=devices, nics=tuple(nics)) for i, nics in enumerate(hosts))
    return Cluster(name=name, hosts=tuple(made))


ETH = nic("ethernet", "eth0")
MIXED = Topology(
    clusters=(
        cluster("a", [[nic("infiniband", "mlx5_0", fabric="A"), ETH]] * 2, devices=2),
        cluster("b", [[nic("roce", "mlx5_1", fabric="B"), ETH]] * 2),
    )
)


def transports(topology: Topology = MIXED, *, rank: int = 0, backend: str = "nccl", **user: str) -> GroupTransports:
    settings = UserSettings.read(user, files=())
    chooser = TransportChooser(topology, sockets=backend == "gloo")
    return GroupTransports(chooser, rank=rank, backend=backend, user=settings)


def test_a_group_uses_the_fabric_that_its_hosts_share() -> None:
    chosen = transports()
    assert chosen.net_name([0, 2]) == "IB" and chosen.interface([0, 2]) == "ib_mlx5_0"
    assert chosen.describe([0, 2]) == ("nccl IB on mlx5_0", "infiniband: 2 hosts share it (A)")
    assert transports(rank=4).net_name([4, 5]) == "IB"  # RoCE: NCCL uses the same module name for it
    assert transports(rank=4, backend="gloo").describe([4, 5])[0] == "gloo on rdma_mlx5_1"


def test_infiniband_and_roce_do_not_mix() -> None:
    chosen = transports()
    assert chosen.net_name([0, 4]) == "Socket" and chosen.interface([0, 4]) == "eth0"
    assert chosen.describe([0, 4]) == ("nccl Socket", "ethernet: crosses from infiniband in a to roce in b")


def test_a_card_that_is_down_sends_its_group_to_ethernet() -> None:
    down = nic("infiniband", "mlx5_0", up=False, fabric="A")
    topology = Topology(clusters=(cluster("a", [[nic("infiniband", "mlx5_0", fabric="A"), ETH], [down, ETH]]),))
    chosen = transports(topology, backend="gloo")
    assert chosen.describe([0, 1]) == ("gloo on eth0", "ethernet: mlx5_0 of a1 is down")
    assert chosen.fallbacks([[0, 1]]) == ["the group of ranks 0, 1 uses Ethernet: mlx5_0 of a1 is down"]


def test_the_fastest_of_several_fabrics_is_used() -> None:
    cards = [nic("roce", "slow", fabric="S"), nic("infiniband", "fast", fabric="F", gbit=4), ETH]
    assert (
        transports(Topology(clusters=(cluster("a", [cards, cards[::-1]]),)), backend="gloo").interface([0, 1])
        == "ib_fast"
    )


def test_cards_of_unknown_fabric_count_inside_a_cluster_only() -> None:
    hosts = [[nic("infiniband", "mlx5_0"), ETH]]
    apart = Topology(clusters=(cluster("a", hosts), cluster("b", hosts)))
    together = Topology(clusters=(cluster("a", hosts * 2),))
    assert transports(apart).net_name([0, 1]) == "Socket" and transports(together).net_name([0, 1]) == "IB"


def test_gloo_needs_the_interface_behind_a_card() -> None:
    bare = Nic(name="mlx5_0", kind="infiniband", addresses=("10.0.0.1",))
    topology = Topology(clusters=(cluster("a", [[bare], [bare]]),))
    with pytest.raises(ConfigurationError, match=r"mlx5_0 is the card of rank 0 .* give its `interface`"):
        transports(topology, backend="gloo").interface([0, 1])


def test_nccl_lists_hold_what_any_group_of_the_process_needs() -> None:
    assert transports().nccl_environment([[0, 2], [0, 4]]) == {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=mlx5_0"}
    assert transports().nccl_environment([[0, 4]]) == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert transports(backend="gloo").nccl_environment([[0, 2]]) == {}
    assert transports(NCCL_SOCKET_IFNAME="eth9").nccl_environment([[0, 4]]) == {}


def test_messages_and_the_group_of_all_ranks_stay_on_ethernet() -> None:
    ethernet = "ethernet: the interface that reaches the master"
    for backend in ("gloo", "nccl"):
        chosen = transports(backend=backend)
        assert chosen.describe([0, 2], "messages") == ("gloo on eth0", ethernet)
        assert chosen.describe([0, 1], "messages") == ("gloo", "all on host a0")
    assert transports(backend="gloo").describe(range(6), "world") == ("gloo on eth0", ethernet)
    assert transports().describe(range(6), "world") == ("nccl Socket on eth0", ethernet)
    for variable, setting, used in (
        ("NCCL_NET", "Socket", "nccl Socket"),
        ("NCCL_SOCKET_IFNAME", "eth", "nccl Socket"),
    ):
        respected = f"{variable}={setting} in the environment is respected"
        assert transports(**{variable: setting}).describe(range(6), "world") == (used, respected)
    by_user = transports(GLOO_SOCKET_IFNAME="eth9")
    assert by_user.describe([0, 4], "messages") == (
        "gloo on eth9",
        "GLOO_SOCKET_IFNAME=eth9 in the environment is respected",
    )


def test_settings_of_the_user_are_respected() -> None:
    chosen = transports(backend="gloo", GLOO_SOCKET_IFNAME="eth9")
    assert chosen.interface([0, 2]) == chosen.host_interface() == "eth9"
    respected = ("gloo on eth9", "GLOO_SOCKET_IFNAME=eth9 in the environment is respected")
    assert chosen.describe([0, 2]) == respected == chosen.describe([0, 1])
    named = transports(NCCL_SOCKET_IFNAME="=eth0")
    assert named.describe([0, 4]) == (
        "nccl Socket",
        "NCCL_SOCKET_IFNAME==eth0 in the environment is respected; ethernet: crosses from infiniband in a to roce in b",
    )
    assert named.describe([0, 2]) == ("nccl IB on mlx5_0", "infiniband: 2 hosts share it (A)")
    socket = transports(NCCL_NET="Socket")
    assert socket.net_name([0, 2]) is None and socket.describe([0, 2])[0] == "nccl Socket"
    assert transports(NCCL_IB_DISABLE="1").net_name([0, 2]) == "Socket"
    assert transports(NCCL_IB_HCA="mlx5").nccl_environment([[0, 2]]) == {"NCCL_SOCKET_IFNAME": "=eth0"}


def test_settings_that_a_group_cannot_work_with_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"NCCL_NET=IB in the environment forces .* ranks 0, 4 .* none in common"
    ):
        transports(NCCL_NET="IB").net_name([0, 4])
    with pytest.raises(ConfigurationError, match=r"NCCL_NET=IB .* ranks 0, 1, 2, 3, 4, 5 has none in common"):
        transports(NCCL_NET="IB").check_world(range(6))
    with pytest.raises(
        ConfigurationError,
        match=r"NCCL_IB_HCA=\^mlx5_0 in the environment leaves out mlx5_0 of host a0, .* the group of ranks 0, 2 needs",
    ):
        transports(NCCL_IB_HCA="^mlx5_0").nccl_environment([[0, 2]])


@pytest.mark.parametrize(
    ("backend", "variable", "setting"),
    [
        ("gloo", "GLOO_SOCKET_IFNAME", "ib_mlx5_0"),
        ("gloo", "GLOO_SOCKET_IFNAME", "eth0,ib_mlx5_0"),  # gloo uses both
        ("nccl", "GLOO_SOCKET_IFNAME", "ib_mlx5_0"),
        ("nccl", "NCCL_SOCKET_IFNAME", "ib"),
        ("nccl", "NCCL_SOCKET_IFNAME", "=ib_mlx5_0,eth0"),
        ("nccl", "NCCL_SOCKET_IFNAME", "^docker"),  # ib_mlx5_0 remains usable
    ],
)
def test_an_interface_that_ends_at_the_clusters_border_is_refused(backend: str, variable: str, setting: str) -> None:
    with refusal(
        f"{variable}={setting} in the environment means ib_mlx5_0 on host a0",
        "the group of ranks 0, 1, 2, 3, 4, 5 cannot be connected: infiniband card mlx5_0, which ends there",
        "crosses from infiniband in a to roce in b",
        "such as eth0",
    ):
        transports(backend=backend, **{variable: setting}).check_world(range(6))


@pytest.mark.parametrize(
    ("backend", "variable", "setting"),
    [
        ("gloo", "GLOO_SOCKET_IFNAME", "eth0"),
        ("gloo", "GLOO_SOCKET_IFNAME", "tun7"),  # nothing is known about it
        ("gloo", "NCCL_SOCKET_IFNAME", "ib"),  # no group uses NCCL
        ("nccl", "NCCL_SOCKET_IFNAME", "eth"),
        ("nccl", "NCCL_SOCKET_IFNAME", "^ib,docker"),
        ("nccl", "NCCL_SOCKET_IFNAME", "=ib"),  # exact match, and no card has that name
    ],
)
def test_an_interface_that_reaches_all_hosts_is_respected(backend: str, variable: str, setting: str) -> None:
    transports(backend=backend, **{variable: setting}).check_world(range(6))


def test_a_fast_cards_interface_is_respected_where_it_reaches_all_hosts() -> None:
    shared = [nic("infiniband", "mlx5_0", fabric="A"), ETH]
    for clusters in ((cluster("a", [shared] * 2),), (cluster("a", [shared]), cluster("b", [shared]))):
        transports(Topology(clusters=clusters), backend="gloo", GLOO_SOCKET_IFNAME="ib_mlx5_0").check_world([0, 1])
    # a RoCE card through which the host reaches the master is an Ethernet card as well
    both = [nic("roce", "mlx5_1", fabric="B"), nic("ethernet", "rdma_mlx5_1")]
    apart = Topology(clusters=(cluster("a", [both]), cluster("b", [shared])))
    transports(apart, backend="gloo", GLOO_SOCKET_IFNAME="rdma_mlx5_1").check_world([0, 1])
    down = Topology(clusters=(cluster("a", [[nic("infiniband", "mlx5_0", fabric="A", up=False), ETH], shared]),))
    with pytest.raises(ConfigurationError, match=r"cannot be connected: mlx5_0 \(infiniband\) is down; mlx5_0 of a0"):
        transports(down, backend="gloo", GLOO_SOCKET_IFNAME="ib_mlx5_0").check_world([0, 1])


def test_an_interface_that_is_not_there_is_refused() -> None:
    def check(backend: str = "gloo", **user: str) -> None:
        UserSettings.read(user, files=()).check_interfaces(backend, host="b1", interfaces=["lo", "eth0", "eth1"])

    with pytest.raises(
        ConfigurationError,
        match=r"^GLOO_SOCKET_IFNAME=eth0,eth9 in the environment: host b1 .* is called 'eth9', and the group of all ranks .*"
        r"it has lo, eth0, eth1\. Correct the setting, or remove it",
    ):
        check(GLOO_SOCKET_IFNAME="eth0,eth9")
    for setting in ("=eth", "ib", "^lo,eth"):
        with pytest.raises(ConfigurationError, match=r"NCCL_SOCKET_IFNAME=.* host b1 .* that this matches"):
            check("nccl", NCCL_SOCKET_IFNAME=setting)
    check(GLOO_SOCKET_IFNAME="eth0,eth1")
    check("nccl", NCCL_SOCKET_IFNAME="ib,eth")
    check(NCCL_SOCKET_IFNAME="ib")  # no group uses NCCL


def test_settings_are_read_from_nccl_files_too_and_the_environment_wins(tmp_path: Path) -> None:
    path = tmp_path / "nccl.conf"
    path.write_text("# comment\nNCCL_NET = Socket\nNCCL_DEBUG=INFO\nNCCL_IB_HCA=mlx5_3\n")
    settings = UserSettings.read({"NCCL_IB_HCA": "mlx5_0"}, files=[str(tmp_path / "none"), str(path)])
    assert settings.describe("NCCL_NET") == f"NCCL_NET=Socket in {path}"
    assert settings.describe("NCCL_IB_HCA") == "NCCL_IB_HCA=mlx5_0 in the environment"
    assert settings.get("NCCL_DEBUG") is None
    assert settings.facts() == {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "off", "GLOO_SOCKET_IFNAME": "not set"}
    named = tmp_path / "named.conf"
    named.write_text("NCCL_NET=IB\n")
    settings = UserSettings.read({"NCCL_CONF_FILE": str(named)}, files=[str(path), str(tmp_path / "none")])
    assert settings.describe("NCCL_NET") == f"NCCL_NET=IB in {named}" and settings.get("NCCL_IB_HCA") is None


@pytest.mark.parametrize(
    ("setting", "card", "allowed"),
    [
        *(("mlx5", "mlx5_0", True), ("mlx5_1,mlx5_0", "mlx5_0", True), ("=mlx5", "mlx5_0", False)),
        *(("=mlx5_0:1", "mlx5_0", True), ("=mlx5_0:2", "mlx5_0", False), ("=mlx5_0:2", "mlx5_0:2", True)),
        *(("^mlx5_1", "mlx5_0", True), ("^=mlx5_0", "mlx5_0", False)),
    ],
)
def test_lists_of_cards_as_nccl_reads_them(setting: str, card: str, allowed: bool) -> None:
    assert hca_allows(setting, card) is allowed


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [("eth", True), ("=eth", False), ("=ib0,eth0", True), ("^ib", True), ("^eth", False), ("^=eth", True)],
)
def test_interfaces_as_nccl_reads_them(setting: str, allowed: bool) -> None:
    assert interface_allows(setting, "eth0") is allowed


def test_all_rails_of_a_host_are_offered_to_nccl() -> None:
    rails = [nic("roce", f"mlx5_{i}", fabric=f"subnet {i}") for i in range(4)]
    lonely = nic("roce", "mlx5_9", fabric="elsewhere")
    chosen = transports(Topology(clusters=(cluster("a", [[*rails, lonely, ETH], [*rails, ETH]], devices=4),)))
    assert chosen.nccl_environment([[0, 4]])["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1,mlx5_2,mlx5_3"
    assert chosen.describe([0, 4])[0] == "nccl IB on mlx5_0/mlx5_1/mlx5_2/..."
    listed = transports(
        Topology(clusters=(cluster("a", [[*rails, lonely, ETH], [*rails, ETH]], devices=4),)),
        NCCL_IB_HCA="=mlx5_1,mlx5_9",
    )
    used, reason = listed.describe([0, 4])
    assert used == "nccl IB on mlx5_1"
    assert reason.startswith("NCCL_IB_HCA==mlx5_1,mlx5_9 in the environment is respected; roce: 2 hosts share it")
    assert "NCCL_IB_HCA" not in listed.nccl_environment([[0, 4]])


def test_a_subnet_of_the_same_name_at_two_sites_is_not_taken_for_one() -> None:
    hosts = [[ETH, nic("ethernet", "eth1", fabric="192.168.1.0/24", gbit=10)]]
    apart = Topology(clusters=(cluster("a", hosts), cluster("b", hosts)))
    together = Topology(clusters=(cluster("a", hosts * 2),))
    assert transports(apart, backend="gloo").interface([0, 1]) == "eth0"
    assert transports(together, backend="gloo").interface([0, 1]) == "eth1"


def test_sockets_need_an_address_on_the_fast_card() -> None:
    topology = Topology(clusters=(cluster("a", [[Nic(name="mlx5_0", kind="infiniband"), ETH]] * 2),))
    chooser = TransportChooser(topology, sockets=True)
    choice = chooser.choose([0, 1])
    assert choice.kind == "ethernet" and "no IP address" in choice.reason and not choice.fallback
    assert TransportChooser(topology).choose([0, 1]).kind == "infiniband"


def test_an_unused_port_that_is_down_is_no_reason_and_no_warning() -> None:
    spare = nic("infiniband", "mlx5_9", up=False)
    hosts = [[nic("infiniband", "mlx5_0", fabric="A"), spare, ETH]], [[nic("roce", "mlx5_1", fabric="B"), spare, ETH]]
    chosen = transports(Topology(clusters=(cluster("a", hosts[0]), cluster("b", hosts[1]))))
    assert chosen.describe([0, 1])[1] == "ethernet: crosses from infiniband in a to roce in b"
    assert chosen.fallbacks([[0, 1]]) == []


def test_what_an_earlier_run_has_set_is_not_taken_for_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_IB_HCA", "HOLMES_SET_NCCL_IB_HCA"):
        monkeypatch.setenv(name, "to be restored")
    set_own({"NCCL_IB_HCA": "=mlx5_0"})
    assert UserSettings.read(files=()).get("NCCL_IB_HCA") is None
    monkeypatch.setenv("NCCL_IB_HCA", "=mlx5_7")
    assert UserSettings.read(files=()).get("NCCL_IB_HCA") == "=mlx5_7"


def test_what_nccl_does_not_reach_at_a_groups_first_use_is_named_with_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL connects then, and its own error names address and port."""
    said = "NCCL error: remote error\nLast error:\nsocketStartConnect: Connect to 10.0.0.1<45123> failed : timed out"

    def refuse(*args: Any, **options: Any) -> None:
        raise torch.distributed.DistBackendError(said)

    made = SimpleNamespace(group_desc="holmes_data_parallel_0")
    monkeypatch.setattr(torch.distributed, "new_group", lambda *args, **options: made)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 2])
    monkeypatch.setattr(torch.distributed, "all_reduce", refuse)
    monkeypatch.setattr(mesh, "nccl_options", lambda net_name: None)
    maker = mesh.GroupBuilder(rank=0, backend="nccl", device=torch.device("cpu"), timeout=None, transports=transports())
    with refusal(
        "the group holmes_data_parallel_0 (nccl IB on mlx5_0; ",
        "rank 0 on a0 (ib_mlx5_0 10.0.0.1), rank 2 on a1 (ib_mlx5_0 10.0.0.1)",
        "Connect to 10.0.0.1<45123> failed",
        "port_range",
        error=UnreachableError,
    ):
        maker.build([0, 2], "holmes_data_parallel_0")
