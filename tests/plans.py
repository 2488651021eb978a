"""Plans and topologies of which a test names only what it is about.

plan = plan_of((0, 1), (2, 3), stages=(5, 4), schedule="gpipe")
"""

from typing import Any

from lightning_holmes.cluster.topology import Cluster, Host, Topology
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.plan import Plan


def plan_of(*grid: tuple[int, ...], stages: tuple[int, ...], **changes: Any) -> Plan:
    """Return the plan of these pipeline ranks, each a row of replicas, and of stages of so many layers; ``changes``: other fields."""
    defaults: dict[str, Any] = {
        "pipeline_parallel_size": len(grid),
        "data_parallel_size": len(grid[0]),
        "num_microbatches": 4,
        "eval_num_microbatches": 1,
        "schedule": "1f1b",
        "num_chunks": len(stages) // len(grid),
        "layers": "layers",
        "partition": Partition(stages),
        "placement": Placement(grid),
        "clusters": ("east", "west")[: len(grid)],
    }
    return Plan(**defaults | changes)


def topology_of(**sizes: int) -> Topology:
    """Return clusters of one host each with so many devices."""
    return Topology(
        clusters=tuple(
            Cluster(name=name, hosts=(Host(name=f"host-{name}", devices=size),)) for name, size in sizes.items()
        ),
        source="here.yaml",
    )
