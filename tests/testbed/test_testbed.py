"""A real testbed: namespaces, rates, CPU shares, commands, and a check that nothing is left behind."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest

from lightning_holmes.cluster.topology import Topology
from testbed import Testbed, netlink
from testbed.cgroup import CpuGroup, find_cpu_hierarchy
from testbed.state import bed_folder

pytestmark = [pytest.mark.usefixtures("testbed_works"), pytest.mark.xdist_group("testbed"), pytest.mark.timeout(900)]

TEXT = """
clusters:
  - {name: a, hosts: [{name: a, count: 2, devices: 1, nics: [{name: ib0, kind: infiniband, bandwidth: 200 Mbit/s}]}]}
  - {name: b, hosts: [{name: b, count: 2, devices: 1, nics: [{name: mlx, kind: roce, bandwidth: 200 Mbit/s}]}]}
links: [{ends: [a, b], transport: ethernet, bandwidth: 40 Mbit/s, latency: 0}]
"""


def remains(bed_id: str) -> list[str]:
    """Return everything that has a testbed's name: namespaces, the cgroup and the folder."""
    names = [path.name for path in netlink.NAMESPACES.glob(f"holmes-{bed_id}-*")]
    folders = [CpuGroup(find_cpu_hierarchy(), f"holmes-{bed_id}").path, bed_folder(bed_id)]
    return names + [str(path) for path in folders if path.exists()]


def hold(pipe: Connection, bed_id: str) -> None:
    """In a separate process: build a testbed, start a command on it and wait to be killed."""
    with Testbed(Topology.from_yaml_text(TEXT), bed_id=bed_id) as built:
        pipe.send(len(remains(bed_id)))
        built.run(["sleep", "60"], timeout_s=60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_testbed_whose_process_was_killed(number: signal.Signals) -> None:
    bed_id = f"killed{int(number)}_{os.getpid()}"
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(theirs, bed_id))
    process.start()
    try:
        assert ours.poll(20) and ours.recv() == 7  # the switch, four hosts, a cgroup, a folder
        group = CpuGroup(find_cpu_hierarchy(), f"holmes-{bed_id}")
        deadline = time.monotonic() + 20
        while len(group.pids()) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(group.pids()) == 4
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(20)
        assert process.exitcode == -number
    finally:
        process.kill()
    if number == signal.SIGKILL:
        assert len(remains(bed_id)) == 7
        with Testbed(Topology.from_yaml_text(TEXT)):  # the next testbed, with any name, removes those without an owner
            assert remains(bed_id) == []
    assert remains(bed_id) == []
