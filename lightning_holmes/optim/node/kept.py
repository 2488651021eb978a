"""Kept: the units that a service leaves, as of the last commit, when its workers are gone and their run may be started again.

kept = service.leave()                       # None if nothing can be kept
kept.check(told)                             # told: sent by the workers that continue
units, store = kept.hand_over(num_workers)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_holmes.errors import CheckpointDamagedError
from lightning_holmes.optim.node.channel import Channel
from lightning_holmes.optim.node.store import StateStore
from lightning_holmes.optim.node.unit import Unit

_ALIKE = ("module", "place", "units", "states", "num_places")
_ALIKE_OF_OPTIMIZER = ("module", "name", "source", "names", "marks")  # not its options, which workers send


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The units of one service.

    Attributes:
        told: the description that its workers have sent; see Service.
        version: the version of the units' values and states; a run's initial values have version 1, and each commit adds one.
    """

    told: Mapping[str, Any]
    version: int
    units: Mapping[int, Unit]
    store: StateStore | None

    @property
    def commit(self) -> tuple[str, int]:
        """The name of the run, and the version."""
        return self.told["run"], self.version

    def check(self, told: Mapping[str, Any]) -> None:
        """Refuse workers whose description does not match the kept units.

        Raises:
            CheckpointDamagedError: names the differences.
        """
        different = [key for key in _ALIKE if told[key] != self.told[key]]
        optimizers = told["optimizer"], self.told["optimizer"]
        different += [f"optimizer {key}" for key in _ALIKE_OF_OPTIMIZER if optimizers[0][key] != optimizers[1][key]]
        if self.commit != (told["run"], told["adopt"]):
            different.append("commit")
        if different:
            raise CheckpointDamagedError(
                f"what this optimizer node has kept of the job's last start has other {', '.join(different)} than the workers ask for: has the "
                f"script, an option or the number of hosts changed? The next start takes what was saved before"
            )

    def hand_over(self, num_workers: int) -> tuple[Mapping[int, Unit], StateStore | None]:
        """Reset the units and the store for ``num_workers`` new workers, and return them."""
        if self.store is not None:
            self.store.begin_again(num_workers)
        for unit in self.units.values():
            unit.begin_again(num_workers)
        return self.units, self.store

    def give(self, channel: Channel) -> None:
        """Send all values, in the type that workers have, in one message for each unit."""
        for unit in self.units.values():
            with unit.values() as flat:
                channel.send({"unit": unit.layout.to_plain(), "values": flat})

    def close(self) -> None:
        """Free the storage; no run continues from these units."""
        if self.store is not None:
            self.store.close()
