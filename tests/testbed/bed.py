"""Testbed: the context manager that builds a testbed, runs commands on its hosts, changes it and takes it down.

    with Testbed(topology, TestbedOptions(cpu_share=0.45)) as bed:
        bed.set_down("node-0.mlx5_0")
        results = bed.run(["python", "train.py"], processes_per_host=1, shuffle=True, timeout_s=60)
        assert all(result.exit_code == 0 for result in results.values())

Testbeds with different ids do not interfere: several may be up at the same time. A testbed whose process ended without
taking it down is removed when the next testbed is built.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from testbed import made_up_sysfs, netlink, state
from testbed.cgroup import CpuGroup, find_cpu_hierarchy
from testbed.errors import TestbedError, TestbedUnavailable
from testbed.layout import PREFIX, HostLayout, Layout, TestbedOptions, make_layout, namespace_prefix
from testbed.processes import HostCommand, HostResult, run_commands

_GRACE_S = 30.0
_FIRST_PORT, _PORTS = 29500, 1000
_TAIL_CHARACTERS = 2000
# variables that tell a process its rank: the testbed's processes must not inherit them
_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "NUM_NODES"),
    *("MASTER_ADDR", "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class NicBytes:
    """Bytes that a NIC has received and sent since the testbed was built, including Ethernet, IP and TCP headers."""

    received: int
    sent: int


class Testbed:
    """The hosts of a topology on this machine.

    Args:
        topology: its clusters, hosts and NICs; a host without an Ethernet NIC gets one, called eth0.
        options: options that are not part of a topology: CPU shares, rates, the prefix of names.
        bed_id: the testbed's unique id; by default made from the process id.

    Raises:
        TestbedUnavailable: from build: this machine lacks a capability, which the message names.
    """

    __test__: ClassVar[bool] = False

    def __init__(self, topology: Topology, options: TestbedOptions | None = None, *, bed_id: str | None = None) -> None:
        self.topology = topology
        self.options = options or TestbedOptions()
        self.bed_id = bed_id or f"p{os.getpid()}n{next(_numbers)}"
        self.layout: Layout = make_layout(topology, self.options, bed_id=self.bed_id)
        self._runs = itertools.count()
        self._pid = os.getpid()
        self._signals: dict[int, Any] = {}

    # up and down

    def __enter__(self) -> Testbed:
        self.build()
        atexit.register(self._close_own)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                before = signal.getsignal(number)
                # another testbed's handler closes that testbed, and sends the signal again
                if before == signal.SIG_DFL or getattr(before, "__func__", None) is Testbed._end_by_signal:
                    self._signals[number] = signal.signal(number, self._end_by_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore_signals()
        atexit.unregister(self._close_own)
        self.close()

    def build(self) -> None:
        """Build the testbed. First remove all testbeds whose process has ended."""
        if sys.platform != "linux":
            raise TestbedUnavailable(f"no testbed here: it needs Linux, this is {sys.platform}")
        if os.geteuid() != 0:
            raise TestbedUnavailable("no testbed here: only root may make network namespaces; run as root")
        hierarchy = find_cpu_hierarchy()
        for bed_id in state.abandoned():
            remove_remains(bed_id)
        state.make_folder(self.bed_id)
        try:
            for host in self.layout.hosts:
                CpuGroup(hierarchy, self._group_name(host)).create(host.cpu_share)
                made_up_sysfs.write_devices(self.sysfs_root(host.name), host)
            if self.options.precedence:
                CpuGroup(hierarchy, f"{PREFIX}{self.bed_id}").precede()
            self._hosts_file.write_text(
                "127.0.0.1 localhost\n"
                + "".join(f"{host.ethernet.address} {host.name}\n" for host in self.layout.hosts)
            )
            netlink.build_network(self.layout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take the testbed down: its processes, namespaces, cgroups and files."""
        remove_remains(self.bed_id)

    def _close_own(self) -> None:
        """Close the testbed at process exit. Forked children inherit this exit function, and must not close it."""
        if os.getpid() == self._pid:
            self.close()

    def _end_by_signal(self, number: int, frame: FrameType | None) -> None:
        self._restore_signals()
        self._close_own()
        os.kill(os.getpid(), number)

    def _restore_signals(self) -> None:
        for number, handler in self._signals.items():
            signal.signal(number, handler)
        self._signals = {}

    # commands

    def run(
        self,
        argv: Sequence[str],
        *,
        processes_per_host: int | None = None,
        shuffle: bool = False,
        node_order: Sequence[str] | None = None,
        hosts: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        host_env: Callable[[str], Mapping[str, str]] | None = None,
        folder: Path | None = None,
        timeout_s: float = 600.0,
        grace_s: float | None = _GRACE_S,
        echo: Callable[[str, str], None] | None = None,
        check: bool = False,
    ) -> dict[str, HostResult]:
        """Run a command on every host at the same time; return the results by host.

        Each process has HOLMES_HOST_NAME, HOLMES_SYSFS_ROOT, NODE_RANK, NUM_NODES, MASTER_ADDR (the Ethernet address
        of the host with node rank 0) and MASTER_PORT in its environment. No process is left running.

        Args:
            argv: the command. It is found by PATH.
            processes_per_host: start it by torchrun with this many processes on each host; argv are then the arguments
                after torchrun's own options: a script, or "-m" and a module. PYTHON_EXEC in the environment names the
                interpreter of both.
            shuffle: number the nodes in a random order that is not the topology's.
            node_order: number the nodes in this order, given as host names.
            hosts: run only on these hosts.
            env: further environment variables for all hosts.
            host_env: returns further environment variables for the host of the given name.
            folder: the working directory.
            timeout_s: everything is ended after this time.
            grace_s: how long the other hosts may go on after one host's command has failed; None: to the end.
            echo: called with host and line for each line of output.
            check: raise TestbedError, with the end of each output, if the command failed on a host.
        """
        nodes = self._number_nodes(shuffle, node_order, hosts)
        port = _FIRST_PORT + (os.getpid() + next(self._runs)) % _PORTS
        hierarchy = find_cpu_hierarchy()
        run_name = f"run{os.getpid()}n{next(_numbers)}"
        commands = []
        for rank, host in enumerate(nodes):
            own = {
                "HOLMES_HOST_NAME": host.name,
                "HOLMES_SYSFS_ROOT": str(self.sysfs_root(host.name)),
                "NODE_RANK": str(rank),
                "NUM_NODES": str(len(nodes)),
                "MASTER_ADDR": nodes[0].ethernet.address,
                "MASTER_PORT": str(port),
            }
            inherited = {key: value for key, value in os.environ.items() if key not in _RANK_VARIABLES}
            environment = {
                "OMP_NUM_THREADS": "1",  # several hosts share the cores
                **inherited,
                **own,
                **(env or {}),
                **(host_env(host.name) if host_env is not None else {}),
            }
            arguments = list(argv)
            if processes_per_host is not None:
                python = environment.get("PYTHON_EXEC", sys.executable)  # as torchrun, which starts scripts by it
                arguments = [
                    *(python, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}", f"--node-rank={rank}"),
                    *(f"--nproc-per-node={processes_per_host}", f"--master-addr={nodes[0].ethernet.address}"),
                    *(f"--master-port={port}", f"--local-addr={host.ethernet.address}", *arguments),
                ]
            commands.append(
                HostCommand(
                    host=host.name,
                    argv=arguments,
                    environment=environment,
                    namespace=netlink.namespace_path(host.namespace),
                    hosts_file=self._hosts_file,
                    group=CpuGroup(hierarchy, f"{self._group_name(host)}/{run_name}"),
                    folder=folder,
                )
            )
        results = run_commands(commands, timeout_s=timeout_s, grace_s=grace_s, echo=echo)
        if check:
            raise_if_failed(results, timeout_s)
        return results

    def torchrun(
        self, args: Sequence[str], *, nproc_per_node: int | None = None, shuffle_nodes: bool = False, **options: Any
    ) -> dict[str, HostResult]:
        """Run torchrun on every host with `args` after its own options; `options` are those of :meth:`run`.

        nproc_per_node defaults to the number of devices of the first host.
        """
        nproc_per_node = nproc_per_node or self.layout.hosts[0].devices
        return self.run(args, processes_per_host=nproc_per_node, shuffle=shuffle_nodes, **options)

    def _number_nodes(
        self, shuffle: bool, order: Sequence[str] | None, hosts: Sequence[str] | None
    ) -> list[HostLayout]:
        """The hosts that take part, in the order of their node ranks."""
        chosen = list(order or hosts or self.hosts)
        if shuffle and len(chosen) > 1:
            first = list(chosen)
            while chosen == first:
                random.SystemRandom().shuffle(chosen)
        return [self.layout.host(name) for name in chosen]

    # what there is, and changing it

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts' names, in the topology's order."""
        return tuple(host.name for host in self.layout.hosts)

    def sysfs_root(self, host: str) -> Path:
        """The emulated sysfs tree that HOLMES_SYSFS_ROOT names on this host."""
        folder = self.layout.host(host).folder
        return state.bed_folder(self.bed_id) / "sysfs" / folder

    def ethernet_interface(self, host: str) -> str:
        """The name of a host's first Ethernet interface."""
        return self.layout.host(host).ethernet.interface

    def counters(self) -> dict[str, dict[str, NicBytes]]:
        """The kernel's byte counts per host and NIC."""
        found: dict[str, dict[str, NicBytes]] = {}
        for host in self.layout.hosts:
            carried = netlink.carried_bytes(host.namespace)
            for nic in host.nics:
                received, sent = carried[nic.interface]
                found.setdefault(host.name, {})[nic.name] = NicBytes(received=received, sent=sent)
        return found

    def set_down(self, name: str) -> None:
        """Switch the NIC "host.nic" off."""
        self._switch(name, up=False)

    def set_up(self, name: str) -> None:
        """Switch the NIC "host.nic" on again."""
        self._switch(name, up=True)

    def kill(self, host: str) -> None:
        """Kill every process on a host, as when it loses power."""
        CpuGroup(find_cpu_hierarchy(), self._group_name(self.layout.host(host))).kill()

    def _switch(self, name: str, *, up: bool) -> None:
        host, nic = self.layout.nic(name)
        netlink.set_up(host.namespace, nic.interface, up)
        if nic.kind != "ethernet":
            root = self.sysfs_root(host.name)
            made_up_sysfs.write_port(root, nic, up=up, bandwidth_bytes_per_s=nic.bandwidth_bytes_per_s)

    @property
    def _hosts_file(self) -> Path:
        return state.bed_folder(self.bed_id) / "hosts"

    def _group_name(self, host: HostLayout) -> str:
        return f"{PREFIX}{self.bed_id}/{host.folder}"


def raise_if_failed(results: Mapping[str, HostResult], timeout_s: float) -> None:
    """Raise TestbedError, with the end of each output, if a command failed on a host."""
    if all(result.exit_code == 0 for result in results.values()):
        return
    tails = []
    for host, result in results.items():
        ended = f"exit {result.exit_code}" if result.exit_code is not None else "ended after another one's failure"
        if result.timed_out:
            ended = f"ended after {timeout_s:g} s"
        tails.append(f"--- {host}: {ended}\n{result.output[-_TAIL_CHARACTERS:]}")
    raise TestbedError("the command failed on the testbed\n" + "\n".join(tails))


def remove_remains(bed_id: str) -> None:
    """Remove everything with the names of this testbed, even if another process built it."""
    group = CpuGroup(find_cpu_hierarchy(), f"{PREFIX}{bed_id}")
    group.kill()
    netlink.remove_namespaces(namespace_prefix(bed_id))
    group.remove()
    state.remove_folder(bed_id)


@functools.cache
def find_problem() -> str | None:
    """Why this machine cannot run a testbed; None if it can. Tries one with two hosts, which takes a quarter of a second. Cached."""
    text = """
        clusters: [{name: a, hosts: [{name: a, devices: 1, nics: [{name: m, kind: roce, bandwidth: 1 Gbit/s}]}]},
                   {name: b, hosts: [{name: b, devices: 1}]}]
        links: [{ends: [a, b], transport: ethernet, bandwidth: 1 Gbit/s, latency: 0}]
    """
    try:
        with Testbed(Topology.from_yaml_text(text), TestbedOptions(cpu_share=0.5)) as bed:
            bed.run(["true"], timeout_s=30, check=True)
    except (TestbedError, ConfigurationError) as error:
        return str(error)
    return None
