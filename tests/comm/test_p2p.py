"""P2P between ranks: order, large and small messages, and transfers that no rank waits for."""

from typing import Any

import pytest
import torch
from launch import launch

from lightning_holmes.comm.mesh import p2p_pairs
from lightning_holmes.comm.p2p import TensorSpec


def exchange(_: Any) -> list[Any]:
    """Runs in two processes: tensors and messages in order, in both directions at once, and rounded between clusters."""
    import os
    from datetime import timedelta

    import torch.distributed as dist

    from lightning_holmes.comm.mesh import GroupBuilder, build_process_groups
    from lightning_holmes.plan.placement import Placement

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    builder = GroupBuilder(rank=rank, backend="gloo", device=torch.device("cpu"), timeout=timedelta(seconds=60))
    placement, pairs = Placement(((0,), (1,))), p2p_pairs(2, 2)
    groups = build_process_groups(placement, builder, pairs=pairs)
    p2p, other = groups.p2p, 1 - rank
    assert p2p is not None and groups.data_parallel is None
    spec = TensorSpec((3,), torch.float32, False)
    receives = [p2p.prepare(other, [spec, spec]) for _ in range(3)]
    for receive in receives:
        receive.post()
    for number in range(3):
        p2p.send(other, [torch.full((3,), 10.0 * rank + number), torch.full((3,), -1.0)])
    p2p.expect_message(other, 5)  # posted early, with the first part of a long message
    p2p.send_message(other, 4, {"rank": rank})
    p2p.send_message(other, 5, "x" * 100_000)
    p2p.send_message(other, 4, [rank] * 3)
    found: list[Any] = [[t.tolist() for t in r.wait()] for r in receives]
    narrow = build_process_groups(placement, builder, pairs=pairs, clusters=["a", "b"], sent_dtype=torch.bfloat16).p2p
    specs = [spec, TensorSpec((3,), torch.int64, False)]
    pending = narrow.prepare(other, specs)
    pending.post()
    narrow.send(other, [torch.full((3,), 1 / 3), torch.full((3,), 2**40 + rank)])
    rounded, whole = pending.wait()
    assert rounded.dtype == torch.float32 and whole.tolist() == [2**40 + other] * 3
    assert rounded.tolist() == torch.full((3,), 1 / 3).bfloat16().float().tolist()
    narrow.finish()
    found += [len(p2p.receive_message(other, 5)), p2p.receive_message(other, 4), p2p.receive_message(other, 4)]
    p2p.finish()
    late = p2p.post_message(other, 7, "y" * 100_000)
    p2p.finish()  # although no receive was posted for that message yet
    assert p2p.anybody(rank == 1, "ranks agree") and not p2p.anybody(False, "ranks agree")
    assert p2p.receive_message(other, 7) == "y" * 100_000
    late()
    dist.barrier()
    return found


@pytest.mark.xdist_group("p2p")
def test_two_ranks_exchange_tensors_and_messages_in_order() -> None:
    for rank, found in enumerate(launch(2, "test_p2p:exchange", timeout_s=90)):
        other = 1 - rank
        assert [f[0][0] for f in found[:3]] == [10.0 * other + n for n in range(3)]
        assert found[3:] == [100_000, {"rank": other}, [other] * 3]
