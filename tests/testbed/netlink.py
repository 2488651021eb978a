"""The network of a testbed: namespaces, bridges, veth pairs and rates, made through netlink (pyroute2).

It creates, changes, reads and removes them; layout.py decides which there are. The machine's own network namespace is not
changed: bridges are in the switch's namespace, and are removed with it.

    build_network(layout)
    remove_namespaces("holmes-demo-")
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lightning_holmes.errors import needs_extra
from testbed.errors import TestbedUnavailable
from testbed.layout import MAX_SHAPED_BYTES_PER_S, HostLayout, Layout, Trunk

NAMESPACES = Path("/run/netns")  # the folder in which `ip` keeps named namespaces
_CLONE_NEWNET, _MS_BIND, _MNT_DETACH = 0x40000000, 4096, 2
_LOOPBACK = 1
_BURST_S = 0.004  # seconds of traffic that may be sent at line rate after a pause
_MIN_BURST_BYTES = 80_000  # a segment of 64 KiB must fit, or the kernel splits it
_QUEUE_S = 0.05
_MIN_QUEUE_BYTES = 500_000
_ROOT_HANDLE = 0x10000
_T = TypeVar("_T")


def _pyroute2() -> Any:
    with needs_extra("the testbed, which speaks to the kernel,", "testbed"):
        import pyroute2
    return pyroute2


@contextlib.contextmanager
def _needs(capability: str) -> Iterator[None]:
    """Turn the kernel's errors into TestbedUnavailable, which names the missing capability."""
    netlink_error = _pyroute2().NetlinkError
    try:
        yield
    except (netlink_error, OSError) as error:
        code = error.code if isinstance(error, netlink_error) else error.errno
        if code in (errno.EPERM, errno.EACCES):
            why = "it may not be done without root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
        elif code in (errno.EOPNOTSUPP, errno.ENOENT, errno.ENODEV, errno.ENOSYS, errno.EINVAL):
            why = "this kernel does not have it"
        else:
            why = "the kernel refused it"
        raise TestbedUnavailable(f"no testbed here: it needs {capability}, and {why} ({error})") from error


def _inside(namespace: str, action: Callable[[Any], _T]) -> _T:
    """Call `action` with a netlink socket in a namespace, and return its result.

    It runs in a new thread, since setns applies to the calling thread only. (pyroute2 would fork to open the socket, and the
    child would inherit this process's locks, signal handlers and exit functions.)
    """

    def work(libc: ctypes.CDLL) -> _T:
        with open(NAMESPACES / namespace) as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"entering {namespace}")
        with _pyroute2().IPRoute() as netlink:
            return action(netlink)

    return _in_thread(work)


def _in_thread(work: Callable[[ctypes.CDLL], _T]) -> _T:
    """Call `work` in a new thread, and return its result or raise its error."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(work, ctypes.CDLL(None, use_errno=True)).result()


def _index(netlink: Any, interface: str) -> int:
    return int(netlink.link_lookup(ifname=interface)[0])


def namespace_path(namespace: str) -> str:
    """The file of a named namespace."""
    return str(NAMESPACES / namespace)


def build_network(layout: Layout) -> None:
    """Create the network of a layout. Raises TestbedUnavailable, which names the missing capability."""
    with _needs("network namespaces"):
        for namespace in (layout.switch, *(host.namespace for host in layout.hosts)):
            _create_namespace(namespace)
            _inside(namespace, _switch_off_ipv6)
    _inside(layout.switch, lambda netlink: _build_switch(netlink, layout))
    for host in layout.hosts:
        _inside(host.namespace, functools.partial(_build_host, host=host))


def _build_switch(netlink: Any, layout: Layout) -> None:
    """Create all bridges and trunks, and the veth pairs, whose other ends are in the hosts' namespaces."""
    with _needs("bridges (CONFIG_BRIDGE)"):
        for bridge in layout.bridges:
            netlink.link("add", ifname=bridge, kind="bridge", br_mcast_snooping=0)
            netlink.link("set", index=_index(netlink, bridge), state="up")
    for trunk in layout.trunks:
        _build_trunk(netlink, trunk)
    for host, nic in layout.nics():
        with _needs("pairs of virtual Ethernet devices (CONFIG_VETH)"):
            peer = {"ifname": nic.interface, "net_ns_fd": namespace_path(host.namespace)}
            netlink.link("add", ifname=nic.port, kind="veth", peer=peer)
        port = _index(netlink, nic.port)
        netlink.link("set", index=port, master=_index(netlink, nic.bridge), state="up")
        _shape(netlink, port, nic.bandwidth_bytes_per_s)


def _build_host(netlink: Any, host: HostLayout) -> None:
    netlink.link("set", index=_LOOPBACK, state="up")
    for nic in host.nics:
        index = _index(netlink, nic.interface)
        netlink.addr("add", index=index, address=nic.address, prefixlen=16)
        netlink.link("set", index=index, state="up")
        _shape(netlink, index, nic.bandwidth_bytes_per_s)


def _build_trunk(switch: Any, trunk: Trunk) -> None:
    with _needs("pairs of virtual Ethernet devices (CONFIG_VETH)"):
        switch.link("add", ifname=trunk.inner, kind="veth", peer={"ifname": trunk.outer})
    for name, bridge in ((trunk.inner, trunk.bridge), (trunk.outer, trunk.outer_bridge)):
        switch.link("set", index=_index(switch, name), master=_index(switch, bridge), state="up")
    if not trunk.caps:
        return
    index = _index(switch, trunk.inner)
    with _needs("the htb queueing discipline and the u32 filter (CONFIG_NET_SCH_HTB, CONFIG_NET_CLS_U32)"):
        # traffic that matches no filter is not limited: clusters without a Link, and ARP
        switch.tc("add", "htb", index=index, handle=_ROOT_HANDLE, default=0)
        for number, cap in enumerate(trunk.caps, start=1):
            target, most = _ROOT_HANDLE + number, int(MAX_SHAPED_BYTES_PER_S)
            switch.tc("add-class", "htb", index=index, handle=target, parent=_ROOT_HANDLE, rate=most, ceil=most)
            keys = [cap.destination_key]
            switch.tc(
                "add-filter", "u32", index=index, parent=_ROOT_HANDLE, prio=1, protocol=0x0800, target=target, keys=keys
            )
            _shape(switch, index, cap.bandwidth_bytes_per_s, parent=target)


def _shape(netlink: Any, index: int, bandwidth_bytes_per_s: float | None, parent: int | None = None) -> None:
    """Limit the rate at which an interface sends, unless it is more than tc can count."""
    if bandwidth_bytes_per_s is None or bandwidth_bytes_per_s > MAX_SHAPED_BYTES_PER_S:
        return
    burst = max(_MIN_BURST_BYTES, int(bandwidth_bytes_per_s * _BURST_S))
    queue = max(_MIN_QUEUE_BYTES, int(bandwidth_bytes_per_s * _QUEUE_S))
    place = {} if parent is None else {"parent": parent}
    with _needs("the tbf queueing discipline (CONFIG_NET_SCH_TBF)"):
        netlink.tc(
            "replace", "tbf", index=index, rate=int(bandwidth_bytes_per_s), burst=burst, limit=burst + queue, **place
        )


def set_up(namespace: str, interface: str, up: bool) -> None:
    """Switch an interface on or off."""
    state = "up" if up else "down"
    _inside(namespace, lambda netlink: netlink.link("set", index=_index(netlink, interface), state=state))


def carried_bytes(namespace: str) -> dict[str, tuple[int, int]]:
    """The bytes that each interface of a namespace has received and sent since it was created, by name."""

    def read(netlink: Any) -> dict[str, tuple[int, int]]:
        counted = ((link.get_attr("IFLA_IFNAME"), link.get_attr("IFLA_STATS64")) for link in netlink.get_links())
        return {name: (stats["rx_bytes"], stats["tx_bytes"]) for name, stats in counted}

    return _inside(namespace, read)


def remove_namespaces(prefix: str) -> list[str]:
    """Remove the namespaces whose names begin with `prefix`, with all interfaces inside; return their names."""
    if not NAMESPACES.is_dir():
        return []
    names = sorted(path.name for path in NAMESPACES.iterdir() if path.name.startswith(prefix))
    libc = ctypes.CDLL(None, use_errno=True)
    for name in names:
        libc.umount2(namespace_path(name).encode(), _MNT_DETACH)
        (NAMESPACES / name).unlink(missing_ok=True)
    return names


def _create_namespace(name: str) -> None:
    """Create a named network namespace like `ip netns add`: a file onto which the namespace is mounted."""

    def work(libc: ctypes.CDLL) -> None:
        if libc.unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "a new network namespace")
        if libc.mount(b"/proc/thread-self/ns/net", namespace_path(name).encode(), b"none", _MS_BIND, None) != 0:
            raise OSError(ctypes.get_errno(), f"mounting {namespace_path(name)}")

    NAMESPACES.mkdir(parents=True, exist_ok=True)
    (NAMESPACES / name).touch(exist_ok=False)
    _in_thread(work)


def _switch_off_ipv6(_: Any) -> None:
    """Disable IPv6, so that the counters count the traffic of programs only, and no router solicitations."""
    for scope in ("all", "default"):
        path = Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6")
        if path.exists():
            path.write_text("1")
