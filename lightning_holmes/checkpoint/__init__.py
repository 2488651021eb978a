"""What a run leaves on disk and starts again from: state by global parameter names, whatever the layout."""

from lightning_holmes.checkpoint.plain import (
    fill_whole_module,
    keep_local_parameters,
    load_optimizer_state_dict,
    module_state_dict,
    optimizer_state_dict,
    parameter_group_names,
)

__all__ = [
    "fill_whole_module",
    "keep_local_parameters",
    "load_optimizer_state_dict",
    "module_state_dict",
    "optimizer_state_dict",
    "parameter_group_names",
]
