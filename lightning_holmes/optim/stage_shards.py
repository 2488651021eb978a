"""StageShards: parameters that are sharded over the replicas and whole only while their stage is computed.

A stage's parameters lie side by side in flat units, of one type each, cut into as many shards as there are replicas.
Stages alternate between two buffers, as large as the largest stage: a stage uses the same one in its forward and its backward, since
autograd keeps views of its parameters. This needs no torch internals: a parameter's ``data`` is a view of the buffer while its stage
is held, and a NaN placeholder otherwise; a step that reads a placeholder (absent.py), or changes a parameter (the change would be
lost), raises an error. Parameters that several stages read (tied embeddings) are gathered first and freed last, in memory of their
own, and so are the parameters of stages that are small beside the largest one: a message of their own would cost more than it saves.

    shards = StageShards(parameters, stages=(0, 1, 2), stages_of=..., shared={}, size=4, rank=0, queue=queue, collective=...)
    pieces = shards.lay_out(by_elements=True)      # from now on this rank holds only its shards
    shards.unshard(1).wait()                         # all replicas: stage 1 is whole
    shards.reshard(1)
    values = shards.collect(lambda name: 0)        # whole, on replica 0
    shards.close()                                 # whole on every replica again

Source: arXiv 2106.02679, section 4; the ring of buffers follows Fast-LLM by the same author.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import Absence, Source, placeholder
from lightning_holmes.comm.collectives import Collective
from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.comm.parameter_exchange import ParameterExchange
from lightning_holmes.comm.queue import CommQueue, Work, use_here
from lightning_holmes.optim.shard_memory import ShardMemory
from lightning_holmes.optim.stage_buffers import StageBuffers, allocate
from lightning_holmes.optim.unit import Piece, Unit, cut_by_elements, deal_parameters, holders_of, side_by_side

_SMALL = 1 / 16  # of the largest stage's bytes: the memory that small stages may take beside the buffers


class StageShards(ShardMemory, ParameterExchange):
    """See ShardMemory; the exchange of steps that train nothing, too. All replicas must create one, with equal arguments, and
    call its methods together.

    Args:
        parameters: this rank's whole parameters, by name.
        stages: the stages of this rank, ascending.
        stages_of: for each parameter, the stages of this rank that read it; without an entry, any of them may.
        shared: parameters that other pipeline ranks hold, too: for each set of ranks, the names.
        size, rank: the number of replicas, and the index of this one.
        collective: gathers units, in ``queue``; None if there is one replica.
        absence: tracks the module's placeholders; the code that runs a step clears it at the step's end.
        compiled: parameters that compiled code reads, by name, which must stay ordinary tensors on their stage; the value says whether the
            compiled code runs on their stages only. If it does not, reading them on another stage raises no error.
    """

    cure = 'sharding="none"'
    """The argument of the strategy that keeps parameters whole."""
    is_whole = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        stages: Sequence[int],
        stages_of: Mapping[str, Collection[int]],
        shared: Mapping[tuple[int, ...], Sequence[str]],
        size: int,
        rank: int,
        queue: CommQueue,
        collective: Collective | None,
        absence: Absence | None = None,
        compiled: Mapping[str, bool] | None = None,
    ) -> None:
        super().__init__(dict(parameters), size=size, rank=rank)
        self.by_elements = True
        """Whether units are cut by elements, or else into whole parameters."""
        self.stays = False
        """Whether parameters stay sharded after :meth:`close`."""
        self._pieces: list[Piece] = []
        self._holders: dict[str, int] = {}
        self.queue, self.collective = queue, collective
        self.stages, self.shared = tuple(stages), shared
        self._stages_of = stages_of
        self._ranks_of = {name: ranks for ranks, names in shared.items() for name in names}
        self._of_stage: dict[int | None, list[Unit]] = {}
        self._buffers: StageBuffers | None = None
        self._abandoned = False
        self._held: set[int | None] = set()
        self._common: tuple[Work, Sequence[Tensor]] | None = None
        self._absence = Absence() if absence is None else absence
        self._compiled = {} if compiled is None else compiled
        self._sources = {
            name: Source(absence=self._absence, what=name, cure=self.cure, blank=placeholder(dtensor.detached(p)))
            for name, p in self.parameters.items()
        }

    # layout

    def lay_out(
        self,
        *,
        by_elements: bool,
        bring: Callable[[Sequence[str]], None] | None = None,
        former: "StageShards | None" = None,
    ) -> list[Piece]:
        """Cut the parameters, and keep this replica's shard of them.

        Called again, it returns the same pieces, or cuts the parameters anew if ``by_elements`` has changed.

        Args:
            bring: loads the values of the named parameters, one unit at a time, so that never all of them are whole; None: all are whole
                already.
            former: shards that hold the same parameters, and are replaced by these.
        """
        if self.units and by_elements == self.by_elements:
            return self._pieces
        if self.units:
            bring = functools.partial(self.bring_into, self.parameters, units=list(self.units))
        self.by_elements = by_elements
        self._pieces, self.units, self._of_stage, self._holders = [], [], {}, {}
        for stage, ranks, names in self.grouped():
            unit = self._cut(names, stage, ranks)
            same = None if former is None else next((own for own in former.units if unit.is_like(own)), None)
            if same is not None:
                unit.values = same.values
                self._add(unit, is_new=False)
                continue
            if former is not None:
                former.bring_into(self.parameters, names)
            elif bring is not None:
                bring(names)
            self._add(unit)
        if former is not None:
            former.queue.close()
        self._make_buffers()
        return self._pieces

    def grouped(self) -> list[tuple[int | None, tuple[int, ...], list[str]]]:
        """Return, for each unit to make, the stage that reads it, the pipeline ranks that share it, and its parameter names."""
        groups: dict[tuple[int | None, tuple[int, ...], torch.dtype, torch.device, bool], list[str]] = {}
        only = {n: next(iter(s)) for n, s in self._stages_of.items() if len(s) == 1 and n not in self._ranks_of}
        small = _small_stages({name: stage for name, stage in only.items() if name in self.parameters}, self.parameters)
        for name, parameter in self.parameters.items():
            stage = only.get(name)
            stage = None if stage in small else stage
            ranks = self._ranks_of.get(name, ())
            key = stage, ranks, parameter.dtype, parameter.device, parameter.requires_grad
            groups.setdefault(key, []).append(name)
        return [(stage, ranks, names) for (stage, ranks, *_), names in groups.items()]

    def _make_buffers(self) -> None:
        by_stage = {stage: _sizes(self._of_stage.get(stage, ())) for stage in self.stages}
        device = next((unit.device for unit in self.units), torch.device("cpu"))
        self._buffers = StageBuffers(by_stage, device)

    def _cut(self, names: Sequence[str], stage: int | None, ranks: tuple[int, ...]) -> Unit:
        """Make the next unit of these parameters, side by side, and record its pieces."""
        index = len(self.units)
        unit = side_by_side(
            {name: self.parameters[name] for name in names}, multiple_of=self.size, stage=stage, ranks=ranks
        )
        if self.by_elements:
            self._pieces += cut_by_elements([unit], self.size, first=index)
        else:
            self._pieces += deal_parameters(unit, self.size, index=index)
        unit.values = self._new_shard(unit.numel, self.parameters[names[0]])
        return unit

    def _new_shard(self, numel: int, like: Tensor) -> Tensor:
        """Allocate this replica's shard of a unit of ``numel`` elements."""
        return torch.zeros(numel // self.size, dtype=like.dtype, device=like.device)

    def destination(self, name: str) -> int:
        """Return the replica that saves a parameter to a checkpoint folder."""
        if not self._holders:
            self._holders = holders_of(self.parameters, self._pieces, self.size)
        return self._holders[name]

    def thaw(self, unit: Unit) -> None:
        """Mark a unit as trained whose parameters were frozen when they were laid out. All ranks that hold it must call."""
        unit.is_trained = True

    def _add(self, unit: Unit, *, is_new: bool = True) -> None:
        self.units.append(unit)
        self._of_stage.setdefault(unit.stage, []).append(unit)
        if is_new:
            self._keep(unit)

    def bring_into(
        self, parameters: Mapping[str, nn.Parameter], names: Collection[str], *, units: Sequence[Unit] | None = None
    ) -> None:
        """Give these parameters (possibly of another copy of the module) their whole values. All replicas must call.

        Args:
            units: those to bring; None: the present ones.
        """
        wanted = set(names)
        for unit in self.units if units is None else units:
            if not wanted.isdisjoint(unit.names):
                for name, view in self._whole(unit).items():
                    if name in wanted:
                        dtensor.replace_local(parameters[name], view)

    def _keep(self, unit: Unit) -> None:
        """Copy this replica's elements of a unit whose parameters are whole into its shard, and free the whole parameters."""
        share = unit.numel // self.size
        begin = self.rank * share
        with torch.no_grad():
            for name, start in zip(unit.names, unit.starts, strict=True):
                flat = self.parameters[name].detach().reshape(-1)
                first, last = max(start, begin), min(start + flat.numel(), begin + share)
                if first < last:
                    unit.values[first - begin : last - begin] = flat[first - start : last - start]
                self._let_go(name)

    def _let_go(self, name: str) -> None:
        dtensor.replace_local(self.parameters[name], self._sources[name].blank)
        if self._compiled.get(name, True):
            self._absence.hide(self.parameters[name], self._sources[name])

    # a step

    def unshard(self, stage: int) -> Work:
        """Start to gather the parameters of ``stage``; they are whole after ``wait`` of the returned work. All replicas must call."""
        if self._common is None and None in self._of_stage:
            units = self._of_stage[None]
            common = allocate(_sizes(units), units[0].device)
            self._common = self._start(units, common), common
        units = self._of_stage.get(stage, [])
        self._held.add(stage)
        assert self._buffers is not None
        buffers = self._buffers.of(stage)
        return _Fetch(self._start(units, buffers), functools.partial(self._arrived, units, buffers))

    def _start(self, units: Sequence[Unit], buffers: Sequence[Tensor]) -> Work:
        def bring() -> None:
            for unit, buffer in zip(units, buffers, strict=True):
                use_here(buffer)
                buffer.view(self.size, -1)[self.rank].copy_(unit.values)
                if self.collective is not None:
                    self.collective.gather(buffer)

        return self.queue.start(
            bring, "bucket_gather", of=f"of {units[0].names[0]} to {units[-1].names[-1]}" if units else ""
        )

    def _arrived(self, units: Sequence[Unit], buffers: Sequence[Tensor]) -> None:
        if self._common is not None and None not in self._held:
            self._common[0].wait()
            self._held.add(None)
            self._show(self._of_stage[None], self._common[1])
        self._show(units, buffers)

    def _show(self, units: Sequence[Unit], buffers: Sequence[Tensor]) -> None:
        for unit, buffer in zip(units, buffers, strict=True):
            for name, view in unit.views(buffer).items():
                parameter = self.parameters[name]
                dtensor.replace_local(parameter, view)
                self._absence.show(parameter, self._sources[name], stays_ordinary=name in self._compiled)

    def reshard(self, stage: int) -> None:
        """Free the parameters of ``stage``, and after the last stage also the parameters that several stages read.

        Raises:
            AbsentValueError: the step has changed one of them.
        """
        self._held.discard(stage)
        leaving = [*self._of_stage.get(stage, ())]
        if not self._held - {None} and self._common is not None:
            leaving += self._of_stage[None]
            self._held.discard(None)
            self._common = None
        for unit in leaving:
            for name in unit.names:
                self._absence.check(self.parameters[name])
                self._let_go(name)

    def start(self) -> None:
        """Free the gradients: the next fetch gathers the updated shards."""
        for unit in self.units:
            unit.gradient = None

    def abandon(self) -> None:
        """Let :meth:`close` gather nothing, after the run has failed: the other replicas do not answer."""
        self._abandoned = True

    # outside of steps

    def collect(self, destination: Callable[[str], int]) -> dict[str, Tensor]:
        """Return whole parameters, each on the replica ``destination(name)``, in memory of their own. All replicas must call."""
        return {name: value.clone() for name, value in self.each_whole(destination)}

    def each_whole(self, destination: Callable[[str], int]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of which this replica is the ``destination`` by name, whole, one unit at a time. All replicas
        must call, and iterate to the end."""
        for unit in self.units:
            give_back_freed_memory()  # of the unit before, which is large
            yield from self._wanted(unit, destination).items()

    def _wanted(self, unit: Unit, destination: Callable[[str], int]) -> dict[str, Tensor]:
        whole = self._whole(unit).items()
        return {name: view for name, view in whole if destination(name) == self.rank}

    def _whole(self, unit: Unit) -> dict[str, Tensor]:
        buffers = allocate(_sizes([unit]), unit.device)
        self._start([unit], buffers).wait()
        return unit.views(buffers[0])

    def hold(self, names: Collection[str]) -> list[Unit]:
        """Make the units that contain ``names`` whole, in newly allocated memory, so that views of it stay valid, and return them.
        All replicas must call."""
        units = [unit for unit in self.units if not set(names).isdisjoint(unit.names)]
        self.bring_into(self.parameters, [name for unit in units for name in unit.names])
        return units

    def let_go(self, units: Iterable[Unit]) -> None:
        """After :meth:`hold`: keep this replica's shard of the values as they are now, and free the whole parameters."""
        for unit in units:
            self._keep(unit)

    def put(self, write: Callable[[], None]) -> None:
        """Make all parameters whole, run ``write``, which writes to them, and keep the new values. All replicas must call."""
        units = self.hold(self.parameters)
        write()
        self.let_go(units)

    def close(self) -> None:
        """Give each parameter its whole values again, in memory of its own. All replicas must call.

        After a failed run (:meth:`abandon`) a single replica still restores them; several replicas restore none. With ``stays`` only the
        buffers of a step are freed."""
        self._buffers = None
        if self.stays:
            return
        for unit in () if self._abandoned and self.size > 1 else self.units:
            # a single replica does not use the queue, which may have failed
            views = unit.views(unit.values) if self.size == 1 else self._whole(unit)
            for name, view in views.items():
                dtensor.replace_local(self.parameters[name], view.clone())
            unit.values = torch.zeros(0)
        self.units.clear()
        self._of_stage.clear()


class _Fetch:
    """A gather that is under way; ``wait`` calls ``arrived`` after it."""

    def __init__(self, work: Work, arrived: Callable[[], None]) -> None:
        self._work, self._arrived = work, arrived

    def wait(self) -> None:
        self._work.wait()
        self._arrived()


def _small_stages(stage_of: Mapping[str, int], parameters: Mapping[str, nn.Parameter]) -> set[int]:
    """Return the smallest stages that together have at most _SMALL of the largest stage's bytes."""
    sizes: dict[int, int] = {}
    for name, stage in stage_of.items():
        sizes[stage] = sizes.get(stage, 0) + parameters[name].numel() * parameters[name].itemsize
    ascending = sorted(sizes, key=lambda stage: (sizes[stage], stage))
    totals = itertools.accumulate(sizes[stage] for stage in ascending)
    return {stage for stage, total in zip(ascending, totals, strict=True) if total <= _SMALL * max(sizes.values())}


def _sizes(units: Iterable[Unit]) -> list[tuple[int, torch.dtype]]:
    return [(unit.numel, unit.dtype) for unit in units]
