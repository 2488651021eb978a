"""A cache of measured costs, so that the next start of the same run chooses the same plan, and begins sooner.

    key = costs_key(request, structure)                   # from the module, its batch, hosts and links; None: do not cache
    load_costs(key, request.layout.topology)              # Costs, or None
    save_costs(key, costs, request.layout.topology)

Speeds and memory are cached by host, not by rank: launchers may number the hosts differently the next time. The files are JSON, and lie beside the
links' speeds (cluster/measure.py), in HOLMES_CACHE_DIR or ~/.cache/lightning_holmes, for as long.
``profile="auto"`` uses the cache. ``"measure"`` and ``"flops"`` find the costs anew, and replace the cached ones. If a rank has become slow
in a run (comm/stragglers.py), the next start on the same hosts finds them anew, too; and so does a start at which a short measurement shows that a
host's speed relative to the others has changed (:func:`tell_change`). Only rank 0 reads and writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_holmes.cluster.measure import MAX_AGE_S, cache_folder, fingerprint, write_to_cache
from lightning_holmes.cluster.record import MAX_TEXT
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.layer_cost import ModelCost, check_number
from lightning_holmes.strategy.agreement import version_facts
from lightning_holmes.strategy.module_digest import digest_module
from lightning_holmes.strategy.plan_request import PlanRequest

CHANGE = 1.5
"""The factor by which a host's speed relative to the others may change before cached costs are discarded: short measurements on busy CPUs
differ by less, and stragglers are reported from this factor on."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a module's layers, and the speeds of the ranks. Tuples have an entry for each rank.

    Attributes:
        model: the profile of the layers.
        speeds: work a second, in the unit of ``model`` (FLOPs, or seconds on rank 0).
        probed_flops_per_s: the speeds in the short measurement.
        memory: bytes of memory.
        local_bytes_per_s: bytes a second to other ranks of the same host.
        described: how the costs were found, in words.
    """

    model: ModelCost
    speeds: tuple[float, ...]
    probed_flops_per_s: tuple[float, ...]
    memory: tuple[float, ...]
    local_bytes_per_s: tuple[float, ...]
    local_latency_s: float
    described: str
    update_s_per_byte: float = 0.0
    byte_s: float = 0.0
    own_s: float = 0.0


def costs_key(request: PlanRequest, structure: ModuleStructure) -> str | None:
    """Return the cache key of costs: a digest of the module with the sources of its classes (module_digest.py), the shapes of the batch, the
    precision, the hosts and the links. None if a source cannot be found: then costs are not cached."""
    module, sample, layout = request.module, request.sample, request.layout
    of_module = digest_module(module)
    if of_module is None:
        return None
    tensors = [] if sample is None else tree.tensors_of(sample.batch)
    trainer = trainer_of(module)
    facts = {
        "module": [of_module, structure.layers],
        "batch": [
            [(*tensor.shape, str(tensor.dtype)) for tensor in tensors],
            request.traced.batch_size,
            request.options.num_microbatches,
        ],
        "profile": [
            None if trainer is None else [str(trainer.precision), type(trainer.precision_plugin).__qualname__],
            torch.backends.cuda.matmul.fp32_precision,  # TF32 or not
            torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]  # torch sets it at import
            torch.get_num_threads(),
        ],
        "versions": version_facts(),
        "hosts": [
            fingerprint(layout.topology),
            layout.placement.pipeline_parallel_size,
            request.world_size,
            # names of discovered hosts are in the fingerprint, and any of them may have rank 0
            platform.node() if request.topology_given or layout.num_hosts == 1 else "",
            torch.cuda.get_device_name(request.device) if request.device.type == "cuda" else platform.processor(),
        ],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def load_costs(key: str, topology: Topology, *, max_age_s: float = MAX_AGE_S) -> Costs | None:
    """Return the cached costs of this key, whose description says that they were cached; None if there are none, or if they are too old, distrusted
    or not readable."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, ConfigurationError):
        with (cache_folder() / f"costs-{key}.json").open("rb") as file:
            data = json.loads(file.read(MAX_TEXT))
        at = check_number(data.pop("measured_at_s"), "measured_at_s")
        if not 0 <= time.time() - at <= max_age_s:
            return None
        if at <= _slow_at(topology):
            rank_zero_info("costs that were kept are not taken, since a rank on these hosts has become slow in a run")
            return None
        model = ModelCost.from_data(data.pop("model"))
        described = f"{data['described']}, on {time.strftime('%d %B at %H:%M', time.localtime(at))}"
        return Costs(
            model=model,
            speeds=_by_rank(data["speeds"], topology, "speeds"),
            probed_flops_per_s=_by_rank(data["probed_flops_per_s"], topology, "probed_flops_per_s"),
            memory=_by_rank(data["memory"], topology, "memory"),
            local_bytes_per_s=_by_rank(data["local_bytes_per_s"], topology, "local_bytes_per_s"),
            local_latency_s=check_number(data["local_latency_s"], "local_latency_s"),
            described=f'{described}; profile="measure" or "flops" measures anew',
            update_s_per_byte=check_number(data["update_s_per_byte"], "update_s_per_byte"),
            byte_s=check_number(data["byte_s"], "byte_s"),
            own_s=check_number(data["own_s"], "own_s"),
        )
    return None


def save_costs(key: str, costs: Costs, topology: Topology) -> None:
    """Cache costs for the next start; warn if that fails."""
    data = asdict(costs) | {"measured_at_s": time.time()}
    for name in ("speeds", "probed_flops_per_s", "memory", "local_bytes_per_s"):
        data[name] = {
            host.name: [data[name][rank] for rank in topology.ranks_of_host(host.name)] for host in topology.hosts
        }
    problem = write_to_cache(f"costs-{key}.json", json.dumps(data))
    if problem is not None:
        rank_zero_warn(f"measured costs are not kept: {problem}")


def tell_change(kept: Costs, probed_flops_per_s: Sequence[float], topology: Topology) -> str | None:
    """Return a message if a rank's speed relative to the others has changed since the costs were cached, by more than short measurements differ;
    else None.

    Args:
        probed_flops_per_s: the present speed of each rank.
    """
    hosts = [host.name for _, host in topology.places()]
    ratios = [now / then for now, then in zip(probed_flops_per_s, kept.probed_flops_per_s, strict=True)]
    low, high = (ratios.index(extreme(ratios)) for extreme in (min, max))
    if ratios[high] <= CHANGE * ratios[low]:
        return None
    return (
        f"costs that were kept are not taken, since rank {low} on host {hosts[low]} multiplies matrices {ratios[low]:.2f} times as fast as when "
        f"they were measured, and rank {high} on host {hosts[high]} {ratios[high]:.2f} times"
    )


def distrust_costs(topology: Topology) -> None:
    """After a rank has become slow, distrust all costs that were measured on these hosts until now, of any module."""
    problem = write_to_cache(_slow_file(topology), json.dumps(time.time()))
    if problem is not None:
        print(f"the next start may take costs that were measured before a rank became slow: {problem}", file=sys.stderr)


def _slow_file(topology: Topology) -> str:
    return f"slow-{fingerprint(topology)}.json"


def _slow_at(topology: Topology) -> float:
    """Return when a rank of these hosts was last reported to have become slow, in seconds since the epoch; 0: never."""
    with (
        contextlib.suppress(OSError, ValueError, ConfigurationError),
        (cache_folder() / _slow_file(topology)).open("rb") as file,
    ):
        return check_number(json.loads(file.read(MAX_TEXT)), "slow_at_s")
    return 0.0


def _by_rank(kept: dict[str, list[float]], topology: Topology, what: str) -> tuple[float, ...]:
    """Return the cached values of each host's devices in the order of the present ranks."""
    of_rank = {
        rank: check_number(value, what, positive=True)
        for host in topology.hosts
        for rank, value in zip(topology.ranks_of_host(host.name), kept[host.name], strict=True)
    }
    return tuple(of_rank[rank] for rank in range(len(of_rank)))
