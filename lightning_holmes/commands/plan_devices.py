"""The devices of the hosts of a planned run, and the precision of its matrix products.

    precision_of({"precision": "bf16"})                        # "bf16-mixed"
    find_devices("A100-80GB", topology)                        # a DeviceType for each host

They are read from the command line, the topology file and the trainer's settings. plan/device_type.py has the speeds of the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline.device_speed import DeviceSpeed, probe_device
from lightning_holmes.plan.device_type import DeviceType, find_device_type
from lightning_holmes.plan.device_type import Precision as Kind

_HERE = "here"
_PROBE_S = 0.1
KINDS: dict[str, Kind] = {
    "32-true": "fp32",
    "64-true": "fp64",
    "16-true": "half",
    "bf16-true": "half",
    "16-mixed": "half",
    "bf16-mixed": "half",
}
"""The precision of matrix products, by Lightning's name of a precision."""

_SHORT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


def precision_of(trainer: Mapping[str, Any]) -> str:
    """Lightning's name of ``precision`` in these trainer settings; one of KINDS.

    Raises:
        ConfigurationError: the precision is not one of KINDS, or it is given by a plugin.
    """
    given = trainer.get("precision")
    name = "32-true" if given is None else _SHORT.get(str(given), str(given))
    plugins = trainer.get("plugins") or []
    for plugin in plugins if isinstance(plugins, list | tuple) else [plugins]:
        kind = _class_of(plugin)
        if issubclass(kind, pl.plugins.Precision):
            raise ConfigurationError(
                f"trainer.plugins={kind.__name__}: plan reads the precision from trainer.precision; plan with it, as in --trainer.plugins=null "
                "--trainer.precision=bf16-true"
            )
    if name not in KINDS:
        raise ConfigurationError(
            f"trainer.precision={given!r}: the speed and the memory of a step in this precision are not known, since its matrix products run "
            "in another dtype than its tensors have. Plan with one that is known, such as --trainer.precision=bf16-true, and give the speed "
            'that its layers reach: --device_type "speed=900e12,memory=80e9"'
        )
    return name


def _class_of(plugin: Any) -> type:
    """The class of a trainer's plugin, given as an object or by class_path."""
    if not (hasattr(plugin, "get") and plugin.get("class_path")):
        return type(plugin)
    module, _, name = str(plugin["class_path"]).rpartition(".")
    found: type = getattr(import_module(module or pl.plugins.__name__), name)
    return found


def asks_for_here(device_type: str | None) -> bool:
    """Whether --device_type asks for the speed of this machine."""
    return device_type is not None and device_type.strip().lower() == _HERE


def probe_here(kind: Kind) -> DeviceSpeed:
    """Measure the speed of this machine's processor, for matrix products of this precision."""
    dtype = {"half": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[kind]
    return probe_device(torch.device("cpu"), seconds=_PROBE_S, dtype=dtype)


def find_devices(
    device_type: str | None, topology: Topology, here: DeviceSpeed | None = None
) -> tuple[DeviceType, ...]:
    """Return the device type of each host: the host's in the topology file, or ``device_type``.

    Args:
        device_type: the value of --device_type.
        here: the speed of this machine, if device_type asks for it.

    Raises:
        ConfigurationError: a type is missing, given twice or not known.
    """
    own = [host.device_type for host in topology.hosts]
    if None not in own:
        if device_type is not None:
            raise ConfigurationError(
                f"device_type={device_type!r}: {topology.described} names the device_type of every host; leave one of the two out"
            )
        return tuple(find_device_type(name) for name in own if name is not None)
    common = _common_device(device_type, topology, here)
    return tuple(common if name is None else find_device_type(name) for name in own)


def _common_device(device_type: str | None, topology: Topology, here: DeviceSpeed | None) -> DeviceType:
    """Return the type of the devices of all hosts whose type the topology file does not name."""
    if device_type is None:
        raise ConfigurationError(
            "which devices the run will have is not known: give --device_type, for example A100-80GB, or by hand "
            '"speed=100e12,memory=40e9"; for the speed of this machine, --device_type here. Where hosts have unlike devices, write each '
            "host's device_type in the topology file"
        )
    if here is not None:
        most = max(host.devices for host in topology.hosts)
        return DeviceType(
            name="this machine's process",
            peak_flops_per_s=here.flops_per_s,
            memory_bytes=here.memory_bytes / most,
            local_bytes_per_s=here.local_bytes_per_s,
            local_latency_s=here.local_latency_s,
            efficiency=1.0,
            efficiency_source="measured",
            moved_bytes_per_s=here.moved_bytes_per_s,
        )
    return find_device_type(device_type)


def devices_per_host(device_type: str | None, trainer: Mapping[str, Any]) -> int:
    """The number of devices of a host according to trainer.devices, counted as in Lightning, if there is no topology.

    Raises:
        ConfigurationError: the setting means all devices of a host and this machine has none, or the setting is invalid.
    """
    devices = trainer.get("devices")
    text = str(devices).strip()
    if isinstance(devices, list | tuple):
        count = len(devices)
    elif "," in text:  # "0,1" are two devices, "0," is one
        count = len([entry for entry in text.split(",") if entry.strip()])
    elif text in ("None", "auto", "-1"):
        count = torch.cuda.device_count()
        if trainer.get("accelerator") == "cpu" or (count == 0 and device_type is None):
            count = 1  # Lightning's number on CPUs, and the number on this machine
        if count == 0:
            raise ConfigurationError(
                f"trainer.devices={devices!r} means all devices of a host, and this machine has no {device_type}; give "
                "their number, --trainer.devices=8, or a topology, --topology FILE"
            )
    else:
        count = int(text) if text.isdigit() else 0
    if count < 1:
        raise ConfigurationError(
            f'trainer.devices={devices!r}: write a number of at least 1, a list of devices, "0,1", or "auto" or -1 for all'
        )
    return count
