"""Run discovery on one host of the testbed; rank 0 writes the result as JSON. test_discovery runs it on every host."""

import os
from datetime import timedelta

import torch.distributed as dist

from lightning_holmes.cluster.inventory import discover_topology
from lightning_holmes.cluster.record import to_json


def main() -> None:
    rank, world_size = int(os.environ["NODE_RANK"]), int(os.environ["NUM_NODES"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout=timedelta(seconds=100))
    topology = discover_topology(store, rank, world_size)
    if rank == 0:
        print(f"found: {to_json(topology)}", flush=True)
    store.set(f"left/{rank}", "")
    if rank == 0:  # rank 0 keeps the store
        store.wait([f"left/{other}" for other in range(world_size)])


if __name__ == "__main__":
    main()
