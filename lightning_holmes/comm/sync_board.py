"""SyncBoard: groups of a job tell rank 0 how they sum their gradients, and when they have changed it.

One member of each group posts its choices under keys of the job's store; rank 0 reads them now and then, without
waiting.

    board = SyncBoard(store, run=1, groups=["0_0", "1_0"])
    board.post("1_0", choice)            # on the group's first member
    board.read()                         # on rank 0: new choices
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_holmes.plan.sync_choice import SyncChoice


class SyncBoard:
    """The board of one fit.

    Args:
        store: the job's store.
        run: the same number on all ranks, another one for each fit.
        groups: names of the groups that may post.
    """

    def __init__(self, store: Any, *, run: int, groups: Sequence[str]) -> None:
        self._store = store
        self._run = run
        self._posted = dict.fromkeys(groups, 0)
        self._read = dict.fromkeys(groups, 0)

    def post(self, group: str, choice: SyncChoice) -> None:
        """Post the choice of a group; only one of its members may call."""
        self._store.set(self._key(group, self._posted[group]), json.dumps(asdict(choice)))
        self._posted[group] += 1

    def read(self) -> list[SyncChoice]:
        """The choices posted since the last call."""
        found = []
        for group in self._read:
            while self._store.check([self._key(group, self._read[group])]):
                data = json.loads(self._store.get(self._key(group, self._read[group])))
                self._read[group] += 1
                found.append(SyncChoice(**data | {key: tuple(data[key]) for key in ("stages", "ranks")}))
        return found

    @property
    def is_complete(self) -> bool:
        """Whether a choice of each group has been read."""
        return all(self._read.values())

    def _key(self, group: str, number: int) -> str:
        return f"holmes_gradient_sync/{self._run}/{group}/{number}"
