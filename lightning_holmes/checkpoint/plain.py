"""State by the global names of the user's parameters, independent of the layout.

Collects a pipeline's parts into the dictionaries that plain Lightning would have written, and takes from such
dictionaries the part that a rank needs. The ranks of one replica do this; the other replicas hold the same state.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_holmes.checkpoint.parts import local_states
from lightning_holmes.comm import dtensor
from lightning_holmes.comm.p2p import P2P
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.optim.shard_states import MASTER_WEIGHT
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.stage import PipelineModule

TOPIC_GATHER = 6


def gather_parts(p2p: P2P | None, part: Mapping[Any, Any], *, root: int) -> dict[Any, Any]:
    """Return the union of the parts of all ranks of a pipeline on its rank ``root``, {} on the others; all of them must call."""
    if p2p is None:
        return dict(part)
    if p2p.rank != root:
        p2p.send_message(root, TOPIC_GATHER, tree.map_tensors(lambda t: t.detach().cpu(), dict(part)))
        p2p.finish()
        return {}
    whole = dict(part)
    for rank in (r for r in range(p2p.size) if r != root):
        whole.update(p2p.receive_message(rank, TOPIC_GATHER))
    return whole


def module_state_dict(
    pipeline: PipelineModule,
    p2p: P2P | None,
    *,
    root: int,
    keeps: bool = True,
    collected: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """The module's whole ``state_dict`` on the pipeline's rank ``root``, in the module's own order; {} elsewhere.

    All ranks of the replica must call: the ranks of a tensor group gather its tensors together, and one of them
    ``keeps`` the result; the others get {}.

    Args:
        collected: if parameters are sharded, the whole parameters that were collected on this rank; None: parameters are not sharded.
    """
    local: dict[str, Any] = {}
    order = []
    for key, value in pipeline.module.state_dict(keep_vars=True).items():
        order.append(key)
        name = pipeline.name_of(value, key)
        if collected is not None and name in pipeline.parameters:
            if name in collected and pipeline.is_owner(name) and keeps:
                local[key] = collected[name]
        elif pipeline.is_owner(name):
            found = tree.map_tensors(whole_on_host, value)
            if keeps:
                local[key] = found
    if not keeps:
        return {}
    whole = gather_parts(p2p, local, root=root)
    return {key: whole[key] for key in order if key in whole}


def parameter_group_names(pipeline: PipelineModule, optimizer: Optimizer, first: int = 0) -> list[list[str]]:
    """The names of the parameters in each group of ``optimizer`` from group ``first`` on. The groups must still hold the parameters of all stages.

    Raises:
        ConfigurationError: the optimizer holds a tensor that was no parameter of the module when the run began.
    """
    names = {id(p): n for n, p in pipeline.parameters.items()}
    groups = []
    for index, group in enumerate(optimizer.param_groups[first:], start=first):
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise ConfigurationError(
                f"group {index} of {type(optimizer).__name__} holds a tensor of shape {unknown[0]} that was no parameter "
                f"of {type(pipeline.module).__name__} when the run began; register it as an nn.Parameter in __init__ or configure_model"
            )
        groups.append([names[id(p)] for p in group["params"]])
    return groups


def keep_local_parameters(
    param_groups: Sequence[dict[str, Any]], groups: Sequence[Sequence[str]], local: set[str]
) -> None:
    """Remove other stages' parameters from an optimizer's groups, in place, because schedulers hold the groups.

    Args:
        groups: the names of the parameters in each group.
    """
    for group, names in zip(param_groups, groups, strict=True):
        kept = [index for index, name in enumerate(names) if name in local]
        group["params"] = [group["params"][index] for index in kept]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][index] for index in kept]


def optimizer_state_dict(
    optimizer: Optimizer,
    groups: Sequence[Sequence[str]],
    pipeline: PipelineModule,
    p2p: P2P | None,
    *,
    root: int,
    keeps: bool = True,
    collected: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The optimizer's state as plain Lightning numbers it (by position in the whole module's groups), on the pipeline's
    rank ``root``; other ranks get it without parameter states. All ranks of the replica must call; one rank of a tensor
    group ``keeps`` the result, the others get {}. ``collected``: see :func:`local_states`."""
    local: dict[str, Any] = {}
    for name, state_here in local_states(optimizer, groups, pipeline, collected).items():
        found = tree.map_tensors(whole_on_host, state_here)
        if keeps:
            local[name] = found
    if not keeps:
        return {}
    whole = gather_parts(p2p, local, root=root)
    state: dict[int, Any] = {}
    described = []
    number = 0
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        entry = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        entry["params"] = list(range(number, number + len(names)))
        if "param_names" in group:
            entry["param_names"] = list(names)
        described.append(entry)
        for offset, name in enumerate(names):
            if name in whole:
                state[number + offset] = whole[name]
        number += len(names)
    return {"state": state, "param_groups": described}


def load_optimizer_state_dict(
    optimizer: Optimizer, saved: Mapping[str, Any], groups: Sequence[Sequence[str]], local: set[str]
) -> None:
    """Load a state of :func:`optimizer_state_dict` or of plain Lightning into an optimizer that holds only local parameters.

    Raises:
        ConfigurationError: the sizes of the saved groups differ from those of ``groups``.
    """
    states = states_by_name(saved, groups)

    def laid_out(name: str, parameter: Tensor) -> dict[str, Any] | None:
        state = states.get(name)
        own = {k: _laid_out(v, parameter) for k, v in (state or {}).items() if k != MASTER_WEIGHT}
        return own or None

    own = [[name for name in names if name in local] for names in groups]
    load_states(
        optimizer,
        saved,
        [list(map(laid_out, names, g["params"])) for names, g in zip(own, optimizer.param_groups, strict=True)],
    )


def states_by_name(saved: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The states in an optimizer's saved dictionary by parameter name, for the parameters that have one.

    Args:
        saved: the dictionary, which numbers whole parameters by their positions in ``groups``.
        groups: the names of each parameter group.

    Raises:
        ConfigurationError: the sizes of the saved groups differ from those of ``groups``.
    """
    sizes = [len(g["params"]) for g in saved["param_groups"]]
    if sizes != [len(names) for names in groups]:
        raise ConfigurationError(
            f"the checkpoint's optimizer has parameter groups of {sizes} parameters, this run's of "
            f"{[len(names) for names in groups]}: it was saved from another model or another configure_optimizers"
        )
    return {
        name: saved["state"][place]
        for saved_group, names in zip(saved["param_groups"], groups, strict=True)
        for place, name in zip(saved_group["params"], names, strict=True)
        if place in saved["state"]
    }


def load_states(
    optimizer: Optimizer, saved: Mapping[str, Any], states: Sequence[Sequence[dict[str, Any] | None]]
) -> None:
    """Load into ``optimizer`` the options of the groups in ``saved``, and ``states``: by group, one entry for each of its parameters."""
    own: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for saved_group, group, group_states in zip(saved["param_groups"], optimizer.param_groups, states, strict=True):
        entry = {k: v for k, v in saved_group.items() if k not in ("params", "param_names")}
        if "param_names" in group:
            entry["param_names"] = list(group["param_names"])
        entry["params"] = list(range(number, number + len(group["params"])))
        own["state"] |= {n: s for n, s in zip(entry["params"], group_states, strict=True) if s is not None}
        own["param_groups"].append(entry)
        number += len(group["params"])
    optimizer.load_state_dict(own)


def fill_whole_module(
    pipeline: PipelineModule,
    owner_rank: Mapping[int, int],
    group: dist.ProcessGroup | None,
    rank: int,
    *,
    keep_local: bool = False,
) -> None:
    """Broadcast all parameters and buffers, so that every rank of the pipeline holds the whole module again. All its ranks must call,
    after ``pipeline.uninstall()``.

    Args:
        owner_rank: the global rank that runs each stage.
        group: the process group of the pipeline's ranks; None: there is nothing to do.
        rank: this global rank.
        keep_local: do not replace the memory of parameters that this rank holds, because it is still in use.
    """
    if group is None:
        return
    module = pipeline.module
    with torch.no_grad():
        for present, parameter in module.named_parameters():
            name = pipeline.name_of(parameter, present)
            source = owner_rank[pipeline.owner_stage(name)]
            held = name in pipeline.local_parameters
            part = dtensor.local_part(parameter).detach()
            own = rank == source or (held and not keep_local)
            data = part.contiguous() if own else torch.empty(part.shape, dtype=part.dtype, device=part.device)
            dist.broadcast(data, source, group=group)
            if rank != source and not (held and keep_local):
                dtensor.replace_local(parameter, data)
        for name, buffer in module.named_buffers():
            part = dtensor.local_part(buffer)
            data = part.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(data, owner_rank[pipeline.owner_stage(name)], group=group)
            if not torch.equal(data, part):
                dtensor.replace_local(buffer, data)


def whole_on_host(tensor: Tensor) -> Tensor:
    """Return a tensor detached from autograd; a DTensor is gathered whole to the host, for which all ranks of its tensor group must call."""
    found = dtensor.whole(tensor.detach())
    return found.cpu() if dtensor.is_dtensor(tensor) else found


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """Return a saved entry of an optimizer's state for ``parameter``, reduced to this rank's shard if the parameter is sharded."""
    if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape:
        return dtensor.share_of(value, parameter)
    return value
