"""Load saved states into a module and an optimizer of which this rank holds a part; only that part is read."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.checkpoint.folder import FolderOptimizerState, FolderStateDict
from lightning_holmes.checkpoint.plain import load_optimizer_state_dict, load_states, states_by_name
from lightning_holmes.comm import dtensor
from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.errors import CheckpointError
from lightning_holmes.optim.shard_states import OwnedStates
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.torch_private import has_load_hooks

_SHOWN = 10


def load_module_state(
    pipeline: PipelineModule, saved: Mapping[str, Any], *, strict: bool, only: Collection[str] | None = None
) -> None:
    """Load the part of ``saved``, the whole module's state, that this rank's stages need; all ranks must call.

    Args:
        only: load only these parameters; if empty, only entries that are not parameters; None: everything.

    Raises:
        CheckpointError: the state is another model's: shapes differ, or names differ and ``strict`` is set.
    """
    module = pipeline.module
    first_names = {id(p): n for n, p in module.named_parameters()}
    expected = module.state_dict(keep_vars=True)
    elsewhere = {
        key
        for key, value in expected.items()
        if id(value) in first_names and first_names[id(value)] not in pipeline.local_parameters
    }
    if only is not None:
        names_of = {key: first_names.get(id(value)) for key, value in expected.items()}
        elsewhere |= {key for key, name in names_of.items() if (name not in only if only else name is not None)}
    if overrides_loading(module):
        _load_as_overridden(module, saved, strict=strict, elsewhere=elsewhere)
        return
    # load hooks may know old names
    may_rename = renames(module)
    names = [key for key in saved if key in expected or may_rename or strict]
    missing = [key for key in expected if key not in saved]
    unexpected = [key for key in saved if key not in expected]
    if strict and (missing or unexpected) and not may_rename:
        raise CheckpointError(_another_model(type(module).__name__, missing, unexpected))
    wanted = [key for key in names if key not in elsewhere]
    part = saved.read_many(wanted) if isinstance(saved, FolderStateDict) else {key: saved[key] for key in wanted}
    for key, value in part.items():
        if key in expected and isinstance(value, Tensor) and value.shape == expected[key].shape:
            part[key] = dtensor.share_of(value, expected[key])
    missing, unexpected = _load(module, part)
    missing = [key for key in missing if key not in elsewhere]
    if strict and (missing or unexpected):
        raise CheckpointError(_another_model(type(module).__name__, missing, unexpected))


def overrides_loading(module: nn.Module) -> bool:
    """Whether a module has a ``load_state_dict`` of its own, which may rename entries, ignore ``strict`` or return nothing."""
    return type(module).load_state_dict is not nn.Module.load_state_dict


def _load_as_overridden(
    module: nn.Module, saved: Mapping[str, Any], *, strict: bool, elsewhere: Collection[str]
) -> None:
    """Call the module's own ``load_state_dict`` with the whole state, as Lightning does; what it hands on to torch's is loaded without
    the entries ``elsewhere``, by their names then."""
    load = nn.Module.load_state_dict

    def load_here(self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if self is not module:
            return load(self, state_dict, strict=strict, assign=assign)
        here = {key: value for key, value in state_dict.items() if key not in elsewhere}
        found = load(self, here, strict=False, assign=assign)
        found.missing_keys[:] = [key for key in found.missing_keys if key not in elsewhere]
        if strict and (found.missing_keys or found.unexpected_keys):
            raise CheckpointError(_another_model(type(module).__name__, found.missing_keys, found.unexpected_keys))
        return found

    nn.Module.load_state_dict = load_here  # type: ignore[method-assign]
    try:
        with _explaining(module):
            module.load_state_dict(dict(saved), strict=strict)
    finally:
        nn.Module.load_state_dict = load  # type: ignore[method-assign]


def renames(module: nn.Module) -> bool:
    """Whether a module has load hooks, which may load an entry under another name."""
    return any(map(has_load_hooks, module.modules()))


def load_whole_state(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load the whole module's state, in one process without a trainer.

    Raises:
        CheckpointError: the state is another model's.
    """
    if overrides_loading(module):
        _load_as_overridden(module, saved, strict=True, elsewhere=())
        return
    missing, unexpected = _load(module, saved)
    if missing or unexpected:
        raise CheckpointError(_another_model(type(module).__name__, missing, unexpected))


def _load(module: nn.Module, saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Load ``saved``; return the names that ``saved`` lacks and those that the module lacks."""
    with _explaining(module):
        missing, unexpected = module.load_state_dict(saved, strict=False)
    return missing, unexpected


@contextmanager
def _explaining(module: nn.Module) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except RuntimeError as error:  # torch lists all entries whose shapes differ, one per line
        differences = [line.strip().rstrip(".") for line in str(error).splitlines()[1:]]
        text = f"the checkpoint is of another model than this {type(module).__name__}: "
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise CheckpointError(text + ("; ".join(differences[:_SHOWN]) or str(error)) + more) from error


def load_optimizer_state(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    local: set[str],
    shards: OwnedStates | None = None,
) -> None:
    """Load the optimizer states of this rank's parameters, saved in either format; all ranks must call.

    Args:
        local: the names of this rank's parameters.
        shards: holds the states if the optimizer does not: sharded, or on optimizer nodes.

    Raises:
        CheckpointError: the saved groups hold other parameters than this run's.
        ConfigurationError: the groups of a plain file have other sizes than this run's.
    """
    state = saved["state"]
    if shards is not None:
        local = shards.names
    if isinstance(state, FolderOptimizerState):
        mine = [n for g in groups for n in g]
        saved_groups = [list(group["params"]) for group in saved["param_groups"]]
        keys = {name: name for name in mine}
        if any(isinstance(n, int) for g in saved_groups for n in g):  # converted from a plain file, which has no names
            keys = {name: str(number) for number, name in enumerate(mine)}
            saved_groups = [[mine[n] if n < len(mine) else str(n) for n in g] for g in saved_groups]
        theirs = [n for g in saved_groups for n in g]
        if saved_groups != [list(g) for g in groups]:
            what = _another_model(
                type(optimizer).__name__, [n for n in mine if n not in theirs], [n for n in theirs if n not in mine]
            )
            if set(mine) == set(theirs):
                what = (
                    f"the checkpoint's {type(optimizer).__name__} has parameter groups of {[len(g) for g in saved_groups]} "
                    f"parameters, this run's of {[len(g) for g in groups]}, or in another order: it was saved from "
                    f"another configure_optimizers"
                )
            raise CheckpointError(what)
        numbers = {name: number for number, name in enumerate(mine)}
        entries = []
        for group, names in zip(saved["param_groups"], groups, strict=True):
            entries.append({**group, "params": [numbers[n] for n in names]})
        here = [n for n in mine if n in local]
        if shards is not None and state.is_near:
            states = _ReadWhenUsed(state, {n: keys[n] for n in here if keys[n] in state})
            _load_pieces({"param_groups": entries}, states, shards)
            return
        read = state.read_many([keys[n] for n in here])
        saved = {"state": {numbers[n]: read[keys[n]] for n in mine if keys[n] in read}, "param_groups": entries}
    elif shards is None:
        names = [n for g in groups for n in g]
        own = {number for number, name in enumerate(names) if name in local}
        # clone, so that the pages of the mapped file do not stay in use
        saved = {**saved, "state": {n: tree.map_tensors(Tensor.clone, v) for n, v in state.items() if n in own}}
    if shards is None:
        load_optimizer_state_dict(optimizer, saved, groups, local)
    else:
        _load_pieces(saved, states_by_name(saved, groups), shards)


class _ReadWhenUsed(Mapping[str, dict[str, Any]]):
    """States of whole parameters, each read when it is used and in memory only while it is cut into pieces."""

    def __init__(self, state: FolderOptimizerState, keys: Mapping[str, str]) -> None:
        self._state, self._keys = state, keys

    def __getitem__(self, name: str) -> dict[str, Any]:
        give_back_freed_memory()  # of the state before
        return self._state[self._keys[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _load_pieces(saved: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]], shards: OwnedStates) -> None:
    """Load states of whole parameters by name into ``shards``, where the optimizer does not hold whole states."""
    load_states(shards.optimizer, saved, shards.cut_by_group(states))
    shards.loaded(states)


def _another_model(what: str, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    text = f"the checkpoint is of another model than this {what}"
    for kind, names in (("it lacks", missing), ("it has, and this one has not,", unexpected)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text += f"; {kind} {', '.join(names[:_SHOWN])}{more}"
    return text
