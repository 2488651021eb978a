"""Creates the units of an optimizer node: in memory, or in a file with limited memory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil
from torch.optim import Optimizer

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.optim.node.description import UnitLayout, may_fuse
from lightning_holmes.optim.node.node_options import NodeOptions
from lightning_holmes.optim.node.store import StateStore, default_limit, needs_of, path_in
from lightning_holmes.optim.node.stored_unit import StoredUnit
from lightning_holmes.optim.node.unit import Unit


def make_units(
    kind: type[Optimizer],
    told: Mapping[str, Any],
    layouts: Mapping[int, UnitLayout],
    *,
    name: str,
    options: NodeOptions,
) -> tuple[Mapping[int, Unit], StateStore | None]:
    """Create the units of a service, by number, and their store; the store is None if the units are in memory.

    Args:
        told: the description that workers send; see Service.
        name: the name of the node and its workers, for messages and files.

    Raises:
        ConfigurationError: there is not enough memory, or not enough disk space.
    """
    optimizer, num_workers = told["optimizer"], told["num_workers"]
    folder = options.folder(told["states"], name=name)
    limit = options.memory_bytes
    if folder is None:
        if limit is not None:
            stepped = {n for names in optimizer["names"] for n in names}
            may_be = {i: replace(u, is_trained=u.is_trained or bool(stepped & {*u.names})) for i, u in layouts.items()}
            _check_memory({i: needs_of(u, optimizer["state_bytes"]) for i, u in may_be.items()}, limit, name=name)
        return {i: Unit(layouts[i], kind, optimizer, num_workers=num_workers) for i in layouts}, None
    if not layouts:
        return {}, None
    needs = {index: needs_of(layout, optimizer["state_bytes"]) for index, layout in layouts.items()}
    # memory that an update needs besides: new states, and states that are loaded, are allocated first and copied; kernels that are not
    # fused have intermediate values; gradients of another type are cast, and masters rounded
    fuses = all(may_fuse(kind, group, layout.dtype) for group in optimizer["groups"] for layout in layouts.values())
    beside = max(
        2 * needs[i]["states"]
        + (0 if fuses else 3) * needs[i]["values"]
        + (0 if layout.dtype == layout.gradient_dtype else needs[i]["values"])
        + (num_workers * layout.numel * layout.sent_dtype.itemsize if layout.has_masters else 0)
        for i, layout in layouts.items()
    )
    resident = psutil.Process().memory_info().rss
    store = StateStore(
        path_in(folder, name),
        needs,
        limit_bytes=resident + ((limit or default_limit(options.num_on_host)) - resident) // told["num_places"],
        beside=beside,
        num_workers=num_workers,
        name=name,
    )
    units = {
        i: StoredUnit(i, layout, kind, optimizer, num_workers=num_workers, store=store, needs=needs[i])
        for i, layout in layouts.items()
    }
    return units, store


def _check_memory(needs: Mapping[int, Mapping[str, int]], limit: int, *, name: str) -> None:
    resident = psutil.Process().memory_info().rss
    wanted = resident + sum(sum(unit.values()) for unit in needs.values())
    if wanted > limit:
        raise ConfigurationError(
            f"{name}: parameters, gradients and optimizer states make {wanted / 1e6:.0f} MB of the process, more than its --memory "
            f"{limit / 1e6:.0f}M: let them live on disk (--states FOLDER), or use more optimizer nodes"
        )
