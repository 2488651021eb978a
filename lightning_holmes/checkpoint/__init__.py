"""Checkpoints: the state of a run by global parameter names, independent of the layout.

A checkpoint is one plain Lightning file (plain.py), or a folder of which every rank writes a part (saving.py, folder.py).
The strategy uses CheckpointManager.
"""

from lightning_holmes.checkpoint.loading import read_plan, read_state_dict
from lightning_holmes.checkpoint.manager import CheckpointManager, is_local
from lightning_holmes.checkpoint.membership import Membership
from lightning_holmes.checkpoint.parts import Item, Value, module_part, optimizer_part, owned, owned_entries
from lightning_holmes.checkpoint.plain import (
    broadcast_from,
    fill_whole_module,
    gather_parts,
    keep_local_parameters,
    numbered,
    parameter_group_names,
    whole_on_host,
)
from lightning_holmes.checkpoint.state_loading import load_module_state, load_optimizer_state, load_whole_state, renames

__all__ = [
    "CheckpointManager",
    "Item",
    "Membership",
    "Value",
    "broadcast_from",
    "fill_whole_module",
    "gather_parts",
    "is_local",
    "keep_local_parameters",
    "load_module_state",
    "load_optimizer_state",
    "load_whole_state",
    "module_part",
    "numbered",
    "optimizer_part",
    "owned",
    "owned_entries",
    "parameter_group_names",
    "read_plan",
    "read_state_dict",
    "renames",
    "whole_on_host",
]
