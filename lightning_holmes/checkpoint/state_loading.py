"""Load saved states into a module and an optimizer of which this rank holds a part; only that part is read."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.checkpoint.folder import FolderOptimizerState, FolderStateDict
from lightning_holmes.comm import dtensor
from lightning_holmes.errors import CheckpointError, ConfigurationError
from lightning_holmes.optim.shard_states import MASTER_WEIGHT, OwnedStates
from lightning_holmes.optim.sharded_host import laid_out
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
    state, saved_groups = saved["state"], saved["param_groups"]
    held = local if shards is None else shards.names
    keys = _keys_by_name(saved_groups, groups, type(optimizer).__name__)
    here = {name: key for name, key in keys.items() if name in held}
    states: Mapping[str, Mapping[str, Any]]
    if isinstance(state, FolderOptimizerState):
        own = state.renamed({name: str(key) for name, key in here.items()})
        # a sharded optimizer takes one state after the other
        states = own if shards is not None and own.is_near else own.read_many(own)
    else:
        states = {name: state[key] for name, key in here.items() if key in state}
        if shards is None:  # in memory of their own, so that the pages of the mapped file do not stay in use
            states = tree.map_tensors(Tensor.clone, states)
    if shards is not None:
        _put_states(shards.optimizer, saved_groups, shards.cut_by_group(states))
        shards.loaded(states)
        return
    by_group = [
        [
            {key: laid_out(value, p) for key, value in states.get(name, {}).items() if key != MASTER_WEIGHT} or None
            for name, p in zip(filter(held.__contains__, names), g["params"], strict=True)
        ]
        for names, g in zip(groups, optimizer.param_groups, strict=True)
    ]
    _put_states(optimizer, saved_groups, by_group)


def _keys_by_name(
    saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[str]], optimizer: str
) -> dict[str, Any]:
    """Return, by the names of parameters, the keys of their saved states: names, or numbers if the state comes from a plain file, which has no
    names.

    Args:
        optimizer: its class, for messages.
    """
    saved = [list(group["params"]) for group in saved_groups]
    if any(isinstance(key, int) for keys in saved for key in keys):
        sizes, own = [len(keys) for keys in saved], [len(names) for names in groups]
        if sizes != own:
            raise ConfigurationError(
                f"the checkpoint's optimizer has parameter groups of {sizes} parameters, this run's of {own}: it was saved from another "
                f"model or another configure_optimizers"
            )
    elif saved != [list(names) for names in groups]:
        mine, theirs = [n for names in groups for n in names], [n for keys in saved for n in keys]
        if set(mine) != set(theirs):
            lacking, unknown = [n for n in mine if n not in theirs], [n for n in theirs if n not in mine]
            raise CheckpointError(_another_model(optimizer, lacking, unknown))
        raise CheckpointError(
            f"the checkpoint's {optimizer} has parameter groups of {[len(g) for g in saved]} parameters, this run's of "
            f"{[len(g) for g in groups]}, or in another order: it was saved from another configure_optimizers"
        )
    return {name: key for names, keys in zip(groups, saved, strict=True) for name, key in zip(names, keys, strict=True)}


def _put_states(
    optimizer: Optimizer,
    saved_groups: Sequence[Mapping[str, Any]],
    states: Sequence[Sequence[Mapping[str, Any] | None]],
) -> None:
    """Load into ``optimizer`` the options of ``saved_groups``, and ``states``: by group, one entry for each of its parameters."""
    own: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for saved_group, group, group_states in zip(saved_groups, optimizer.param_groups, states, strict=True):
        entry = {k: v for k, v in saved_group.items() if k not in ("params", "param_names")}
        if "param_names" in group:
            entry["param_names"] = list(group["param_names"])
        entry["params"] = list(range(number, number + len(group["params"])))
        own["state"] |= {n: s for n, s in zip(entry["params"], group_states, strict=True) if s is not None}
        own["param_groups"].append(entry)
        number += len(group["params"])
    optimizer.load_state_dict(own)


def _another_model(what: str, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    text = f"the checkpoint is of another model than this {what}"
    for kind, names in (("it lacks", missing), ("it has, and this one has not,", unexpected)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text += f"; {kind} {', '.join(names[:_SHOWN])}{more}"
    return text
