"""What all ranks agree on before they train: versions, arguments and modules are compared, weights and random states are shared.

Every rank must call each function, in the same order.
"""

import hashlib
import os
import platform
import random
from collections.abc import Mapping
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.comm.objects import all_gather_values, broadcast_value
from lightning_holmes.lightning_package import USED
from lightning_holmes.pipeline.seeds import random_states, set_random_states
from lightning_holmes.pipeline.tape import is_fake
from lightning_holmes.plan.placement import Placement
from lightning_holmes.strategy.admission import compare_facts
from lightning_holmes.version import __version__

TOPIC_RANDOM_STATE = 7
_HOST = torch.device("cpu")
_CHUNK = 1 << 26  # bytes of a tensor that are copied to the host at a time


def compare_ranks(facts: Mapping[str, str], world_size: int) -> None:
    """Compare ``facts`` over all ranks.

    Raises:
        ConfigurationError: they differ, on all ranks alike; the message names the differences and the ranks.
    """
    if world_size > 1:
        compare_facts(all_gather_values(facts))


def version_facts() -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    return {
        "lightning_holmes": __version__,
        "torch": str(torch.__version__),
        USED: version(USED),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def module_facts(module: nn.Module) -> dict[str, str]:
    """Return the class of each submodule, shape, dtype and requires_grad of each parameter, shape and dtype of each buffer, and for torch's
    own submodules also their settings, such as the probability of a dropout."""
    facts = {"module": type(module).__qualname__}
    for name, submodule in module.named_modules():
        # the extra_repr of other classes may contain memory addresses
        own = type(submodule).__module__.startswith("torch.nn.modules.")
        if name:
            settings = f"({submodule.extra_repr()})" if own else ""
            facts[f"submodule {name}"] = f"{type(submodule).__qualname__}{settings}"
    for name, parameter in module.named_parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        frozen = "" if parameter.requires_grad else ", frozen"
        layout = dtensor.describe_placements(parameter)
        facts[f"parameter {name}"] = f"{tuple(parameter.shape)} {kind}{layout}{frozen}"
    for name, buffer in module.named_buffers():
        facts[f"buffer {name}"] = f"{tuple(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}"
    return facts


def choose_seed() -> int:
    """Return the seed given to ``seed_everything``, or a random one."""
    return int(os.environ.get("PL_GLOBAL_SEED", random.SystemRandom().getrandbits(31)))


def broadcast_module(module: nn.Module, groups: ProcessGroups, placement: Placement) -> None:
    """Broadcast rank 0's weights and buffers to all ranks, so that replicas start equal. All ranks must call.

    Only tensors that differ are sent: with ``seed_everything`` none do, and a large module need not cross slow links.
    Tensors that have no values yet are skipped; they must be the same on all ranks. The parts of a DTensor
    are broadcast from the tensor-parallel group of rank 0, each over the data-parallel group and then over the pipeline group.

    Args:
        groups: this rank's process groups.
        placement: the grid of all ranks.
    """
    if placement.world_size == 1:
        return
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not is_fake(t)]
    part = groups.tensor_parallel_rank
    everyone = all_gather_values([(part if dtensor.is_dtensor(t) else 0, content_of(t)) for t in tensors])
    with torch.no_grad():
        for tensor, *contents in zip(tensors, *everyone, strict=True):
            if len(set(contents)) == len({place for place, _ in contents}):
                continue
            if dtensor.is_dtensor(tensor):
                _broadcast_part(tensor, groups, placement)
                continue
            data = tensor.detach().contiguous()
            dist.broadcast(data, 0)
            if data.data_ptr() != tensor.data_ptr():
                tensor.data = data


def _broadcast_part(tensor: Tensor, groups: ProcessGroups, placement: Placement) -> None:
    local = dtensor.local_part(tensor).detach()
    data = local.contiguous()
    stage, replica, _ = placement.coordinate(0)
    part = groups.tensor_parallel_rank
    replicas = placement.data_parallel_group(groups.pipeline_rank, part)
    pipeline = placement.pipeline_group(groups.data_parallel_rank, part)
    for group, source in ((groups.data_parallel, replicas[replica]), (groups.pipeline, pipeline[stage])):
        if group is not None:
            dist.broadcast(data, source, group=group)
    if data is not local:
        local.copy_(data)


def content_of(tensor: Tensor) -> str:
    """Return a digest of the bits of a tensor, or of this rank's part of a DTensor."""
    digest = hashlib.blake2b(digest_size=16)
    flat = dtensor.local_part(tensor).detach().contiguous().flatten().view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        digest.update(flat[start : start + _CHUNK].cpu().numpy().data)
    return digest.hexdigest()


def share_generators() -> None:
    """Give all ranks the random states of rank 0, for numbers that are drawn in ``configure_model``."""
    set_random_states(broadcast_value(random_states(_HOST)), _HOST)


def share_random_state(groups: ProcessGroups) -> None:
    """Give all ranks of a replica the random states of its first rank, so that their data loaders draw the same numbers."""
    for p2p in (groups.tensor_p2p, groups.p2p):
        if p2p is not None and p2p.rank == 0:
            for rank in range(1, p2p.size):
                p2p.send_message(rank, TOPIC_RANDOM_STATE, random_states(_HOST))
            p2p.finish()
        elif p2p is not None:
            set_random_states(p2p.receive_message(0, TOPIC_RANDOM_STATE), _HOST)
