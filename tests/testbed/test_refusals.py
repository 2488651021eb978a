"""Why no testbed can be built here: the error names each missing capability, and the machine is left as it is."""

import errno
import os
import sys
import types
from typing import Any

import pytest

from lightning_holmes.cluster.topology import Topology
from testbed import Testbed, netlink
from testbed import bed as bed_module
from testbed.errors import TestbedUnavailable

TOPOLOGY = Topology.single_cluster(1, 1)


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(TestbedUnavailable, match="only root may do; run as root"):
        Testbed(TOPOLOGY).build()


def test_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TestbedUnavailable, match="needs Linux, this is darwin"):
        Testbed(TOPOLOGY).build()


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("bridge", "bridges (CONFIG_BRIDGE)"),
        ("veth", "virtual Ethernet devices (CONFIG_VETH)"),
        ("tbf", "tbf queueing discipline (CONFIG_NET_SCH_TBF)"),
        ("htb", "htb queueing discipline and the u32 filter"),
    ],
)
@pytest.mark.usefixtures("testbed_works")
def test_a_kernel_that_lacks_something(monkeypatch: pytest.MonkeyPatch, kind: str, capability: str) -> None:
    import pyroute2

    class Refusing:
        """A netlink socket whose kernel does not know `kind`."""

        def __init__(self) -> None:
            self.netlink = pyroute2.IPRoute()

        def __enter__(self) -> "Refusing":
            return self

        def __exit__(self, *_: Any) -> None:
            self.netlink.close()

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                if kind in (*args, options.get("kind")):
                    raise pyroute2.NetlinkError(errno.EOPNOTSUPP, "Operation not supported")
                return getattr(self.netlink, name)(*args, **options)

            return call

    fake = types.SimpleNamespace(NetlinkError=pyroute2.NetlinkError, IPRoute=Refusing)
    monkeypatch.setattr(netlink, "_pyroute2", lambda: fake)
    bed_module.find_problem.cache_clear()
    problem = bed_module.find_problem()
    bed_module.find_problem.cache_clear()
    assert problem is not None and capability in problem and "this kernel does not have it" in problem
    assert not list(netlink.NAMESPACES.glob(f"holmes-p{os.getpid()}n*")), "nothing is left of the attempt"


@pytest.mark.usefixtures("testbed_works")
def test_namespaces_that_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(work: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(netlink, "_in_thread", forbidden)
    with pytest.raises(TestbedUnavailable, match=r"network namespaces, and it may not be done without root \(CAP_NET"):
        Testbed(TOPOLOGY, bed_id=f"forbidden_{os.getpid()}").build()
    monkeypatch.undo()
    assert not list(netlink.NAMESPACES.glob(f"holmes-forbidden_{os.getpid()}*"))
