"""RemoteParameters: parameters that optimizer nodes hold, and that are whole on a worker only while their stage is computed.

It works like StageShards, with the same units, and the same two buffers that stages use in turn, but a unit comes from a node, and the
worker keeps no shard of it: for P bytes of parameters it receives P bytes for each pass. Where workers of a cluster sum among themselves
(``tree``), each receives its share of a unit, and they gather the rest.

    parameters = RemoteParameters(by_name, stages=(0, 1, 2), stages_of=..., shared={}, num_replicas=1, replica=0, device=device, ...)
    layouts = parameters.lay_out_units(master_weights=False)     # for each node
    parameters.links = nodes.open(...)
    parameters.lay_out(by_elements=True)                                        # from now on nodes hold the values
    parameters.unshard(1).wait()
    parameters.reshard(1)
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.collectives import PointToPoint
from lightning_holmes.comm.lost import naming
from lightning_holmes.comm.queue import ThreadQueue
from lightning_holmes.errors import HolmesError, UnsupportedModuleError
from lightning_holmes.optim.host_memory import HostMemory
from lightning_holmes.optim.node.link import FETCHED, Action, Link, Transfer
from lightning_holmes.optim.stage_buffers import allocate
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.optim.unit import Piece, Unit
from lightning_holmes.plan.node_routes import place_units

_LOW = (torch.bfloat16, torch.float16)
_TOLD = ("names", "shapes", "starts", "numel", "dtype", "is_trained", "has_masters")  # what nodes know of a unit
_HOST = torch.device("cpu")
_GATHER = 7  # gloo's tag: gradients are summed in the same group at the same time


class Tree:
    """The sums inside a cluster of workers, over ``group``: a worker sends the sum of its share of each unit, and gets that share of new
    parameters. Without a group it sends and gets everything."""

    def __init__(self, group: dist.ProcessGroup | None, describe: Callable[[dist.ProcessGroup | None], str]) -> None:
        self._group, self._describe = group, describe
        self.place, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def share(self, flat: Tensor) -> Tensor:
        """Return this worker's share of a unit, (numel,)."""
        return flat.view(self.size, -1)[self.place]

    def sum(self, flat: Tensor) -> None:
        """Replace this worker's share by its sum over the cluster."""
        if self._group is not None and flat.numel():
            with naming(lambda: f"while gradients were summed in {self._describe(self._group)}"):
                PointToPoint(self._group).scatter(flat)

    def gather(self, flat: Tensor) -> None:
        """Replace the other workers' shares by what they hold."""
        if self._group is not None and flat.numel():
            with naming(lambda: f"while parameters were handed on in {self._describe(self._group)}"):
                PointToPoint(self._group, tag=_GATHER).gather(flat.view(torch.uint8))


class RemoteParameters(StageShards):
    """The parameters of this rank. All replicas must create one, with equal arguments except ``replica``, and call its methods together.

    See StageShards for the other arguments.

    Args:
        num_replicas, replica: the number of workers that hold the same stages, and the index of this one. The first one names the actions
            of the nodes, and gives them the initial values.
        device: the device of parameters while their stage is computed.
        num_nodes: the number of nodes that hold them. A stage's parameters form a unit on each node; these are fetched in parallel.
        tree: the sums inside this worker's cluster.

    Attributes:
        links: the links to this rank's nodes.
        version: counts the versions of the values: nodes get the first one, and each step or write makes a new one.
        commands: the queue of what workers and nodes do beside fetching, which is done in ``queue``.
    """

    cure = "optimizer_nodes=0"

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        num_replicas: int,
        replica: int,
        device: torch.device,
        num_nodes: int,
        tree: Tree,
        **others: Any,
    ) -> None:
        queue = ThreadQueue(device)
        super().__init__(parameters, size=1, rank=0, queue=queue, collective=None, **others)
        self.links: Sequence[Link] = ()
        self.commands = ThreadQueue(device)
        self.version = 0
        self.num_replicas, self.replica, self.tree = num_replicas, replica, tree
        self._num_nodes = num_nodes
        self._places_of: dict[Unit, tuple[int, int]] = {}  # by unit its node and its number
        self._has_failed = self._has_masters = False
        self._host_memory = HostMemory(device)  # the queue's

    def lay_out_units(
        self, *, master_weights: bool, with_states: Collection[str] = ()
    ) -> list[dict[int, dict[str, Any]]]:
        """Lay out the units; returns for each node its units by number, in the order of the forward, as plain data.

        Args:
            master_weights: whether nodes hold and step low-precision parameters in fp32.
            with_states: parameters that were trained before; their units get room for states even if they are frozen now.
        """
        for stage, ranks, names in self.grouped():
            unit = self._cut(names, stage, ranks)
            unit.numel = -(-unit.numel // self.tree.size) * self.tree.size
            unit.is_trained |= not set(with_states).isdisjoint(names)
            self._add(unit, is_new=False)
        self._make_buffers()
        self._host_memory.reserve([(u.numel, u.dtype) for u in units] for units in self._of_stage.values())
        self._has_masters = master_weights
        units = dict(enumerate(self.units))
        num_bytes = {i: unit.numel * unit.dtype.itemsize for i, unit in units.items()}
        nodes = place_units(num_bytes, self._num_nodes, {i: unit.stage for i, unit in units.items()})
        found: list[dict[int, dict[str, Any]]] = [{} for _ in range(self._num_nodes)]
        for index in sorted(units, key=lambda i: -1 if (stage := units[i].stage) is None else stage):
            unit = units[index]
            unit.has_masters = master_weights and unit.is_trained and unit.dtype in _LOW
            self._places_of[unit] = nodes[index], index
            found[nodes[index]][index] = {key: getattr(unit, key) for key in _TOLD}
        return found

    def grouped(self) -> list[tuple[int | None, tuple[int, ...], list[str]]]:
        found = []
        for stage, ranks, names in super().grouped():
            if stage is None or ranks:  # ranks that share parameters need the same units, on any number of nodes
                found.append((stage, ranks, names))
                continue
            places = place_units({i: self.parameters[name].numel() for i, name in enumerate(names)}, self._num_nodes)
            of_nodes = [[names[i] for i in sorted(places) if places[i] == place] for place in range(self._num_nodes)]
            found += [(stage, ranks, of_node) for of_node in of_nodes if of_node]
        return found

    def _new_shard(self, numel: int, like: Tensor) -> Tensor:
        return torch.zeros(0, dtype=like.dtype)

    def thaw(self, unit: Unit) -> None:
        """Mark a unit as trained; see StageShards. Nodes keep no fp32 masters of low-precision parameters that were frozen.

        Raises:
            UnsupportedModuleError: trained parameters have fp32 masters on the nodes, but this low-precision unit has none.
        """
        if self._has_masters and unit.dtype in _LOW:
            raise UnsupportedModuleError(
                f"{unit.names[0]} is trained from now on, but was frozen when optimizer nodes were given it, and they keep no fp32 master of it: "
                f"let it be trained in the first batch, or use master_weights=False or {self.cure}"
            )
        super().thaw(unit)

    def lay_out(
        self,
        *,
        by_elements: bool,
        bring: Callable[[Sequence[str]], None] | None = None,
        former: StageShards | None = None,
    ) -> list[Piece]:
        """Send the parameters to the nodes; see StageShards for the arguments. Returns no pieces: nodes hold whole units."""
        if former is not None:
            bring = functools.partial(former.bring_into, self.parameters)
        for unit in self.units:
            if bring is not None:
                bring(unit.names)
            self._keep(unit)
        if former is not None:
            former.queue.close()
        self.version = 1
        return []

    # what nodes are told

    def link_of(self, unit: Unit) -> tuple[Link, int]:
        """Return the link to the node that holds a unit, and the unit's number."""
        node, index = self._places_of[unit]
        return self.links[node], index

    def order(self, link: Link, action: Action, **arguments: Any) -> list[Transfer]:
        """Start to name the next action of a node, which only the first worker does."""
        return [] if self.replica else [link.order(action, **arguments)]

    def perform(
        self,
        action: Action,
        *,
        unit: Unit | None = None,
        everyone: bool = False,
        waits: bool = True,
        then: Callable[[Link], Any] = lambda link: None,
        **arguments: Any,
    ) -> list[Any]:
        """Let the node of a unit, or all nodes, perform an action after those that are queued; returns what ``then`` has returned for each node,
        unless it does not wait. All replicas must call.

        Args:
            everyone: whether every worker names the action, or else the first one.
            then: what this worker does with its end of the link.

        Raises:
            HolmesError: a node has failed, or is lost.
        """
        links, results = self.links, list[Any]()
        if unit is not None:
            link, arguments["unit"] = self.link_of(unit)
            links = [link]

        def run() -> None:
            orders = [link.order(action, **arguments) for link in links if everyone or not self.replica]
            results.extend(map(then, links))
            for order in orders:
                order.wait()

        work = self.commands.start(run)
        if waits:
            work.wait()
        return results

    def ask(self, action: Action, **arguments: Any) -> list[Any]:
        """Let all nodes perform an action, and return their answers; see :meth:`perform`."""
        return self.perform(action, then=answer_of, **arguments)

    def settle(self, *, rests: bool = False) -> None:
        """Wait until the nodes have finished the last commit: layers may have been updated before it. ``rests``: the run has ended well, and
        also until all workers have got what they fetched, since a node ends its session when the first of them leaves.

        Raises:
            HolmesError: the commit, or the step, is invalid.
        """
        self.ask(Action.SETTLE, flag=rests, everyone=rests)

    # values

    def _keep(self, unit: Unit) -> None:
        (buffer,) = allocate([(unit.numel, unit.dtype)], _HOST)
        if self.replica == 0:
            with torch.no_grad():
                for name, view in unit.views(buffer.zero_()).items():
                    view.copy_(self.parameters[name])

        gives = (lambda link: link.send(buffer).wait()) if self.replica == 0 else (lambda link: None)
        self.perform(Action.KEEP, unit=unit, number=self.version + 1, then=gives)
        for name in unit.names:
            self._let_go(name)

    def _start(self, units: Sequence[Unit], buffers: Sequence[Tensor]) -> Any:
        version = self.version

        def bring() -> None:
            with self._host_memory.receiving(buffers) as hosts:
                transfers: list[Transfer] = []
                for unit, host in zip(units, hosts, strict=True):
                    link, index = self.link_of(unit)
                    transfers += self.order(link, Action.FETCH, unit=index, number=version)
                    transfers.append(link.receive(self.tree.share(host), FETCHED + index))
                for transfer in transfers:
                    transfer.wait()
                for host in hosts:
                    self.tree.gather(host)

        of = f"of {units[0].names[0]} to {units[-1].names[-1]}" if units else ""
        return self.queue.start(bring, "bucket_gather", of=of)

    def _values(self, unit: Unit, replicas: Collection[int]) -> dict[str, Tensor]:
        """Return views of a unit's values on some of the replicas, in new memory on the host; nothing on the others. All replicas must call."""
        is_wanted = self.replica in replicas
        (host,) = allocate([(unit.numel * is_wanted, unit.dtype)], _HOST)
        wanted = sorted(replicas)
        self.perform(
            Action.VALUES, unit=unit, number=self.version, message=wanted, then=lambda link: link.receive(host).wait()
        )
        return unit.views(host) if is_wanted else {}

    def _wanted(self, unit: Unit, destination: Callable[[str], int]) -> dict[str, Tensor]:
        views = self._values(unit, {destination(name) for name in unit.names})
        return {name: view.clone() for name, view in views.items() if destination(name) == self.replica}

    def each_whole(self, destination: Callable[[str], int]) -> Iterator[tuple[str, Tensor]]:
        """See StageShards. Each replica fetches only the units of which it wants a parameter."""
        self.settle()
        yield from super().each_whole(destination)

    def destination(self, name: str) -> int:
        """Return the replica that saves a parameter and its states: parameters are distributed round-robin."""
        if not self._holders:
            self._holders = {name: number % self.num_replicas for number, name in enumerate(self.parameters)}
        return self._holders[name]

    def put(self, write: Callable[[], None]) -> None:
        super().put(write)
        self.version += 1

    def abandon(self) -> None:
        """Note that the run has failed. A single worker can still get the last step's values in :meth:`close`."""
        self._has_failed = True

    def close(self) -> None:
        """Give each parameter its values again, unless ``stays`` is set. If a failure prevents the nodes from sending the values of the
        last step, parameters stay NaN placeholders."""
        has_failed, alone = self._has_failed, self.num_replicas == 1
        self.stays &= not has_failed
        try:
            if not has_failed:
                self.settle()
            for unit in () if self.stays or (has_failed and not alone) else self.units:
                for name, view in (self._values(unit, {0}) if has_failed else self._whole(unit)).items():
                    dtensor.replace_local(self.parameters[name], view.to(unit.device, copy=True))
            if alone or not has_failed:
                self.settle(rests=True)
        except HolmesError:
            if not has_failed:
                raise
        self._buffers = None


def answer_of(link: Link) -> Any:
    """Wait for the answer of a node."""
    return link.hear().message
