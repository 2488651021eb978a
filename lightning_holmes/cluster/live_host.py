"""LiveHost: one host of a job with the ranks that run on it, made from the inventories of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_holmes.cluster.hardware import HostInventory
from lightning_holmes.cluster.interfaces import subnet_of
from lightning_holmes.cluster.rdma import RdmaPort
from lightning_holmes.cluster.sysfs import natural_key
from lightning_holmes.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveHost:
    """A host of a job. name: unique in the job."""

    name: str
    ranks: tuple[int, ...]
    inventory: HostInventory

    @property
    def ethernet_subnet(self) -> str | None:
        """The subnet of the main interface; None if it has no address, or only a host route."""
        main = self.inventory.main
        return subnet_of(main.addresses[0]) if main is not None and main.addresses else None

    def down_ports(self) -> tuple[RdmaPort, ...]:
        """The RDMA ports that are not up."""
        return tuple(port for port in self.inventory.rdma if not port.up)


def merge_ranks(inventories: Sequence[HostInventory]) -> tuple[LiveHost, ...]:
    """Make the hosts of a job, sorted by name, from the inventories of all ranks.

    Hosts that share a name (namespaces of one machine, machines called localhost) are numbered by identity.

    Raises:
        ConfigurationError: HOLMES_CLUSTER differs between the processes of a host.
    """
    ranks: dict[str, list[int]] = {}
    for rank, inventory in enumerate(inventories):
        ranks.setdefault(inventory.identity, []).append(rank)
    first = {identity: inventories[mine[0]] for identity, mine in ranks.items()}
    names = {identity: inventory.name for identity, inventory in first.items()}
    shared = {name for name, count in Counter(names.values()).items() if count > 1}
    for name in sorted(shared):
        alike = sorted(identity for identity in names if first[identity].name == name)
        number = 0
        for identity in alike:
            number += 1
            while f"{name}-{number}" in names.values():
                number += 1
            names[identity] = f"{name}-{number}"
    for identity, mine in ranks.items():
        clusters = {inventories[rank].cluster for rank in mine}
        if len(clusters) > 1:
            shown = ", ".join(f"rank {rank}: {inventories[rank].cluster}" for rank in mine)
            raise ConfigurationError(
                f"HOLMES_CLUSTER differs between the processes of host {names[identity]} ({shown}); set one value a host"
            )
    hosts = [LiveHost(name=names[i], ranks=tuple(mine), inventory=first[i]) for i, mine in ranks.items()]
    return tuple(sorted(hosts, key=lambda host: natural_key(host.name)))
