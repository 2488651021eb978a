"""DeviceType: how fast one accelerator computes, how much it holds, and how fast it reaches its neighbours.

The table holds the makers' figures; a type that is not in it is given by hand:

    find_device_type("A100-80GB").peak_flops_per_s            # 312e12
    find_device_type("speed=100e12,memory=40e9")              # speed is what layers reach, efficiency 1

peak_flops_per_s is the dense bf16 (fp16 on V100 and T4) matrix rate: without sparsity. efficiency is the share
of it that a transformer's layers reach: fitted for the A100 (SXM) on published rows (docs/planning.md), assumed to be 0.5 for
all others, of which there are none.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.layer_cost import check_number

_GIB = 2.0**30
_ASSUMED = 0.5
_FITTED_A100 = 0.720  # fitted on published rows, by tests/plan/published.py, and a test holds it against them


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One type of device.

    local_bytes_per_s: one way to another device of the same host (NVLink, or PCIe), for one device. source: of the figures;
    efficiency_source: of the efficiency, "given" by hand, "assumed", or from where it was fitted.
    """

    name: str
    peak_flops_per_s: float
    memory_bytes: float
    local_bytes_per_s: float
    efficiency: float = _ASSUMED
    efficiency_source: str = "given"
    local_latency_s: float = 5e-6
    source: str = "given by hand"

    def __post_init__(self) -> None:
        for name in ("peak_flops_per_s", "memory_bytes", "local_bytes_per_s", "efficiency"):
            check_number(getattr(self, name), f"device type {self.name!r}: {name}", positive=True)
        check_number(self.local_latency_s, f"device type {self.name!r}: local_latency_s")
        if self.efficiency > 1:
            raise ConfigurationError(f"device type {self.name!r}: efficiency={self.efficiency!r}; write at most 1")

    @property
    def flops_per_s(self) -> float:
        """FLOPs a second that layers reach."""
        return self.peak_flops_per_s * self.efficiency


def _known(
    name: str, tflops: float, gib: float, local_gb_per_s: float, source: str, fitted: float | None = None
) -> DeviceType:
    return DeviceType(
        name=name,
        peak_flops_per_s=tflops * 1e12,
        memory_bytes=gib * _GIB,
        local_bytes_per_s=local_gb_per_s * 1e9,
        efficiency=_ASSUMED if fitted is None else fitted,
        efficiency_source="assumed" if fitted is None else "fitted on Holmes, arXiv 2312.03549, InfiniBand",
        source=source,
    )


# NVLink figures are half of what data sheets add up over both directions.
_TABLE = (
    _known("V100-16GB", 125, 16, 150, "NVIDIA V100 data sheet, SXM2"),
    _known("V100-32GB", 125, 32, 150, "NVIDIA V100 data sheet, SXM2"),
    _known("T4", 65, 16, 16, "NVIDIA T4 data sheet; PCIe 3 x16"),
    _known("A10", 125, 24, 32, "NVIDIA A10 data sheet; PCIe 4 x16"),
    _known("A40", 149.7, 48, 56, "NVIDIA A40 data sheet, NVLink bridge"),
    _known("A100-40GB", 312, 40, 300, "NVIDIA A100 data sheet, SXM4", _FITTED_A100),
    _known("A100-80GB", 312, 80, 300, "NVIDIA A100 data sheet, SXM4", _FITTED_A100),
    _known("A100-80GB-PCIe", 312, 80, 32, "NVIDIA A100 data sheet; PCIe 4 x16"),
    _known("L4", 121, 24, 32, "NVIDIA L4 data sheet; PCIe 4 x16"),
    _known("L40S", 362, 48, 32, "NVIDIA L40S data sheet; PCIe 4 x16"),
    _known("H100-80GB", 989, 80, 450, "NVIDIA H100 data sheet, SXM5"),
    _known("H100-80GB-PCIe", 756, 80, 64, "NVIDIA H100 data sheet; PCIe 5 x16"),
    _known("H200", 989, 141e9 / _GIB, 450, "NVIDIA H200 data sheet, SXM5"),
    _known("RTX-3090", 71, 24, 32, "NVIDIA GA102 white paper, fp32 accumulation; PCIe 4 x16"),
    _known("RTX-4090", 165.2, 24, 32, "NVIDIA Ada white paper, fp32 accumulation; PCIe 4 x16"),
    _known("MI250X", 383, 128, 50, "AMD MI250X data sheet, both dies"),
    _known("MI300X", 1307, 192, 64, "AMD MI300X data sheet"),
)
DEVICE_TYPES: dict[str, DeviceType] = {entry.name: entry for entry in _TABLE}

_KEYS = {"speed": "FLOP/s", "memory": "bytes", "local": "bytes/s to a neighbour in the host", "peak": "FLOP/s, for MFU"}


def find_device_type(text: str) -> DeviceType:
    """A known type by name (case and "NVIDIA" do not matter), or one from "speed=...,memory=..." in plain numbers.

    speed (FLOP/s that layers reach) and memory (bytes) are needed; local (bytes/s inside a host, 32e9 by default)
    and peak (FLOP/s; the speed by default) may follow.

    Raises:
        ConfigurationError: an unknown name lists the known ones; a number that is not positive and finite.
    """
    if "=" in text:
        return _by_hand(text)
    plain = _plain(text)
    for name, entry in DEVICE_TYPES.items():
        if _plain(name) == plain:
            return entry
    near = difflib.get_close_matches(plain, [_plain(name) for name in DEVICE_TYPES], n=1, cutoff=0.5)
    meant = next((name for name in DEVICE_TYPES if near and _plain(name) == near[0]), None)
    hint = f"did you mean {meant}? " if meant else ""
    raise ConfigurationError(
        f"device type {text!r} is not known; {hint}Known are {', '.join(DEVICE_TYPES)}. Any other is given by hand: "
        '"speed=100e12,memory=40e9" (FLOP/s that the layers reach, bytes)'
    )


def _plain(name: str) -> str:
    return name.lower().replace("nvidia", "").replace("tesla", "").replace(" ", "").replace("-", "").replace("_", "")


def _by_hand(text: str) -> DeviceType:
    values: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in _KEYS or key in values:
            known = ", ".join(f"{name} ({unit})" for name, unit in _KEYS.items())
            raise ConfigurationError(
                f"device type {text!r}: {key!r} is not allowed here; the keys are {known}, each once"
            )
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        values[key] = check_number(number, f"device type {text!r}: {key}", positive=True)
    for key in ("speed", "memory"):
        if key not in values:
            raise ConfigurationError(f'device type {text!r}: {key} is missing; write "speed=100e12,memory=40e9"')
    peak = values.get("peak", values["speed"])
    if values["speed"] > peak:
        raise ConfigurationError(f"device type {text!r}: speed is above peak; write the speed that layers reach")
    return DeviceType(
        name=text,
        peak_flops_per_s=peak,
        memory_bytes=values["memory"],
        local_bytes_per_s=values.get("local", 32e9),
        efficiency=values["speed"] / peak,
    )
