"""Aggregator: the workers of one cluster, of which one speaks for all with an optimizer node that lies elsewhere.

The slow link carries a unit's gradient once a cluster, as a sum, and its parameters once a pass. Where hosts have several workers, one
of each host speaks for those there first, so that a fast card carries them once a host. Speakers take turns from unit to unit, so that
inside, too, all carry about as much.

    aggregator = Aggregator([level, ...])                                   # every worker of the cluster must call, in the same order:
    touched = aggregator.sum(3, gradient, ["up.weight"], of=names)          # on the speaker the union; None on others
    aggregator.bring(3, values, lambda: link.ask(..., into=[values]))

A speaker adds the others' gradients to its own in the order of their ranks, so that a run can be repeated bit for bit. Where each
worker sends for itself the node adds them in another order: results differ by rounding. LuWu's reduction tree (arXiv 2409.00918), made
of workers: hosts, clusters, and the node.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.comm.lost import naming

_PIECE_BYTES = 4 << 20  # received while the one before is added


class SpeakingLevel:
    """This worker's group of one level.

    Args:
        up, down: groups of its members, one for gradients, one for parameters: a thread each uses them.
        where: names them, for messages.
        release: lets go of them.
    """

    def __init__(
        self, *, up: dist.ProcessGroup, down: dist.ProcessGroup, where: Callable[[], str], release: Callable[[], None]
    ) -> None:
        self._up, self._down, self._where, self._release = up, down, where, release
        self._is_closed = False
        self._place, self.size = dist.get_rank(up), dist.get_world_size(up)

    def speaks(self, turn: int) -> bool:
        """Whether it is this worker's turn to speak for all."""
        return self._place == turn % self.size

    def sum(self, turn: int, gradient: Tensor, touched: Sequence[str], *, of: Sequence[str]) -> list[str] | None:
        """Let the speaker's ``gradient``, (numel,), become the sum of all; the others' may be overwritten then.

        Args:
            touched: those of the unit's parameters, ``of``, that a microbatch of this worker, or of those it speaks for, has reached.

        Returns:
            On the speaker those that one of any worker has reached; None on the others.
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
        """Add what ``other`` sends; gives its flags."""
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
        """Let ``values``, (numel,), of every member become those of the speaker."""
        if values.numel():
            with naming(lambda: f"while parameters were handed on in {self._where()}"):
                dist.broadcast(values.view(torch.uint8), group=self._down, group_src=turn % self.size)

    def close(self) -> None:
        """Let go of the groups, when every member has all that was on its way; all call."""
        if self._is_closed:
            return
        self._is_closed = True
        with naming(lambda: f"while {self._where()} was left"):
            dist.barrier(self._down)
        self._release()


class Aggregator:
    """Of this worker's cluster, or host.

    Args:
        levels: innermost first; those of a host may be another one's, too.
    """

    def __init__(self, levels: Sequence[SpeakingLevel]) -> None:
        self._levels = levels

    def _turns(self, unit: int) -> list[tuple[SpeakingLevel, int]]:
        """The levels in which this worker takes part for a unit, and whose turn it is there."""
        found, turn = [], unit
        for level in self._levels:
            found.append((level, turn))
            if not level.speaks(turn):
                break
            turn //= level.size
        return found

    def sum(self, unit: int, gradient: Tensor, touched: Sequence[str], *, of: Sequence[str]) -> list[str] | None:
        """Let the speaker's ``gradient``, (numel,), become the sum of all; see :meth:`SpeakingLevel.sum`."""
        found: list[str] | None = list(touched)
        for level, turn in self._turns(unit):
            assert found is not None
            found = level.sum(turn, gradient, found, of=of)
        return found

    def bring(self, unit: int, values: Tensor, ask: Callable[[], None]) -> None:
        """Let ``values``, (numel,), of every worker become what the speaker's ``ask`` brings into its own."""
        turns = self._turns(unit)
        if len(turns) == len(self._levels) and turns[-1][0].speaks(turns[-1][1]):
            ask()
        for level, turn in reversed(turns):
            level.hand_on(turn, values)

    def close(self) -> None:
        """Let go of its levels; all workers of the cluster call."""
        for level in self._levels:
            level.close()
