"""One host's part in a discovery on the testbed, and what rank 0 found as JSON. Run on every host by test_discovery."""

import os
from datetime import timedelta

import torch.distributed as dist

from lightning_holmes.cluster.inventory import ProbeOptions, discover_topology


def main() -> None:
    rank, world_size = int(os.environ["NODE_RANK"]), int(os.environ["NUM_NODES"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout=timedelta(seconds=100))
    topology = discover_topology(store, rank, world_size, options=ProbeOptions(refresh=True))
    if rank == 0:
        print(f"found: {topology.to_json()}", flush=True)
    store.set(f"left/{rank}", "")
    if rank == 0:  # the store is here
        store.wait([f"left/{other}" for other in range(world_size)])


if __name__ == "__main__":
    main()
