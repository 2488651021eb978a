"""A testbed: the hosts of a topology on one Linux machine, as network namespaces with shaped network cards.

    with Testbed(Topology.from_yaml("two_clusters.yaml"), TestbedOptions(cpu_share=0.45)) as bed:
        results = bed.torchrun(["train.py"], shuffle_nodes=True, timeout_s=120)
        print(bed.counters()["node-0"]["eth0"].sent)

layout.py decides every name, address and rate; netlink.py, cgroup.py and made_up_sysfs.py create the network, the cgroups
and the sysfs files; processes.py runs commands on the hosts; state.py has a testbed's folder, by which the next testbed
removes one whose process was killed; bed.py is the Testbed itself. enter.py is run as a script, by the path of its file. Needs root and pyroute2.
"""

from testbed.bed import NicBytes, Testbed, find_problem
from testbed.errors import TestbedError, TestbedUnavailable
from testbed.layout import TestbedOptions
from testbed.processes import HostResult

__all__ = ["HostResult", "NicBytes", "Testbed", "TestbedError", "TestbedOptions", "TestbedUnavailable", "find_problem"]
