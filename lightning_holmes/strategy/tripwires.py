"""Tripwires: lets the user's hooks read the same parameters and gradients as in plain Lightning.

A rank holds the parameters of its own stages. While a hook of the user runs, a TorchFunctionMode sees each operation that would
read a parameter or a ``.grad``, in whichever file the operation is written. The first such operation broadcasts that tensor from
the rank that holds it, the second one all remaining tensors; after the hook other stages' parameters are placeholders again.
Meanwhile the optimizer's groups show all parameters. So a norm, a ranking or a copy made in a hook covers the whole
module. Changes that a hook makes take effect on the ranks that hold the parameter.

If parameters are sharded, an operation gathers the parts that it reads, and releases those of the operation before.

Broadcasts take all ranks of a pipeline (gathers of shards: all ranks), but a hook may read on one rank only (``if trainer.is_global_zero``).
So there are rounds: each rank says whether it wants something, then what, and everything wanted is brought to all ranks. At the end of a
hook, and before the hook calls a collective of the strategy, a rank takes part in rounds until no rank wants anything.

In ``on_exception`` and in the hooks of a batch's transfer ranks do not meet, and a read of what this rank lacks is refused. Not watched, so
that an absent parameter refuses to be read (comm/absent.py): Lightning's own callbacks, except for pruning, which ranks all parameters; data
modules; other threads. If the user has no hooks, nothing is wrapped.

    with Tripwires(trainer, pipeline, job, groups=groups, rank_of=plan.rank_of, absent=run.absent, before=wait) as tripwires:
        ...
        with tripwires.lifted():        # around the strategy's own work inside a hook
            optimizer.step()
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_holmes.checkpoint import broadcast_from
from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import READS_NO_VALUE
from lightning_holmes.comm.objects import all_gather_values, any_of
from lightning_holmes.comm.p2p import exchange
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import MODULE_HOOK, hook_calls
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.pipeline.noticed_functions import COUNTING, NoticedFunctions
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.replacements import Replacements
from lightning_holmes.strategy.building import WAITS
from lightning_holmes.strategy.compat.finetuning import ParameterGroups
from lightning_holmes.strategy.compat.optimizer_states import hiding_states
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.user_hooks import GRADIENT_HOOKS, overridden_hooks, users_callbacks

TOPIC_WISHES, TOPIC_GRADIENTS = 12, 13
_FAILED = "on_exception"
_OF_DATA = "each moves its batches alone: read it in on_train_batch_start, and keep what this hook needs"
_APART = {
    _FAILED: "they do not meet any more when one has failed: go on from a checkpoint (ModelCheckpoint, or snapshot_every_n_steps)",
    **dict.fromkeys(("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"), _OF_DATA),
}
"""The hooks in which ranks do not meet, so that what a rank lacks is refused there; and why, with what to do, in words after "all ranks, and"."""
_BASES = (pl.LightningModule, pl.Callback)
_WATCHED = {
    *(n for base in _BASES for n in dir(base) if n.startswith("on_") and callable(getattr(base, n))),
    *(*GRADIENT_HOOKS, "lr_scheduler_step", "optimizer_zero_grad", *_APART),
    *(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")),
} - {"on_load_checkpoint"}
_READ_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]
_WRITE_GRAD = Tensor.grad.__set__  # type: ignore[union-attr]
_READ_NOTHING = (READS_NO_VALUE - {_READ_GRAD}) | {Tensor.grad.__delete__}  # type: ignore[union-attr]
Wish = tuple[str, str]
"""What a rank wants to read: "value" or "grad", and the name of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """What this rank lacks of the whole module between steps.

    Attributes:
        hidden: for "value" and "grad", if no rank has it whole, and for "reads grad" where it may only be written: why, and what to do.
        shards: the shards in which parameters live, or None.
        waiting: the names of parameters that have no values yet.
        is_split: other stages have parameters that this rank lacks.
        splits_states: this rank has only a part of the optimizer's states.
    """

    hidden: Mapping[str, str] = field(default_factory=dict)
    shards: StageShards | None = None
    waiting: Collection[str] = ()
    is_split: bool = False
    splits_states: bool = False

    @property
    def takes_all_ranks(self) -> bool:
        """Whether reading a parameter takes all ranks."""
        return self.is_split or self.shards is not None

    @property
    def is_nothing(self) -> bool:
        """Whether this rank has everything."""
        return not (self.takes_all_ranks or self.hidden or self.waiting or self.splits_states)


@dataclass(slots=True, kw_only=True)
class _Hook:
    """A hook that is running, with its ``name`` for messages.

    Attributes:
        meets: whether all ranks run the hook, so that tensors can be brought in it.
        shows_groups: whether the optimizer's groups show all parameters in it.
        brought: the values and gradients that every rank has by now.
        arming: the contexts that are active while the user's code runs; None while the strategy's own code runs.
    """

    name: str
    absent: Absent
    meets: bool
    shows_groups: bool
    brought: set[Wish] = field(default_factory=set)
    arming: ExitStack | None = None


class _Watch(TorchFunctionMode):
    """Calls ``tell`` before an operation that reads known parameters, with their names and "value" or "grad", or "written grad" if it writes a
    ``.grad``."""

    def __init__(self, names: Mapping[int, str], tell: Callable[[str, list[str]], None]) -> None:
        super().__init__()
        self._names = names
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _READ_NOTHING or func == _WRITE_GRAD:
            names = [self._names[id(t)] for t in _tensors((*args, *kwargs.values())) if id(t) in self._names]
            if names and func not in (_READ_GRAD, _WRITE_GRAD):
                self._tell("value", names)
            elif names and func == _WRITE_GRAD and _caller() != "zero_grad":
                self._tell("written grad", names)
            elif names and _caller() != "zero_grad":  # zero_grad only checks whether there is a gradient
                self._tell("grad", names)
        return func(*args, **kwargs)


@contextmanager
def refusing_reads(pipeline: PipelineModule, waiting: Collection[str], place: str) -> Iterator[None]:
    """Inside, refuse to read values of the parameters ``waiting``, which have no values yet. ``place``: the user's function, for the message.

    Raises:
        UnsupportedModuleError: one is read; the message names the parameter.
    """
    with _Watch(pipeline.names, functools.partial(_refuse_early, waiting, place)):
        yield


def _refuse_early(waiting: Collection[str], place: str, kind: str, names: list[str]) -> None:
    early = [name for name in names if name in waiting]
    if early and kind == "value":
        raise UnsupportedModuleError(f"{place} reads {early[0]}, but {WAITS}")


def _caller() -> str:
    """Return the name of the function that calls the operation which a TorchFunctionMode handles."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    return "" if frame is None else frame.f_code.co_name


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Tripwires(Replacements):
    """Inside, the user's hooks on this rank see the whole module. All ranks must enter, together.

    Args:
        pipeline: this rank's part of the module.
        groups: the parameter groups of a fit's optimizers.
        rank_of: returns the pipeline rank of a stage.
        absent: returns what this rank lacks at the moment.
        before: called before each hook of the user.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        pipeline: PipelineModule,
        job: Job,
        *,
        groups: ParameterGroups | None,
        rank_of: Callable[[int], int],
        absent: Callable[[], Absent],
        before: Callable[[], None],
    ) -> None:
        super().__init__()
        self._trainer = trainer
        self._pipeline = pipeline
        self._job = job
        self._groups = groups
        self._rank_of = rank_of
        self._absent = absent
        self._before = before
        self._hook: _Hook | None = None
        self._brought = ExitStack()  # puts placeholders back
        self._told: set[str | tuple[str, str]] = set()
        self._raw = NoticedFunctions(torch.distributed, COUNTING)

    def __enter__(self) -> Self:
        module: Any = self._trainer.lightning_module
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        callbacks = [*users_callbacks(callbacks), *(c for c in callbacks if type(c) is pl.callbacks.ModelPruning)]
        found = list(overridden_hooks(module, callbacks, sorted(_WATCHED)))
        keys = _numbered([f"{type(owner).__name__}.{hook}" for owner, hook in found])
        everywhere = set(keys).intersection(*self._job.connection.all_gather(keys))
        of_module = {}
        for (owner, hook), key in zip(found, keys, strict=True):
            if owner is module:
                of_module[hook] = key in everywhere
            else:
                self.replace(owner, **{hook: self._watched(owner, hook, meets=key in everywhere)})
        if of_module:
            self._watch_module(module, of_module)
        return self

    def _watched(self, owner: Any, name: str, *, meets: bool) -> Callable[..., Any]:
        hook = getattr(owner, name)

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._inside(owner, name, meets=meets):
                return hook(*args, **kwargs)

        return run

    def _watch_module(self, module: Any, hooks: Mapping[str, bool]) -> None:
        """Wrap the hooks where Lightning calls them: functions set on the module would be copied and pickled with it."""
        trainer, calls = self._trainer, hook_calls()
        own = getattr(calls, MODULE_HOOK)

        @functools.wraps(own)
        def call(caller: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
            watched = caller is trainer and hook_name in hooks
            with self._inside(module, hook_name, meets=hooks[hook_name]) if watched else nullcontext():
                return own(caller, hook_name, *args, **kwargs)

        self.replace(calls, **{MODULE_HOOK: call})

    # around a hook

    @contextmanager
    def _inside(self, owner: Any, name: str, *, meets: bool) -> Iterator[None]:
        if name != _FAILED:
            self._before()
        outer, absent = self._hook, self._absent()
        # the outer hook, which calls this one, is watched already
        if absent.is_nothing or (outer is not None and outer.arming is not None):
            yield
            return
        self._hook = hook = _Hook(
            name=f"{type(owner).__name__}.{name}",
            absent=absent,
            meets=meets and name not in _APART and absent.takes_all_ranks and not self._job.connection.failed,
            # for these, compat/finetuning.py shows the groups, and keeps changes
            shows_groups=not isinstance(owner, pl.callbacks.BaseFinetuning),
        )
        try:
            self._arm(hook)
            try:
                yield
            finally:
                self._disarm(hook)
            self._settle(hook)
        finally:
            self._brought.close()
            self._hook = outer

    def _arm(self, hook: _Hook) -> None:
        with ExitStack() as stack:
            if self._groups is not None and hook.shows_groups:
                stack.enter_context(self._groups.shown())
            if hook.absent.splits_states:
                stack.enter_context(hiding_states(self._trainer.strategy.optimizers, hook.name))
            stack.enter_context(_Watch(self._pipeline.names, self._on_read))
            if self._job.placement.pipeline_parallel_size > 1:
                stack.enter_context(self._raw.noticing(functools.partial(self._tell_raw, hook)))
            hook.arming = stack.pop_all()

    def _disarm(self, hook: _Hook) -> None:
        arming, hook.arming = hook.arming, None
        if arming is not None:
            arming.close()

    def lifted(self) -> AbstractContextManager[None]:
        """Return a context for the strategy's own work, in which nothing is watched and placeholders are back. In a hook of the user all ranks
        must call."""
        hook = self._hook
        return nullcontext() if hook is None or hook.arming is None else self._lifted(hook)

    @contextmanager
    def _lifted(self, hook: _Hook) -> Iterator[None]:
        self._disarm(hook)
        self._settle(hook)
        self._brought.close()
        hook.brought.clear()
        try:
            yield
        finally:
            self._arm(hook)

    # reading and bringing

    def _on_read(self, kind: str, names: list[str]) -> None:
        """Bring these parameters, or their gradients, before an operation reads them; called by the mode.

        Raises:
            UnsupportedModuleError: they cannot be read here; the message says why and what to do.
        """
        hook = self._hook
        assert hook is not None
        absent = hook.absent
        _refuse_early(absent.waiting, hook.name, kind, names)
        verb, kind = ("writes", "grad") if kind == "written grad" else ("reads", kind)
        what = f"{'the gradient of ' if kind == 'grad' else ''}{names[0]}"
        why = absent.hidden.get(kind)
        if not hook.name.endswith(".optimizer_zero_grad"):  # which reads gradients in order to empty them
            why = why or absent.hidden.get(f"{verb} {kind}")
        if why is not None:
            raise UnsupportedModuleError(f"{hook.name} {verb} {what}, but {why}")
        if verb == "writes" or not absent.takes_all_ranks:  # a written gradient stays on the rank that writes it
            return
        lacking = [n for n in names if (kind, n) not in hook.brought]
        why_apart = _APART.get(hook.name.rpartition(".")[2])
        if why_apart is not None and absent.shards is None:
            lacking = [n for n in lacking if n not in self._pipeline.local_parameters]
        if not lacking:
            return
        if not hook.meets:
            why = why_apart or "not all of them have this hook: add the callback on every rank"
            raise UnsupportedModuleError(
                f"{hook.name} reads {what}, which takes all ranks where the module is split into stages or lives in shards, and {why}"
            )
        wanted: Collection[str] = lacking if absent.shards is None else names
        if absent.shards is None and (len(lacking) > 1 or any(brought == kind for brought, _ in hook.brought)):
            self._tell_cost(hook, kind)
            wanted = self._pipeline.parameters
        self._round(hook, {(kind, name) for name in wanted})

    def _tell_cost(self, hook: _Hook, kind: str) -> None:
        if hook.name in self._told:
            return
        self._told.add(hook.name)
        size = sum(p.numel() * p.element_size() for p in self._pipeline.parameters.values()) / 2**20
        what, cure = "parameters", ""
        if kind == "grad":
            what, cure = (
                "gradients",
                "; Trainer(gradient_clip_val=...) and trainer.strategy.global_grad_norm(parameters) send numbers only",
            )
        pl.utilities.rank_zero_warn(
            f"{hook.name} reads the module's {what}: those of all stages, {size:.1f} MiB, are brought to every rank whenever it "
            f"does{cure}"
        )

    def _tell_raw(self, hook: _Hook, name: str) -> None:
        if (hook.name, name) in self._told:
            return
        self._told.add((hook.name, name))
        size = self._job.placement.pipeline_parallel_size
        pl.utilities.rank_zero_warn(
            f"{hook.name} calls torch.distributed.{name} over all ranks: each of the {size} stages of a replica takes part with the "
            f"same values, so that a sum is {size} times that of DDP and each value is gathered {size} times; a mean is right. Over "
            f"replicas: self.all_gather(value), or trainer.strategy.reduce(value, reduce_op='sum')"
        )

    def _settle(self, hook: _Hook) -> None:
        """Take part in rounds until no rank wants anything."""
        while hook.meets and self._round(hook, set()):
            pass

    def _round(self, hook: _Hook, wishes: set[Wish]) -> bool:
        """Bring everything that any rank wants; return whether any rank wants something. All ranks of the pipeline must call; with shards, all
        ranks."""
        shards, groups, parameters = hook.absent.shards, self._job.groups, self._pipeline.parameters
        with self._job.explaining():
            if shards is not None:
                anybody = any_of(bool(wishes), groups.everyone_on_host)
                if anybody:
                    self._bring_parts(hook, shards, wishes)
                return anybody
            assert groups.p2p is not None
            if not groups.p2p.anybody(bool(wishes), f"all ranks read in {hook.name} and leave it"):
                return False
            wanted: set[Wish] = set().union(*self._exchange(TOPIC_WISHES, sorted(wishes)))
            lacking = wanted - hook.brought
            with torch.no_grad():
                self._bring_values([name for name in parameters if ("value", name) in lacking])
                self._bring_gradients([name for name in parameters if ("grad", name) in lacking])
            hook.brought |= wanted
            return True

    def _bring_parts(self, hook: _Hook, shards: StageShards, wishes: set[Wish]) -> None:
        """Gather the parts that any rank wants on all ranks, and release those of the round before."""
        everyone = all_gather_values(sorted(wishes), self._job.groups.everyone_on_host)
        wanted: set[Wish] = set().union(*everyone)
        self._brought.close()
        with torch.inference_mode(False), torch.no_grad():
            parts = shards.hold({name for _, name in wanted})
            self._brought.callback(shards.let_go, parts)
            names = {name for _, name in wanted}.union(*(part.names for part in parts))
            if hook.absent.is_split:
                names = names.union(*self._exchange(TOPIC_WISHES, sorted(names)))
                self._bring_values([name for name in self._pipeline.parameters if name in names])
        hook.brought = {("value", name) for name in names}

    def _exchange(self, topic: int, mine: Any) -> list[Any]:
        """Return ``mine`` of each rank of the pipeline. All of them must call."""
        assert self._job.groups.p2p is not None
        return exchange(self._job.groups.p2p, topic, mine)

    def _from_owner(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` of the rank that owns the parameter; other ranks pass a tensor of its shape and dtype."""
        return broadcast_from(tensor, self._rank_of(self._pipeline.owner_stage(name)), self._job.groups.pipeline)

    def _bring_values(self, names: list[str]) -> None:
        for name in names:
            parameter = self._pipeline.parameters[name]
            data = self._from_owner(name, dtensor.detached(parameter))
            if name not in self._pipeline.local_parameters:
                dtensor.replace_local(parameter, data)
                self._brought.callback(self._pipeline.let_go, name)

    def _bring_gradients(self, names: list[str]) -> None:
        if not names:
            return
        parameters = self._pipeline.parameters
        mine = [n for n in names if self._pipeline.is_owner(n) and parameters[n].grad is not None]
        present = set().union(*self._exchange(TOPIC_GRADIENTS, mine))
        for name in names:
            if name not in present:
                continue
            parameter = parameters[name]
            like = dtensor.detached(parameter if parameter.grad is None else parameter.grad)
            data = self._from_owner(name, like)
            if name not in self._pipeline.local_parameters:
                parameter.grad = dtensor.like(data, parameter)
                self._brought.callback(setattr, parameter, "grad", None)


def _numbered(names: list[str]) -> list[str]:
    """Return each name with the number of its earlier occurrences, so that none occurs twice."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        found.append(f"{name} {seen[name]}")
        seen[name] += 1
    return found
