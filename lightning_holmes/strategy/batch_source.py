"""BatchSource: whether the ranks of a pipeline each load their batches, or the first of them loads and the others receive.

Each rank loads its own: a batch need not cross the link between clusters. But a data set that is made or augmented
without a common seed gives each process other values for the same index. Then the first rank's batch is as good as any,
and the others take it. That is right only if all ranks read the same indices: data that shard themselves would lose what the others
have read. They are iterable, or come with ``use_distributed_sampler=False``, and are refused where batches are compared.

    source = BatchSource(p2p, always=False, divides=True)
    source.broadcasts("training_step", batch, lambda: loaders, index=0, replica=(0, 2))   # all ranks of the pipeline must call
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_holmes.comm.p2p import P2P, exchange
from lightning_holmes.lightning_package import PACKAGES, pl
from lightning_holmes.pipeline.checksum import Checksum
from lightning_holmes.pipeline.steps import TOPIC_BATCH
from lightning_holmes.strategy.compat.resumable_sampler import ResumableSampler


class BatchSource:
    """Decides at the first batch of each loader of a run.

    Args:
        p2p: to the other ranks of the pipeline; None: there are none.
        always: the first rank's batches are used in any case (``broadcast_batch=True``).
        divides: the trainer divides the data; if not, the data sets may do so by themselves.
    """

    def __init__(self, p2p: P2P | None, *, always: bool, divides: bool) -> None:
        self._p2p = p2p if p2p is not None and p2p.size > 1 else None
        self._always = always
        self._divides = divides
        self._decided: dict[tuple[str, int], bool] = {}

    def broadcasts(
        self,
        step_name: str,
        batch: Any,
        find_loaders: Callable[[], Sequence[Any]],
        *,
        index: int,
        replica: tuple[int, int],
    ) -> bool:
        """Return whether the ranks take the first rank's batch. All ranks of the pipeline must call.

        Args:
            find_loaders: returns the loaders of the step's loop; called at the first batch only.
            index: the loader's index among several evaluation loaders.
            replica: this rank's replica, and the number of replicas.
        """
        if self._p2p is None or self._always:
            return self._always
        key = step_name, index
        if key not in self._decided:
            loaders = find_loaders()
            by_index = self._divides and bool(loaders) and all(_reads_by_index(each, replica) for each in loaders)
            self._decided[key] = self._differ(self._p2p, batch, by_index)
            if self._decided[key] and self._p2p.rank == 0:
                pl.utilities.rank_zero_warn(
                    f"{step_name}: the ranks of a pipeline load other values for the same indices (data made or changed without a common "
                    f"seed): from now on the first of them loads each batch and sends it to the others, as with broadcast_batch=True. "
                    f"seed_everything(...) before the data are made saves these messages"
                )
        return self._decided[key]

    def _differ(self, p2p: P2P, batch: Any, by_index: bool) -> bool:
        """Whether the ranks' batches differ, and all read them by the same indices."""
        checksum = Checksum(batch)
        mine = checksum.known, checksum.values(), by_index
        everyone = [tuple(each) for each in exchange(p2p, TOPIC_BATCH, mine)]
        return len(set(everyone)) > 1 and all(by_index for *_, by_index in everyone)


def _reads_by_index(loader: Any, replica: tuple[int, int]) -> bool:
    """Whether a loader reads a map-style data set by indices that depend on the replica and on no other rank: with samplers of torch and
    Lightning, which read in order, shuffled, or this replica's part."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches).__module__.partition(".")[0] not in ("torch", *PACKAGES):
        return False
    sampler = getattr(batches, "sampler", loader.sampler)
    if isinstance(sampler, ResumableSampler):
        sampler = sampler.wrapped
    if isinstance(sampler, DistributedSampler):
        return (sampler.rank, sampler.num_replicas) == replica
    return type(sampler) in (SequentialSampler, RandomSampler)
