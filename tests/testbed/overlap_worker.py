"""Runs on both hosts of a testbed: one sends, the other receives, and both compute meanwhile; prints the rates and
the time spent waiting.

python overlap_worker.py NUM_BYTES SECONDS
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_holmes.comm.mesh import GroupBuilder
from lightning_holmes.comm.p2p import DistributedP2P, TensorSpec

LEFT, RIGHT = torch.randn(256, 1024), torch.randn(1024, 1024)


def compute(seconds: float) -> int:
    """Compute matrix products for this long and return their number."""
    start, number = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        torch.mm(LEFT, RIGHT)
        number += 1
    return number


def main(num_bytes: int, seconds: float) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["NODE_RANK"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    cpu = torch.device("cpu")
    builder = GroupBuilder(rank=rank, backend="gloo", device=cpu, timeout=timedelta(seconds=60))
    there, back = builder.build_p2p(0, 1, "there"), builder.build_p2p(1, 0, "back")
    messages = builder.build((0, 1), "messages", on_host=True)
    assert there is not None and back is not None and messages is not None
    outgoing, incoming = ({1: there}, {1: back}) if rank == 0 else ({0: back}, {0: there})
    p2p = DistributedP2P((0, 1), rank, outgoing=outgoing, incoming=incoming, messages=messages, device=cpu)
    spec = TensorSpec((num_bytes // 4,), torch.float32, False)
    found: dict[str, float] = {}
    compute(0.3)
    found["alone"] = compute(seconds) / seconds
    for ahead in (True, False):  # whether the receive is posted before or after the computation
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            p2p.send(1, [torch.ones(spec.shape)])
        elif ahead:
            pending = p2p.receive(0, [spec])
        name = "ahead" if ahead else "after"
        found[f"{name}_started"] = time.perf_counter() - start
        found[f"{name}_rate"] = compute(seconds) / seconds
        start = time.perf_counter()
        if rank == 0:
            p2p.finish()
        else:
            pending = pending if ahead else p2p.receive(0, [spec])
            assert bool(pending.wait()[0].eq(1).all())
        found[f"{name}_waited"] = time.perf_counter() - start
    dist.barrier()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
