"""Communication on groups that are moved meanwhile, as after a card goes down; all cards are the loopback here."""

import faulthandler
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.cluster.topology import Nic
from lightning_holmes.comm import failure
from lightning_holmes.comm.cards import CardWatch
from lightning_holmes.comm.collectives import AllReduce, Collective, PointToPoint, ReduceScatter
from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.comm.group_transports import GroupTransports
from lightning_holmes.comm.mesh import GroupBuilder, release
from lightning_holmes.comm.moves import Moves
from lightning_holmes.comm.queue import CommQueue, make_comm_queue
from lightning_holmes.plan.transport import TransportChoice
from lightning_holmes.torch_private import default_store

SIZE, STEPS = 3, 40


class Loopback(GroupTransports):
    """Transports in which all groups are movable and each choice is another card. ``cut``: the number of the choice
    with which nothing can be connected."""

    def __init__(self, rank: int, cut: int) -> None:
        super().__init__(None, rank=rank, backend="gloo")
        self.choices, self.cut = 0, cut

    def choose(self, ranks: Sequence[int]) -> TransportChoice:
        card = Nic(name=f"card{self.choices}", kind="roce", interface=f"card{self.choices}")
        return TransportChoice(kind="roce", nics=dict.fromkeys(ranks, card), reason="test")

    def choose_anew(self, down: Iterable[tuple[str, str]] | None) -> None:
        assert down is None or list(down) == []
        self.choices += 1

    def is_movable(self, ranks: Sequence[int]) -> bool:
        return True

    def interface(self, ranks: Sequence[int]) -> str:
        return "not there" if self.choices == self.cut and 1 in ranks else "lo"

    def describe(self, ranks: Sequence[int], use: Any = "tensors") -> tuple[str, str]:
        return f"card{self.choices}", "test"


class Flapping(CardWatch):
    """Reports a card as lost again and again, ``times`` times."""

    def __init__(self, seed: int, moves: Moves, times: int) -> None:
        super().__init__({})
        self.random, self.moves, self.times, self.next = random.Random(seed), moves, times, 0.0

    def lost(self) -> str | None:
        if self.moves.is_moving or self.moves.number == self.times or time.monotonic() < self.next:
            return None
        self.next = time.monotonic() + self.random.uniform(0.0, 0.5)
        return "the card went down"


def step(number: int, rank: int, groups: dict[str, Any], queue: Any, collectives: list[Collective]) -> list[Tensor]:
    """Run the communication of a training step: tensors around a ring, concurrent sums, and small collectives."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    sizes = [1, 5_000, 400_000]
    bucket = torch.randn(SIZE * sizes[number % 3], generator=generator)
    total = torch.tensor([float(rank + number)])
    work = dist.all_reduce(total, group=groups["replicas"], async_op=True)
    collective = collectives[number % len(collectives)]
    sums = [queue.start(lambda: collective.sum(bucket)), queue.start(lambda: collective.gather(bucket))]
    received = [torch.empty(sizes[(number + n) % 3]) for n in range(3)]
    previous, following = (rank - 1) % SIZE, (rank + 1) % SIZE
    arriving = groups[f"{previous}{rank}"], groups[f"{rank}{following}"]
    receives = [dist.irecv(tensor, previous, group=arriving[0]) for tensor in received]
    sends = []
    for n in range(3):
        tensor = torch.randn(sizes[(number + n) % 3], generator=generator)
        sends.append(dist.isend(tensor, following, group=arriving[1]))
        tensor.zero_() if n == 2 else None  # the send has its own copy
    for receive in receives:
        wait_for(receive, arriving[0])
    for send in sends:
        wait_for(send, arriving[1])
    work.wait()
    with torch.inference_mode():
        least = torch.tensor([float(rank * number)])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=groups["replicas"])
        told = torch.tensor([number if rank == 1 else 0])
        dist.broadcast(told, 1, group=groups["replicas"])
    for each in sums:
        each.wait()
    return [bucket, total, *received, least.clone(), told.clone()]


def work(payload: dict[str, Any]) -> dict[str, Any]:
    """Run all steps without a move and again among moves; return whether the results are the same, and the number of
    moves."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(
        220
    )  # shows where a rank hangs; the limit is long, since a dump of running threads can crash
    dist.init_process_group("gloo", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
    failure._POLL_S = 0.02
    transports = Loopback(rank, payload.get("cut", -1))
    builder = GroupBuilder(
        rank=rank,
        backend="gloo",
        device=torch.device("cpu"),
        timeout=timedelta(seconds=40),
        transports=transports,
        repeats=True,
    )
    made: dict[str, Callable[[], Any]] = {"replicas": lambda: builder.build(range(SIZE), "replicas")}
    made["gradients"] = lambda: builder.build(range(SIZE), "gradients")
    groups = {name: make() for name, make in made.items()}
    for source in range(SIZE):
        to = (source + 1) % SIZE
        groups[f"{source}{to}"] = builder.build_p2p(source, to, f"p2p_{source}_{to}")
    gradients = groups["gradients"]
    collectives: list[Collective] = [AllReduce(gradients), ReduceScatter(gradients), PointToPoint(gradients)]
    queue = make_comm_queue(torch.device("cpu"))
    return among_moves(
        payload, builder, transports, queue, lambda number: step(number, rank, groups, queue, collectives)
    )


def among_moves(
    payload: dict[str, int],
    builder: GroupBuilder,
    transports: Loopback,
    queue: CommQueue,
    take_step: Callable[[int], list[torch.Tensor]],
    steps: int = STEPS,
    begin: Callable[[Moves], None] = lambda moves: None,
) -> dict[str, Any]:
    """Run all steps without a move and again among moves, before which ``begin`` is called; release everything at the
    end."""
    plain = [take_step(number) for number in range(steps)]
    moves = Moves(builder.junction, transports, rank=builder.rank, world_size=SIZE)
    begin(moves)
    watch = failure.FailureWatch(default_store(), builder.rank, SIZE)
    watch.cards = Flapping(payload["seed"], moves, payload["moves"]) if builder.rank == 1 else None
    watch.move_by(moves)
    moved, number = [], 0
    while len(moved) < steps or number < payload["moves"]:
        moved.append(take_step(len(moved) % steps))
        if len(moved) % steps == 0:  # so that all ranks run the same number of steps
            most = torch.tensor([moves.number])
            dist.broadcast(most, 0)
            number = int(most)
    while moves.is_moving:
        time.sleep(0.01)
    dist.barrier()
    queue.close()
    watch.stop()
    same = all(
        torch.equal(a, b) for place, found in enumerate(moved) for a, b in zip(plain[place % steps], found, strict=True)
    )
    release(builder.owned)
    faulthandler.cancel_dump_traceback_later()
    return {
        "same": same,
        "moves": moves.number,
        "left": len(builder.junction.groups),
    }
