"""Aggregator: for each unit, one worker of a cluster (the speaker) communicates for all its workers with an optimizer node elsewhere.

The slow link carries a unit's gradient once for each cluster, as a sum, and its parameters once for each pass. If hosts have several
workers, one worker of each host speaks for that host first, so that a fast card carries them once for each host. A different worker
speaks for each unit in turn, so that traffic inside the cluster is balanced, too.

    aggregator = Aggregator([level, ...])                                   # every worker of the cluster must call, in the same order:
    touched = aggregator.sum(3, gradient, ["up.weight"], of=names)          # the union on the speaker; None on others
    aggregator.bring(3, values, lambda: link.ask(..., into=[values]))

A speaker adds the others' gradients to its own in the order of their ranks, so that runs are reproducible bit for bit. If each
worker sends its own gradient, the node adds them in another order, and results differ by rounding. This is the reduction tree of LuWu
(arXiv 2409.00918), built from workers: hosts, clusters, and the node.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.comm.lost import naming

_PIECE_BYTES = 4 << 20  # a piece is received while the previous one is added


class SpeakingLevel:
    """This worker's group at one level of the tree.

    Args:
        up, down: process groups of its members, for gradients and for parameters; a different thread uses each.
        where: returns a description of the group, for messages.
        release: destroys both process groups.
    """

    def __init__(
        self, *, up: dist.ProcessGroup, down: dist.ProcessGroup, where: Callable[[], str], release: Callable[[], None]
    ) -> None:
        self._up, self._down, self._where, self._release = up, down, where, release
        self._is_closed = False
        self._place, self.size = dist.get_rank(up), dist.get_world_size(up)

    def speaks(self, turn: int) -> bool:
        """Whether this worker is the speaker of turn ``turn``."""
        return self._place == turn % self.size

    def sum(self, turn: int, gradient: Tensor, touched: Sequence[str], *, of: Sequence[str]) -> list[str] | None:
        """Sum ``gradient``, (numel,), of all members into that of the speaker; the others' may be overwritten afterwards.

        Args:
            touched: the parameters that got a gradient from a microbatch of this worker, or of the workers it speaks for.
            of: the names of all parameters of the unit.

        Returns:
            On the speaker the parameters that got a gradient on any member; None on the others.
        """
        speaker, names = turn % self.size, set(touched)
        flags = torch.tensor([name in names for name in of], dtype=torch.uint8)
        pieces = torch.split(gradient, _PIECE_BYTES // gradient.itemsize) if gradient.numel() else ()
        with naming(lambda: f"while gradients were summed in {self._where()}"):
            if self._place != speaker:
                works = [dist.isend(t, group=self._up, group_dst=speaker) for t in (flags, *pieces)]
                for work in works:
                    wait_for(work, self._up)
                return None
            memory = [torch.empty_like(piece) for piece in pieces[:2]]
            for other in range(self.size):
                if other != speaker:
                    flags |= self._add(other, pieces, memory, flags)
        return [name for name, flag in zip(of, flags.tolist(), strict=True) if flag]

    def _add(self, other: int, pieces: Sequence[Tensor], memory: Sequence[Tensor], like: Tensor) -> Tensor:
        """Receive the gradient of member ``other``, add it to ``pieces``, and return its flags."""
        flags = torch.empty_like(like)
        targets = [memory[index % 2][: piece.numel()] for index, piece in enumerate(pieces)]
        works = [dist.irecv(t, group=self._up, group_src=other) for t in (flags, *targets[:1])]
        wait_for(works.pop(0), self._up)
        for index, piece in enumerate(pieces):
            if index + 1 < len(pieces):
                works.append(dist.irecv(targets[index + 1], group=self._up, group_src=other))
            wait_for(works.pop(0), self._up)
            piece.add_(targets[index])
        return flags

    def hand_on(self, turn: int, values: Tensor) -> None:
        """Broadcast the speaker's ``values``, (numel,), to every member."""
        if values.numel():
            with naming(lambda: f"while parameters were handed on in {self._where()}"):
                dist.broadcast(values.view(torch.uint8), group=self._down, group_src=turn % self.size)

    def close(self) -> None:
        """Destroy the groups, after every member has received everything; all members must call."""
        if self._is_closed:
            return
        self._is_closed = True
        with naming(lambda: f"while {self._where()} was left"):
            dist.barrier(self._down)
        self._release()


class Aggregator:
    """The speaking levels of this worker's cluster, or host.

    Args:
        levels: innermost first; the level of a host may also belong to another aggregator.
    """

    def __init__(self, levels: Sequence[SpeakingLevel]) -> None:
        self._levels = levels

    def _turns(self, unit: int) -> list[tuple[SpeakingLevel, int]]:
        """Return the levels in which this worker takes part for a unit, each with its turn."""
        found, turn = [], unit
        for level in self._levels:
            found.append((level, turn))
            if not level.speaks(turn):
                break
            turn //= level.size
        return found

    def sum(self, unit: int, gradient: Tensor, touched: Sequence[str], *, of: Sequence[str]) -> list[str] | None:
        """Sum ``gradient``, (numel,), of all workers into that of the unit's speaker; see :meth:`SpeakingLevel.sum`."""
        found: list[str] | None = list(touched)
        for level, turn in self._turns(unit):
            assert found is not None
            found = level.sum(turn, gradient, found, of=of)
        return found

    def bring(self, unit: int, values: Tensor, ask: Callable[[], None]) -> None:
        """Call ``ask``, which fills ``values``, (numel,), on the unit's speaker only, and broadcast these values to all workers."""
        turns = self._turns(unit)
        if len(turns) == len(self._levels) and turns[-1][0].speaks(turns[-1][1]):
            ask()
        for level, turn in reversed(turns):
            level.hand_on(turn, values)

    def close(self) -> None:
        """Close its levels; all workers of the cluster must call."""
        for level in self._levels:
            level.close()
