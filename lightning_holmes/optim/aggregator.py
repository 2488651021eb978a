"""Aggregator: the workers of one cluster, of which one speaks for all with an optimizer node that lies elsewhere.

The slow link carries a unit's gradient once a cluster, as a sum, and its parameters once a pass; between the workers both travel on
their fast cards. Speakers take turns from unit to unit, so that inside, too, all carry about as much.

    aggregator = Aggregator(up=group, down=other_group, where=...)          # every worker of the cluster must call, in the same order:
    touched = aggregator.sum(3, gradient, ["up.weight"], of=names)          # on the speaker the union; None on others
    aggregator.bring(3, values, lambda: link.ask(..., into=[values]))

The speaker adds the others' gradients to its own in the order of their ranks, so that a run can be repeated bit for bit. Where each
worker sends for itself the node adds them in another order: results differ by rounding. One level of LuWu's reduction tree (arXiv
2409.00918), made of workers.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_holmes.comm.gloo import wait_for
from lightning_holmes.comm.lost import naming

_PIECE_BYTES = 4 << 20  # received while the one before is added


class Aggregator:
    """Of this worker's cluster.

    Args:
        up, down: groups of its workers, one for gradients, one for parameters: a thread each uses them.
        where: names them, for messages.
        release: lets go of them.
    """

    def __init__(
        self, *, up: dist.ProcessGroup, down: dist.ProcessGroup, where: Callable[[], str], release: Callable[[], None]
    ) -> None:
        self._up, self._down, self._where, self._release = up, down, where, release
        self.place, self.size = dist.get_rank(up), dist.get_world_size(up)

    def speaker(self, unit: int) -> int:
        """Who speaks with the node about a unit."""
        return unit % self.size

    def sum(self, unit: int, gradient: Tensor, touched: Sequence[str], *, of: Sequence[str]) -> list[str] | None:
        """Let the speaker's ``gradient``, (numel,), become the sum of all; the others' may be overwritten then.

        Args:
            touched: those of the unit's parameters, ``of``, that a microbatch of this worker has reached.

        Returns:
            On the speaker those that one of any worker has reached; None on the others.
        """
        speaker, names = self.speaker(unit), set(touched)
        flags = torch.tensor([name in names for name in of], dtype=torch.uint8)
        pieces = torch.split(gradient, _PIECE_BYTES // gradient.itemsize) if gradient.numel() else ()
        with naming(lambda: f"while gradients were summed in {self._where()}"):
            if self.place != speaker:
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

    def bring(self, unit: int, values: Tensor, ask: Callable[[], None]) -> None:
        """Let ``values``, (numel,), of every worker become what the speaker's ``ask`` brings into its own."""
        speaker = self.speaker(unit)
        if self.place == speaker:
            ask()
        if values.numel():
            with naming(lambda: f"while parameters were handed on in {self._where()}"):
                dist.broadcast(values.view(torch.uint8), group=self._down, group_src=speaker)

    def close(self) -> None:
        """Let go of the groups, when every worker of the cluster has all that was on its way; all call."""
        with naming(lambda: f"while {self._where()} was left"):
            dist.barrier(self._down)
        self._release()
