"""RemoteParameters: parameters that optimizer nodes hold, and that are whole on a worker only while their stage is computed.

It works like StageShards, with the same parts, and the same two buffers that stages use in turn, but a part is fetched from a node, and
the worker keeps no shard of it. Every worker fetches whole parts, so that for P bytes of parameters it receives P bytes for each pass;
or one worker fetches for its cluster (aggregator.py).

    parameters = RemoteParameters(by_name, stages=(0, 1, 2), stages_of=..., shared={}, replica=0, queue=queue, ...)
    units = parameters.lay_out_units(master_weights=False)       # sent to the nodes
    parameters.connect(links, place_of)
    parameters.lay_out(by_elements=True)                                        # from now on nodes hold the values
    parameters.fetch(1).wait()
    parameters.release(1)
"""

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import Absence
from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.comm.queue import CommQueue, Work
from lightning_holmes.errors import HolmesError, UnsupportedModuleError
from lightning_holmes.optim.aggregator import Aggregator
from lightning_holmes.optim.grad_buffer import sum_dtype
from lightning_holmes.optim.host_memory import HostMemory
from lightning_holmes.optim.node.description import UnitLayout
from lightning_holmes.optim.node.link import NodeLink, at_once
from lightning_holmes.optim.part import Part
from lightning_holmes.optim.shards import Piece
from lightning_holmes.optim.stage_buffers import allocate
from lightning_holmes.optim.stage_shards import StageShards

_LOW = (torch.bfloat16, torch.float16)
_LAST_VALUES_S = 10.0  # seconds that a failed run waits for the values of its last step


class RemoteParameters(StageShards):
    """The parameters of this rank. All replicas must create one, with equal arguments except ``replica``, and call its methods together.

    See StageShards for the other arguments.

    Args:
        num_replicas, replica: the number of workers that hold the same stages, and the index of this one; nodes get the initial values
            from the first one.
        device: the device of parameters while their stage is computed.
        queue: receives them, on a thread.
        num_nodes: the number of nodes that hold them. A stage's parameters form a unit on each node; these are fetched in parallel.
        keeps: each stage has its own buffer, and is fetched once for all passes between two updates: P bytes for a batch, not 2 P.
        run: a name for this fit's values, under which nodes keep them when the workers are lost; empty: nodes do not keep them, or no
            longer.
        adopted: the version of kept values with which the nodes go on; 0: nodes get new values.

    Attributes:
        links: the links to this rank's nodes.
        version: counts the versions of the values: nodes get the first one, and each step or write makes a new one.
        aggregators: by unit, for the units that one worker of this one's cluster fetches and sends for all.
        committed: the last window of batches whose step was committed.
    """

    cure = "optimizer_nodes=0"

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        stages: Sequence[int],
        stages_of: Mapping[str, Collection[int]],
        shared: Mapping[tuple[int, ...], Sequence[str]],
        num_replicas: int,
        replica: int,
        device: torch.device,
        queue: CommQueue,
        num_nodes: int,
        keeps: bool,
        run: str = "",
        adopted: int = 0,
        absence: Absence | None = None,
        compiled: Mapping[str, bool] | None = None,
    ) -> None:
        super().__init__(
            parameters,
            stages=stages,
            stages_of=stages_of,
            shared=shared,
            size=1,
            rank=0,
            queue=queue,
            gather=lambda tensor: None,
            absence=absence,
            compiled=compiled,
        )
        if keeps:
            self._num_buffers = max(1, len(stages))
        self._keeps, self._num_nodes = keeps, num_nodes
        self.run, self._adopted = run, adopted
        self._kept: dict[int, tuple[int, int]] = {}  # by a buffer's address: the part that it holds, and the version
        self.links: Sequence[NodeLink] = ()
        self.version = self.committed = 0
        self.aggregators: Mapping[int, Aggregator] = {}
        self.num_replicas, self.replica = num_replicas, replica
        self._link_of: Mapping[int, NodeLink] = {}
        self._has_failed = self._has_masters = False
        self._host_memory = HostMemory(device)  # the queue's

    def lay_out_units(self, *, master_weights: bool, with_states: Collection[str] = ()) -> dict[int, UnitLayout]:
        """Lay out the units that the nodes hold; returns them by number, in the order of the forward.

        Args:
            master_weights: whether nodes hold and step low-precision parameters in fp32.
            with_states: parameters that were trained before; their units get room for states even if they are frozen now.
        """
        for stage, ranks, names in self.grouped():
            part = self._cut(names, stage, ranks)
            part.is_trained |= not set(with_states).isdisjoint(names)
            self._add(part, is_new=False)
        self._make_buffers()
        self._has_masters = master_weights
        order = sorted(range(len(self.parts)), key=lambda i: _place(self.parts[i].stage))
        return {
            index: UnitLayout(
                names=part.names,
                shapes=tuple(tuple(shape) for shape in part.shapes),
                starts=part.starts,
                numel=part.numel,
                dtype=torch.float32 if master_weights and part.is_trained and part.dtype in _LOW else part.dtype,
                sent_dtype=part.dtype,
                gradient_dtype=sum_dtype(part.dtype),
                is_trained=part.is_trained,
            )
            for index, part in ((i, self.parts[i]) for i in order)
        }

    def grouped(self) -> list[tuple[int | None, tuple[int, ...], list[str]]]:
        found = []
        for stage, ranks, names in super().grouped():
            if stage is None or ranks:  # ranks that share parameters need the same units, on any number of nodes
                found.append((stage, ranks, names))
                continue
            sizes = {i: self.parameters[name].numel() for i, name in enumerate(names)}
            places = assign(sizes, self._num_nodes)
            parts = [[names[i] for i in sorted(places) if places[i] == place] for place in range(self._num_nodes)]
            found += [(stage, ranks, part) for part in parts if part]
        return found

    def thaw(self, part: Part) -> None:
        """Mark a part as trained; see StageShards. Nodes keep no fp32 masters of low-precision parameters that were frozen.

        Raises:
            UnsupportedModuleError: trained parameters have fp32 masters on the nodes, but this low-precision part has none.
        """
        if self._has_masters and part.dtype in _LOW:
            raise UnsupportedModuleError(
                f"{part.names[0]} is trained from now on, but was frozen when optimizer nodes were given it, and they keep no fp32 master of it: "
                f"let it be trained in the first batch, or use master_weights=False or {self.cure}"
            )
        super().thaw(part)
        self.run = ""  # a restarted run may lay out the units differently

    @property
    def is_kept(self) -> bool:
        """Whether nodes keep their values for a restart, which must lay them out in the same way: not if trained parameters are frozen
        now."""
        frozen = (p.is_trained and not all(self.parameters[n].requires_grad for n in p.names) for p in self.parts)
        return bool(self.run) and not any(frozen)

    def place_of(self, num_places: int) -> dict[int, int]:
        """Return the node of each unit, out of ``num_places`` nodes; the units of a stage are on different nodes."""
        num_bytes = {i: part.numel * part.dtype.itemsize for i, part in enumerate(self.parts)}
        return assign(num_bytes, num_places, stage_of={i: part.stage for i, part in enumerate(self.parts)})

    def _new_shard(self, numel: int, like: Tensor) -> Tensor:
        return torch.zeros(0, dtype=like.dtype)

    def connect(self, links: Sequence[NodeLink], place_of: Mapping[int, int]) -> None:
        """Use the nodes at the other ends of ``links``, which are closed when this object is garbage-collected.

        ``place_of``: for each unit, the index of its node in ``links``."""
        self.links = links
        weakref.finalize(self, _close_all, links)
        self._link_of = {index: links[place] for index, place in place_of.items()}

    def lay_out(
        self,
        *,
        by_elements: bool,
        bring: Callable[[Sequence[str]], None] | None = None,
        former: StageShards | None = None,
    ) -> list[Piece]:
        """Send the parameters to the nodes; see StageShards for the arguments. Returns no pieces: nodes hold whole parts."""
        if former is not None:
            bring = functools.partial(former.bring_into, self.parameters)
        for part in self.parts:
            if bring is not None:
                bring(part.names)
            if self._adopted:
                self._let_go_of(part)
            else:
                self._keep(part)
        if former is not None:
            former.queue.close()
        self.version = self._adopted or 1
        return []

    def has(self, part: Part) -> bool:
        """Return False: a worker holds no shards."""
        return False

    def link_of(self, part: Part) -> tuple[NodeLink, int]:
        """Return the link to the node that holds a part, and the number of its unit."""
        index = next(i for i, own in enumerate(self.parts) if own is part)
        return self._link_of[index], index

    def _keep(self, part: Part) -> None:
        if self.replica == 0:
            (buffer,) = allocate([(part.numel, part.dtype)], torch.device("cpu"))
            with torch.no_grad():
                for name, view in part.views(buffer).items():
                    view.copy_(self.parameters[name])
            link, index = self.link_of(part)
            link.ask({"ask": "keep", "unit": index, "values": buffer, "version": self.version + 1})
        self._let_go_of(part)

    def _let_go_of(self, part: Part) -> None:
        for name in part.names:
            self._let_go(name)

    def _start(self, parts: Sequence[Part], buffers: Sequence[Tensor]) -> Work:
        version = self.version
        missing = [pair for pair in zip(parts, buffers, strict=True) if not self._has(*pair)]

        def bring() -> None:
            alone = []
            with self._host_memory.receiving([buffer for _, buffer in missing]) as hosts:
                for (part, _), host in zip(missing, hosts, strict=True):
                    link, index = self.link_of(part)
                    ask = functools.partial(self._ask, part, host, version=version)
                    if index in self.aggregators:
                        self.aggregators[index].bring(index, host, ask)
                    else:
                        alone.append((link, ask))
                at_once(alone)

        return self.queue.start(bring, "bucket_gather")

    def _ask(self, part: Part, host: Tensor, *, version: int, whole: bool = False) -> None:
        link, index = self.link_of(part)
        link.ask({"ask": "fetch", "unit": index, "version": version, "whole": whole}, into=[host])

    def _on_host(self, part: Part, *, whole: bool = False) -> Tensor:
        """Fetch a part to the host, without the aggregator: other workers may not want the same part."""
        (host,) = allocate([(part.numel, part.dtype)], torch.device("cpu"))
        self._ask(part, host, version=self.version, whole=whole)
        return host

    def _whole(self, part: Part) -> dict[str, Tensor]:
        return part.views(self._on_host(part).to(part.device))

    def _has(self, part: Part, buffer: Tensor) -> bool:
        """Whether a stage's own buffer holds the present version of ``part`` already; records that it will hold it."""
        if not self._keeps or part.stage is None:
            return False
        assert self._buffers is not None
        if all(own.data_ptr() != buffer.data_ptr() for own in self._buffers.of(part.stage)):
            return False  # not a stage's buffer
        wanted = self.link_of(part)[1], self.version
        found, self._kept[buffer.data_ptr()] = self._kept.get(buffer.data_ptr()), wanted
        return found == wanted

    def settle(self) -> None:
        """Wait until the nodes have checked and finished the last commit: layers may have been updated before it.

        Raises:
            HolmesError: the commit, or the step, is invalid.
        """
        for link in self.links:
            link.ask({"ask": "settle", "window": self.committed})

    def collect(self, destination: Callable[[str], int]) -> dict[str, Tensor]:
        """Return whole parameters; see StageShards. Each replica fetches only the parts of which it wants a parameter."""
        self.settle()
        return {
            name: view.clone()
            for part in self.parts
            if any(destination(name) == self.replica for name in part.names)
            for name, view in part.views(self._on_host(part)).items()
            if destination(name) == self.replica
        }

    def each_whole(self, destination: Callable[[str], int] | None = None) -> Iterator[tuple[str, Tensor]]:
        """See StageShards. Each replica fetches only the parts of which it wants a parameter."""
        self.settle()
        for part in self.parts:
            wanted = [name for name in part.names if destination is None or destination(name) == self.replica]
            if wanted:
                give_back_freed_memory()  # of the part before, which is large
                views = self._whole(part) if destination is None else part.views(self._on_host(part))
                yield from ((name, views[name]) for name in wanted)

    def hold(self, names: Collection[str]) -> list[Part]:
        """Refuse: hooks that read parameters are rejected before they get here."""
        raise AssertionError(f"a hook is shown {names}, which optimizer nodes hold")

    def put(self, write: Callable[[], None]) -> None:
        super().put(write)
        self.version += 1

    def abandon(self) -> None:
        """Note that the run has failed. A single worker can still get the last step's values in :meth:`close`; several workers close
        their links at once."""
        self._has_failed = True
        if self.num_replicas > 1:
            for link in self.links:
                link.close()

    def close(self) -> None:
        """Give each parameter its values again, unless ``stays`` is set. If a failure prevents the nodes from sending the values of the
        last step, parameters stay NaN placeholders."""
        self.stays &= not self._has_failed
        ends_alone = self._has_failed and self.num_replicas == 1
        for link in self.links if ends_alone else ():
            link.wait_at_most(_LAST_VALUES_S)
        try:
            self.settle()
            for part in () if self.stays else self.parts:
                if self._has_failed:
                    buffer = self._on_host(part, whole=True).to(part.device)
                else:
                    (buffer,) = allocate([(part.numel, part.dtype)], part.device)
                    self._start([part], [buffer]).wait()
                for name, view in part.views(buffer).items():
                    dtensor.replace_local(self.parameters[name], view.clone())
            if not (self._has_failed and self.run):  # otherwise nodes keep the values for a restart
                for link in self.links:
                    link.ask({"ask": "rest"})
            for aggregator in dict.fromkeys(self.aggregators.values()):  # in the same order on all
                aggregator.close()
        except HolmesError:
            if not self._has_failed:
                raise
        self._buffers = None


def assign(
    num_bytes: Mapping[int, int], num_places: int, *, stage_of: Mapping[int, int | None] | None = None
) -> dict[int, int]:
    """Assign a place to each unit, so that all places hold about the same number of bytes: the largest units first, each at the place
    that holds least. Units of one stage are at different places, as long as there are enough."""
    loads = [0] * num_places
    taken: dict[int, set[int]] = {}
    found = {}
    for index in sorted(num_bytes, key=lambda i: (-num_bytes[i], i)):
        stage = None if stage_of is None else stage_of[index]
        used = set() if stage is None else taken.setdefault(stage, set())
        if len(used) == num_places:
            used.clear()
        found[index] = min((place for place in range(num_places) if place not in used), key=lambda place: loads[place])
        used.add(found[index])
        loads[found[index]] += num_bytes[index]
    return found


def _close_all(links: Sequence[NodeLink]) -> None:
    for link in links:
        link.close()


def _place(stage: int | None) -> int:
    return -1 if stage is None else stage
