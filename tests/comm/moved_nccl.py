"""An imitation of torch's NCCL groups on the host, and communication on such groups that are moved meanwhile.

It behaves like NCCL in torch 2.13 in these respects: communicators are created at their first use, which blocks;
there is one for collectives and one for each pair that sends; operations on one communicator run in order. A work's
``wait`` returns at once. A collective that is not asynchronous returns no work. An error of a communicator appears in
each of its works that has not ended. After an abort all works look as if they had ended well, and their outputs hold
arbitrary values. The bytes travel through the job's store.
"""

import faulthandler
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from moved_groups import SIZE, Loopback, among_moves
from torch import Tensor

from lightning_holmes.comm import failure, nccl
from lightning_holmes.comm.collectives import AllReduce, Collective, PointToPoint, ReduceScatter
from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.comm.mesh import GroupBuilder
from lightning_holmes.comm.moves import Moves
from lightning_holmes.comm.queue import make_comm_queue

_LOOKS_S = 2e-3


class Aborted(Exception):
    pass


class ImitatedWork:
    def __init__(self, group: "ImitatedNccl", outputs: Sequence[Tensor]) -> None:
        self.group, self.outputs, self.has_run = group, outputs, False

    def wait(self, timeout: Any = None) -> bool:
        return True  # NCCL would make a stream wait

    def is_completed(self) -> bool:
        return self.has_run or self.group.is_aborted or self.group.error is not None

    def get_future_result(self) -> Any:
        result: Any = torch.futures.Future()
        if self.exception() is not None:
            result.set_result(2)
        return result

    def exception(self) -> Exception | None:
        return None if self.has_run or self.group.is_aborted else self.group.error


class ImitatedNccl:
    """A group.

    Attributes:
        breaks: after how many operations of a group, of those that are made next, its communicators fail; None: never.
        refuses: whether rank 1 cannot connect; the others then wait for it.
    """

    breaks: Callable[[], int | None] = staticmethod(lambda: None)
    refuses: Callable[[], bool] = staticmethod(lambda: False)
    made: list[str | None] = []

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        net_name: str | None,
        name: str,
        ranks: Sequence[int],
    ) -> None:
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1" and len(ranks) == size
        self.store, self.rank, self.size = store, rank, size
        self.is_aborted, self.error = False, None
        self._streams: dict[str, Any] = {}
        self._left = self.breaks()
        self._refuses = self.refuses() and ranks[rank] == 1
        self.made.append(net_name)

    def abort(self) -> None:
        self.is_aborted = True
        for stream in self._streams.values():
            stream.put(None)

    shutdown = abort

    def _start(self, name: str, members: Iterable[int], outputs: Sequence[Tensor], run: Callable[[str], None]) -> Any:
        if name not in self._streams:
            self._connect(name, list(members))
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.error = dist.DistBackendError("NCCL error: remote process exited or there was a network error")
        work = ImitatedWork(self, outputs)
        self._streams[name].put((work, run))
        return work

    def _connect(self, name: str, members: list[int]) -> None:
        if self._refuses:
            raise dist.DistBackendError("NCCL error: unhandled system error")
        self.store.set(f"{name}/come/{self.rank}", "")
        self._await([f"{name}/come/{member}" for member in members])
        stream: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(name, stream), daemon=True).start()
        self._streams[name] = stream

    @torch.inference_mode()
    def _serve(self, name: str, stream: Any) -> None:
        number = 0
        while (given := stream.get()) is not None:
            work, run = given
            number += 1
            try:
                run(f"{name}/{number}")
                work.has_run = True
            except Aborted:
                for output in work.outputs:
                    output.fill_(77)
                return

    def _await(self, keys: list[str]) -> None:
        while self.is_aborted or self.error is not None or not self.store.check(keys):
            if self.is_aborted:
                raise Aborted
            time.sleep(_LOOKS_S)

    def _exchange(self, place: str, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all members."""
        self.store.set(f"{place}/{self.rank}", mine.contiguous().view(torch.uint8).numpy().tobytes())
        keys = [f"{place}/{member}" for member in range(self.size)]
        self._await(keys)
        return [
            torch.frombuffer(bytearray(self.store.get(key)), dtype=mine.dtype).view(mine.shape).clone() for key in keys
        ]

    def _collective(self, options: Any, given: Tensor, output: Tensor, found: Callable[[list[Tensor]], Tensor]) -> Any:
        given = given.reshape(-1)

        def run(place: str) -> None:
            output.copy_(found(self._exchange(place, given)).view(output.shape))

        work = self._start("all", range(self.size), [output], run)
        return work if options.asyncOp else None

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        options = options or dist.AllreduceOptions()  # type: ignore[attr-defined]
        is_sum = options.reduceOp == dist.ReduceOp.SUM

        def reduced(parts: list[Tensor]) -> Tensor:
            stacked = torch.stack(parts)
            return stacked.sum(0) if is_sum else stacked.amin(0)

        return self._collective(options, tensors[0], tensors[0], reduced)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        root = options.rootRank
        return self._collective(options, tensors[0], tensors[0], lambda parts: parts[root])

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any) -> Any:
        return self._collective(options, given, output, torch.cat)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any) -> Any:
        place = self.rank
        return self._collective(
            options, given, output, lambda parts: torch.stack(parts).sum(0).view(self.size, -1)[place]
        )

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(self, output: Tensor, given: Tensor, out_sizes: Any, in_sizes: Any, options: Any) -> Any:
        assert not out_sizes and not in_sizes
        place = self.rank
        return self._collective(
            options, given, output, lambda parts: torch.stack([part.view(self.size, -1)[place] for part in parts])
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any) -> Any:
        assert opts.device == torch.device("cpu") and opts.asyncOp
        number = torch.zeros(1)
        return self._collective(opts, number, number, lambda parts: parts[0])

    def _pair(self, peer: int) -> tuple[str, tuple[int, int]]:
        pair = min(self.rank, peer), max(self.rank, peer)
        return f"pair {pair}", pair

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        def run(place: str) -> None:
            self._await([])
            self.store.set(f"{place}/sent", tensors[0].view(torch.uint8).numpy().tobytes())

        return self._start(*self._pair(peer), [], run)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        (tensor,) = tensors

        def run(place: str) -> None:
            self._await([f"{place}/sent"])
            tensor.copy_(torch.frombuffer(bytearray(self.store.get(f"{place}/sent")), dtype=tensor.dtype))

        return self._start(*self._pair(peer), [tensor], run)


def imitate() -> None:
    """Replace NCCL groups by the imitation in this process from now on."""
    nccl.nccl_group = ImitatedNccl  # type: ignore[assignment]
    nccl.plain_group = lambda store, rank, size, backend, device: backend  # type: ignore[assignment]


def step(
    number: int, rank: int, groups: dict[str, Any], queue: Any, collectives: list[Collective], device: torch.device
) -> list[Tensor]:
    """Run the communication of a training step: tensors around a ring, concurrent sums, and small collectives."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    sizes = [1, 100, 5_000]
    bucket = torch.randn(SIZE * sizes[number % 3], generator=generator).to(device)
    collective = collectives[number % len(collectives)]
    sums = [queue.start(lambda: collective.sum(bucket)), queue.start(lambda: collective.gather(bucket))]
    received = [torch.empty(sizes[(number + n) % 3], device=device) for n in range(3)]
    previous, following = (rank - 1) % SIZE, (rank + 1) % SIZE
    arriving = groups[f"{previous}{rank}"], groups[f"{rank}{following}"]
    receives = [dist.irecv(tensor, previous, group=arriving[0]) for tensor in received]
    sends = []
    for n in range(3):
        tensor = torch.randn(sizes[(number + n) % 3], generator=generator).to(device)
        sends.append(dist.isend(tensor, following, group=arriving[1]))
        tensor.zero_()
    while number % 2 and not receives[0].is_completed():
        time.sleep(_LOOKS_S)
    for receive in receives:
        wait_for(receive, arriving[0])
    for send in sends:
        wait_for(send, arriving[1])
    total = torch.tensor([float(rank + number)], device=device)
    work = dist.all_reduce(total, group=groups["replicas"], async_op=True)
    with torch.inference_mode():
        least = torch.tensor([float(rank * number)], device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=groups["replicas"])
        told = torch.tensor([number if rank == 1 else 0], device=device)
        dist.broadcast(told, 1, group=groups["replicas"])
    dist.barrier(groups["replicas"])
    work.wait()
    for each in sums:
        each.wait()
    return [bucket, total, *received, least.clone(), told.clone()]


class LoopbackNccl(Loopback):
    def __init__(self, rank: int, cut: int) -> None:
        super().__init__(rank, cut)
        self._backend = "nccl"

    def net_name(self, ranks: Sequence[int]) -> str:
        return "Socket" if self.choices % 2 or torch.cuda.is_available() else "IB"


def work(payload: dict[str, Any]) -> dict[str, Any]:
    """Run all steps without a move and again among moves; return whether the results are the same, and the number of
    moves. With a "device", NCCL itself is used."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100)
    dist.init_process_group("gloo", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
    failure._POLL_S = 0.02
    device = torch.device(payload.get("device", "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        nccl.CONNECT_AGAIN = timedelta(seconds=5)
        imitate()
    transports = LoopbackNccl(rank, payload.get("cut", -1))
    ImitatedNccl.refuses = staticmethod(lambda: transports.choices == transports.cut)
    builder = GroupBuilder(
        rank=rank,
        backend="nccl",
        device=device,
        timeout=timedelta(seconds=40),
        transports=transports,
        repeats=True,
    )
    groups: dict[str, Any] = {
        "replicas": builder.build(range(SIZE), "replicas"),
        "gradients": builder.build(range(SIZE), "gradients"),
    }
    for source in range(SIZE):
        to = (source + 1) % SIZE
        groups[f"{source}{to}"] = builder.build_p2p(source, to, f"p2p_{source}_{to}")
    gradients = groups["gradients"]
    assert dist.get_backend(gradients) == nccl.NCCL and os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    collectives: list[Collective] = [AllReduce(gradients), ReduceScatter(gradients), PointToPoint(gradients)]
    queue = make_comm_queue(device)
    chance = random.Random(payload["seed"] + rank)

    def break_some(moves: Moves) -> None:
        ImitatedNccl.breaks = staticmethod(
            lambda: chance.randrange(3, 60) if moves.number < payload["moves"] and chance.random() < 0.5 else None
        )

    found = among_moves(
        payload,
        builder,
        transports,
        queue,
        lambda number: step(number, rank, groups, queue, collectives, device),
        steps=12,
        begin=break_some,
    )
    return found | {"modules": sorted(set(ImitatedNccl.made))}
