"""State by the global names of the user's parameters, independent of the layout.

Collects a pipeline's parts into the dictionaries that plain Lightning would have written. The ranks of one replica do this; the other
replicas hold the same state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.p2p import P2P
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.stage import PipelineModule

TOPIC_GATHER = 6


def gather_parts(p2p: P2P | None, part: Mapping[str, Any], *, root: int, keeps: bool = True) -> dict[str, Any]:
    """Return the union of the parts of all ranks of a pipeline on its rank ``root``, with whole tensors; {} on the others.

    All ranks of the replica must call: the ranks of a tensor group make its tensors whole together, and one of them ``keeps`` the result."""
    whole: dict[str, Any] = {}
    for key, value in part.items():
        found = tree.map_tensors(whole_on_host, value)
        if keeps:
            whole[key] = found
    if p2p is None or not keeps:
        return whole
    if p2p.rank != root:
        p2p.send_message(root, TOPIC_GATHER, tree.map_tensors(Tensor.cpu, whole))
        p2p.finish()
        return {}
    for rank in (r for r in range(p2p.size) if r != root):
        whole.update(p2p.receive_message(rank, TOPIC_GATHER))
    return whole


def numbered(states: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's state as plain Lightning saves it: parameters are numbered by their position over all groups.

    Args:
        states: the states of parameters, by name.
        groups: the optimizer's groups, whose ``params`` are names.
    """
    numbers = {str(name): number for number, name in enumerate(name for g in groups for name in g["params"])}
    described = [{**group, "params": [numbers[str(name)] for name in group["params"]]} for group in groups]
    return {"state": {n: states[name] for name, n in numbers.items() if name in states}, "param_groups": described}


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


def broadcast_from(tensor: Tensor, source: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return ``tensor`` of global rank ``source``; other ranks pass a tensor of its shape and dtype. All ranks of the group must call."""
    owns = dist.get_rank() == source
    data = tensor.contiguous() if owns else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    dist.broadcast(data, source, group=group)
    return data


def fill_whole_module(
    pipeline: PipelineModule,
    rank_of: Callable[[int], int],
    group: dist.ProcessGroup | None,
    *,
    keep_local: bool = False,
) -> None:
    """Broadcast all parameters and buffers, so that every rank of the pipeline holds the whole module again. All its ranks must call,
    after ``pipeline.uninstall()``.

    Args:
        rank_of: returns the global rank of a stage.
        group: the process group of the pipeline's ranks; None: there is nothing to do.
        keep_local: do not replace the memory of parameters that this rank holds, because it is still in use.
    """
    if group is None:
        return
    module, rank = pipeline.module, dist.get_rank()
    with torch.no_grad():
        for present, parameter in module.named_parameters():
            name = pipeline.name_of(parameter, present)
            source = rank_of(pipeline.owner_stage(name))
            data = broadcast_from(dtensor.detached(parameter), source, group)
            if rank != source and not (keep_local and name in pipeline.local_parameters):
                dtensor.replace_local(parameter, data)
        for name, buffer in module.named_buffers():
            part = dtensor.local_part(buffer).detach()
            data = broadcast_from(part, rank_of(pipeline.owner_stage(name)), group)
            if not torch.equal(data, part):
                dtensor.replace_local(buffer, data)


def whole_on_host(tensor: Tensor) -> Tensor:
    """Return a tensor detached from autograd; a DTensor is gathered whole to the host, for which all ranks of its tensor group must call."""
    found = dtensor.whole(tensor.detach())
    return found.cpu() if dtensor.is_dtensor(tensor) else found
