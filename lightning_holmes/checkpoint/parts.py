"""This rank's part of a module's and an optimizer's state, by global parameter names, and the share of it that this rank writes.

Replicas hold the same parameters and optimizer states, so each writes a share of them. Everything else (buffers, extra state
of modules) may differ between replicas, and is written by the first replica.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_holmes.comm import dtensor
from lightning_holmes.pipeline.stage import PipelineModule

Value = tuple[str, ...]
"""The name of a value: ("state_dict", name), or ("optimizer_0", "state", parameter name, key)."""

Item = tuple[Sequence[Value], Any]
"""A value to be written, with all its names: tied weights have several."""


def module_part(pipeline: PipelineModule, collected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The entries of the module's ``state_dict`` that this rank owns (see :meth:`PipelineModule.is_owner`).

    Args:
        collected: if parameters are sharded, the whole parameters that were collected on this rank; None: parameters are not sharded.
    """
    found: dict[str, Any] = {}
    for key, name, value in owned_entries(pipeline):
        if collected is not None and name in pipeline.parameters:
            if name in collected:
                found[key] = collected[name]
        else:
            found[key] = value.detach() if isinstance(value, Tensor) else value
    return found


def owned_entries(pipeline: PipelineModule) -> list[tuple[str, str, Any]]:
    """The key, the global name and the value of each entry of the module's ``state_dict`` that this rank owns."""
    entries = pipeline.module.state_dict(keep_vars=True).items()
    named = [(key, pipeline.name_of(value, key), value) for key, value in entries]
    return [entry for entry in named if pipeline.is_owner(entry[1])]


def owned(state: Mapping[str, Any], pipeline: PipelineModule) -> dict[str, Any]:
    """The entries of ``state``, the module's ``state_dict`` or what a hook has made of it, that this rank owns."""
    names = {key: pipeline.name_of(value, key) for key, value in pipeline.module.state_dict(keep_vars=True).items()}
    return {key: value for key, value in state.items() if pipeline.is_owner(names.get(key, key))}


def optimizer_part(
    optimizer: Optimizer,
    groups: Sequence[Sequence[str]],
    pipeline: PipelineModule,
    collected: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The optimizer's groups with the names of all their parameters, and the states of the parameters that this rank owns, by name.

    Args:
        collected: the states that a sharded optimizer has collected on this rank; None: ``optimizer`` holds the states itself.
    """
    if collected is None:
        parameters = pipeline.parameters
        collected = {
            name: optimizer.state[parameters[name]]
            for names in groups
            for name in names
            if name in pipeline.local_parameters and parameters[name] in optimizer.state
        }
    described = []
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        of_all: dict[str, Any] = {key: list(names) for key in ("params", "param_names") if key in group}
        described.append({**group, **of_all})
    state = {name: dict(entries) for name, entries in collected.items() if pipeline.is_owner(name)}
    return {"state": state, "param_groups": described}


def named_values(state_dict: Mapping[str, Any], optimizer_states: Sequence[Mapping[str, Any]]) -> dict[Value, Any]:
    """All values of a rank's parts of the module's and the optimizers' states, by name."""
    values: dict[Value, Any] = {("state_dict", name): value for name, value in state_dict.items()}
    for index, optimizer in enumerate(optimizer_states):
        for name, entries in optimizer.get("state", {}).items():
            for key, value in entries.items():
                values[f"optimizer_{index}", "state", name, key] = value
    return values


def items_of(values: Mapping[Value, Any]) -> list[Item]:
    """The values to be written, each once, with all its names."""
    names: dict[Any, list[Value]] = {}
    for name, value in values.items():
        names.setdefault(same_memory(name, value), []).append(name)
    return [(of_one, values[of_one[0]]) for of_one in names.values()]


def share_of(
    values: Mapping[Value, Any], parameters: frozenset[str], replica: int, num_replicas: int
) -> dict[Value, Any]:
    """The values that replica ``replica`` writes of ``values``, which all replicas hold: about the same number of bytes for each replica.

    Args:
        parameters: keys of the ``state_dict`` that are parameters; the first replica writes its other entries.
    """
    if num_replicas == 1:
        return dict(values)
    loads = [0] * num_replicas
    chosen: dict[Value, Any] = {}
    places: dict[Any, int] = {}
    for name, value in sorted(values.items(), key=lambda item: (-num_bytes(item[1]), item[0])):
        if name[0] == "state_dict" and name[1] not in parameters:
            place = 0
        else:
            place = places.get(same_memory(name, value), loads.index(min(loads)))
            if same_memory(name, value) not in places:
                loads[place] += num_bytes(value) + 1
        places[same_memory(name, value)] = place
        if place == replica:
            chosen[name] = value
    return {name: value for name, value in values.items() if name in chosen}


def made_whole(ours: Mapping[Value, Any], mine: Mapping[Value, Any]) -> dict[Value, Any]:
    """Return ``mine``, the values that this rank writes, with whole tensors in place of DTensors.

    Args:
        ours: the values that the ranks of the tensor group write together; all of them must call, with the same names.
    """
    found: dict[Value, Any] = {}
    for name, value in ours.items():
        if dtensor.is_dtensor(value):  # one collective for each name, in the same order on all ranks
            value = dtensor.whole(value.detach())
            value = value.cpu() if name in mine else None
        if name in mine:
            found[name] = value
    return found


def num_bytes(value: Any) -> int:
    """Bytes of a tensor; 0 for anything else."""
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def same_memory(name: Value, value: Any) -> Any:
    """A key that is equal for values that are the same tensor under two names, such as tied weights."""
    if not isinstance(value, Tensor):
        return name
    value = dtensor.local_part(value)
    if value.numel() == 0:
        return name
    return value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
