"""Conversions between a DTensor, as ``parallelize_module`` leaves it in a module, its part on this rank, and the whole tensor.

Each function returns plain tensors unchanged, so that callers need not check. mesh.py decides which ranks share a
tensor.

    local_part(parameter)                     # the plain tensor on this rank; shares memory
    whole(parameter)                          # all of it; every rank of the tensor group must call
    share_of(full, parameter)                 # this rank's part of ``full``, laid out like ``parameter``
"""

import sys
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_holmes.comm import absent
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.torch_private import async_value, local_tensor, set_local_tensor

AXIS = "tensor_parallel"


def is_dtensor(value: Any) -> TypeGuard[Any]:
    """Whether ``value`` is a DTensor. If DTensor has not been imported there are none, and it is not imported here."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def has_dtensor_parameters(module: nn.Module) -> bool:
    """Whether any parameter of ``module`` is a DTensor."""
    return any(is_dtensor(p) for p in module.parameters())


def local_part(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` on this rank, in the same memory; outside of autograd."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def detached(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` on this rank without autograd, in the same memory; of an absent parameter a placeholder."""
    return local_tensor(tensor).detach() if is_dtensor(tensor) else absent.detached(tensor)


def memory_of(tensor: Tensor) -> Tensor:
    """The plain tensor whose memory holds ``tensor``'s values, or will hold them when a pending collective is done."""
    found: Tensor = async_value(local_part(tensor))
    return found


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, within autograd; a collective of the tensor group if it is sharded."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def like(local: Tensor, parameter: Tensor) -> Tensor:
    """``local``, this rank's part, as a tensor that is laid out like ``parameter``."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def share_of(full: Tensor, parameter: Tensor) -> Tensor:
    """Lay out ``full``, the whole tensor, which is the same on all ranks, like ``parameter``; without communication."""
    if not is_dtensor(parameter) or is_dtensor(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    full = full.to(parameter.device)
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)


def gradient_part(gradient: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of ``gradient``, after it is laid out like ``parameter`` (as FSDP2 does with gradients).

    A gradient may be Partial, or sharded otherwise: that of a norm's weights between sharded activations, say. Then
    this is a collective of the tensor group, in the order of the ranks' backward.
    """
    if not is_dtensor(parameter) or not is_dtensor(gradient):
        return local_part(gradient)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def replace_local(tensor: Tensor, local: Tensor) -> None:
    """Make ``local`` the part of ``tensor`` on this rank. An absent parameter becomes an ordinary one."""
    absent.forget(tensor)
    if is_dtensor(tensor):
        set_local_tensor(tensor, local)
    else:
        tensor.data = local


def is_split(tensor: Tensor) -> bool:
    """Whether the ranks of the tensor group hold different parts of ``tensor``, not copies."""
    return is_dtensor(tensor) and any(not placement.is_replicate() for placement in tensor.placements)


def describe_placements(tensor: Tensor) -> str:
    """The placements of ``tensor``, in words for messages; empty for a plain tensor."""
    return f", {', '.join(map(str, tensor.placements))}" if is_dtensor(tensor) else ""


def check_axes(named: Iterable[tuple[str, Tensor]], mesh: DeviceMesh | None) -> None:
    """Refuse tensors that are sharded over another axis than the tensor-parallel one of ``mesh``, or have Partial placements.

    Raises:
        ConfigurationError: names the tensor and its axes or placements.
    """
    for name, tensor in named:
        if not is_dtensor(tensor):
            continue
        axes = tensor.device_mesh.mesh_dim_names
        if axes != (AXIS,) or mesh is None or not torch.equal(tensor.device_mesh.mesh, mesh[AXIS].mesh):
            raise ConfigurationError(
                f"{name} is sharded over the axes {axes or 'without names'} of {tensor.device_mesh}: in configure_model "
                f'use parallelize_module over self.device_mesh["{AXIS}"] only; replicas and stages are laid out by '
                f"HolmesStrategy"
            )
        if any(placement.is_partial() for placement in tensor.placements):
            raise ConfigurationError(
                f"{name} is a DTensor with the placements {list(tensor.placements)}: a parameter cannot be Partial; give it Shard or Replicate in "
                f"parallelize_module"
            )
