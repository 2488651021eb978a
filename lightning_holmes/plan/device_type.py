"""DeviceType: one accelerator's speed, memory, and bandwidth to other devices of its host.

The table holds the manufacturers' figures; a type that is not in it is given by hand:

    find_device_type("A100-80GB").peak_flops_per_s            # 312e12
    find_device_type("speed=100e12,memory=40e9")              # speed is what layers reach, efficiency 1

peak_flops_per_s is the dense bf16 (fp16 on V100 and T4) matrix rate, without sparsity. efficiency is the share of it that large
matrix products reach: fitted for the A100 (SXM) to published results (docs/planning.md), assumed for all others, which have none.
Smaller products reach less (product_s), and all other operators run at the memory's rate (moved_bytes_per_s).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.layer_cost import check_number

Precision = Literal["half", "fp32", "fp64"]
"""The precision of matrix products: half is bf16 or fp16, mixed precision included."""

_GIB = 2.0**30
_ASSUMED = 0.6
_HOPPER = 0.7
_FITTED_A100 = 0.842  # fitted to published results by tests/plan/published.py; a test checks it against them


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One type of device.

    local_bytes_per_s: one way to another device of the same host (NVLink, or PCIe), for one device. source: where the figures are
    from. efficiency_source: where the efficiency is from: "given" by hand, "assumed", or the data to which it was fitted. product_s:
    seconds that every matrix product takes in addition to its FLOPs. other_peaks: peak FLOP/s by other precision. moved_bytes_per_s: the
    rate at which operators other than matrix products read and write memory; None: not known, and their traffic takes no time (a speed
    given by hand is that of whole layers).
    """

    name: str
    peak_flops_per_s: float
    memory_bytes: float
    local_bytes_per_s: float
    efficiency: float = _ASSUMED
    efficiency_source: str = "given"
    local_latency_s: float = 5e-6
    other_peaks: tuple[tuple[str, float], ...] = ()
    product_s: float = 0.0
    moved_bytes_per_s: float | None = None
    source: str = "given by hand"

    def __post_init__(self) -> None:
        for name in ("peak_flops_per_s", "memory_bytes", "local_bytes_per_s", "efficiency"):
            check_number(getattr(self, name), f"device type {self.name!r}: {name}", positive=True)
        check_number(self.local_latency_s, f"device type {self.name!r}: local_latency_s")
        if self.efficiency > 1:
            raise ConfigurationError(f"device type {self.name!r}: efficiency={self.efficiency!r}; write at most 1")

    @property
    def flops_per_s(self) -> float:
        """FLOP/s that large matrix products reach."""
        return self.peak_flops_per_s * self.efficiency

    @property
    def moved_byte_s(self) -> float:
        """Seconds for each byte that operators other than matrix products read or write; 0 if not known."""
        return 0.0 if self.moved_bytes_per_s is None else 1 / self.moved_bytes_per_s

    @property
    def update_s_per_byte(self) -> float:
        """Seconds of AdamW's step for each byte of parameters."""
        return _UPDATE_MOVES * self.moved_byte_s

    def at(self, precision: Precision) -> DeviceType:
        """This type for matrix products of another precision. A type given by hand is returned as is: its speed is that of the run's layers."""
        peak = dict(self.other_peaks).get(precision)
        if peak is None:
            return self
        return replace(self, peak_flops_per_s=peak, efficiency=_VECTOR, efficiency_source=f"assumed, {precision}")


# bytes moved per byte of parameters: AdamW reads weight, gradient and two states, and writes all but the gradient
_UPDATE_MOVES = 7.0
_PRODUCT_S = 2e-6  # of an A100: products of 1 GFLOP reach 2/3 of the rate of large ones (calculon's a100_80g.json)
_MOVED = 0.9  # of the memory's stated rate, for 100 MB and more (the same file)
# share of NVLink's rate that tensor-parallel all-reduces reach (the same file; NCCL reaches more with hundreds of MB)
_NVLINK = 0.6
_VECTOR = 0.9  # share of peak that large products reach without matrix units: assumed


def _known(
    name: str,
    rates: tuple[float, float, float],
    gib: float,
    memory_gb_per_s: float,
    local_gb_per_s: float,
    source: str,
    efficiency: float = _ASSUMED,
    fitted: bool = False,
) -> DeviceType:
    """Make an entry of the table. rates: TFLOP/s in half precision, fp32 and fp64, with torch's defaults (without TF32)."""
    half, fp32, fp64 = (rate * 1e12 for rate in rates)
    return DeviceType(
        name=name,
        peak_flops_per_s=half,
        memory_bytes=gib * _GIB,
        local_bytes_per_s=local_gb_per_s * 1e9,
        efficiency=efficiency,
        efficiency_source="fitted on Holmes, arXiv 2312.03549, InfiniBand" if fitted else "assumed",
        product_s=_PRODUCT_S,
        moved_bytes_per_s=_MOVED * memory_gb_per_s * 1e9,
        other_peaks=(("fp32", fp32), ("fp64", fp64)),
        source=source,
    )


# NVLink figures are half of the data sheets', which add up both directions. fp64 of the data-center types from Ampere on is that of
# their matrix units, which cuBLAS uses.
_TABLE = (
    _known("V100-16GB", (125, 15.7, 7.8), 16, 900, _NVLINK * 150, "NVIDIA V100 data sheet, SXM2"),
    _known("V100-32GB", (125, 15.7, 7.8), 32, 900, _NVLINK * 150, "NVIDIA V100 data sheet, SXM2"),
    _known("T4", (65, 8.1, 0.25), 16, 320, 16, "NVIDIA T4 data sheet; PCIe 3 x16"),
    _known("A10", (125, 31.2, 0.49), 24, 600, 32, "NVIDIA A10 data sheet; PCIe 4 x16"),
    _known("A40", (149.7, 37.4, 0.58), 48, 696, 56, "NVIDIA A40 data sheet, NVLink bridge"),
    _known("A100-40GB", (312, 19.5, 19.5), 40, 1555, _NVLINK * 300, "NVIDIA A100 data sheet, SXM4", _FITTED_A100, True),
    _known("A100-80GB", (312, 19.5, 19.5), 80, 2039, _NVLINK * 300, "NVIDIA A100 data sheet, SXM4", _FITTED_A100, True),
    _known("A100-80GB-PCIe", (312, 19.5, 19.5), 80, 1935, 32, "NVIDIA A100 data sheet; PCIe 4 x16"),
    _known("L4", (121, 30.3, 0.47), 24, 300, 32, "NVIDIA L4 data sheet; PCIe 4 x16"),
    _known("L40S", (362, 91.6, 1.43), 48, 864, 32, "NVIDIA L40S data sheet; PCIe 4 x16"),
    _known("H100-80GB", (989, 67, 67), 80, 3350, _NVLINK * 450, "NVIDIA H100 data sheet, SXM5", _HOPPER),
    _known("H100-80GB-PCIe", (756, 51, 51), 80, 2000, 64, "NVIDIA H100 data sheet; PCIe 5 x16"),
    _known("H200", (989, 67, 67), 141e9 / _GIB, 4800, _NVLINK * 450, "NVIDIA H200 data sheet, SXM5", _HOPPER),
    _known("RTX-3090", (71, 35.6, 0.56), 24, 936, 32, "NVIDIA GA102 white paper, fp32 accumulation; PCIe 4 x16"),
    _known("RTX-4090", (165.2, 82.6, 1.29), 24, 1008, 32, "NVIDIA Ada white paper, fp32 accumulation; PCIe 4 x16"),
    _known(
        "MI250X",
        (191.5, 23.95, 23.95),
        64,
        1638,
        50,
        "AMD MI250X data sheet, one of its two dies: torch has a device for each",
    ),
    _known("MI300X", (1307, 163.4, 163.4), 192, 5300, 64, "AMD MI300X data sheet"),
)
DEVICE_TYPES: dict[str, DeviceType] = {entry.name: entry for entry in _TABLE}

# CUDA's and ROCm's device names that differ from the names here. A slice of a device (MIG) has a longer name, and does not match.
_TOLD_AS = {
    "V100-SXM2-16GB": "V100-16GB",
    "V100-SXM2-32GB": "V100-32GB",
    "V100-SXM3-32GB": "V100-32GB",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-SXM4-80GB": "A100-80GB",
    "A100 80GB PCIe": "A100-80GB-PCIe",
    "H100 80GB HBM3": "H100-80GB",
    "H100 PCIe": "H100-80GB-PCIe",
    "GeForce RTX 3090": "RTX-3090",
    "GeForce RTX 4090": "RTX-4090",
    "AMD Instinct MI250X": "MI250X",
    "AMD Instinct MI300X": "MI300X",
}

# unit, least and most of a number given by hand: a smaller one is probably in another unit, such as speed=100 for TFLOP/s, or
# memory=81920 for MiB; the most is hundreds of times what any device has
_KEYS = {
    "speed": ("FLOP/s", 1e10, 1e18),
    "memory": ("bytes", 1e6, 1e15),
    "local": ("bytes/s to a neighbour in the host", 1e6, 1e15),
    "peak": ("FLOP/s, for MFU", 1e10, 1e18),
}


def find_device_type(text: str) -> DeviceType:
    """Return a known type by name (case and "NVIDIA" do not matter), or make one from "speed=...,memory=..." in plain numbers.

    speed (FLOP/s that layers reach) and memory (bytes) are required; local (bytes/s inside a host, 32e9 by default)
    and peak (FLOP/s; the speed by default) are optional.

    Raises:
        ConfigurationError: the name is unknown (the message lists the known ones); a key is unknown, repeated or missing; a number is not
            positive and finite, or out of the range of real devices; or the speed is above the peak.
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


def type_of_device(name: str) -> DeviceType | None:
    """Return the type for a driver's device name (``torch.cuda.get_device_name``); None if it is not known."""
    types = {_plain(told): DEVICE_TYPES[known] for told, known in _TOLD_AS.items()}
    types |= {_plain(known): entry for known, entry in DEVICE_TYPES.items()}
    return types.get(_plain(name))


def _plain(name: str) -> str:
    return name.lower().replace("nvidia", "").replace("tesla", "").replace(" ", "").replace("-", "").replace("_", "")


def _by_hand(text: str) -> DeviceType:
    values: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in _KEYS or key in values:
            known = ", ".join(f"{name} ({unit})" for name, (unit, _, _) in _KEYS.items())
            raise ConfigurationError(f"device type {text!r}: {key!r} is no key; the keys are {known}, each once")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        values[key] = check_number(number, f"device type {text!r}: {key}", positive=True)
        unit, least, most = _KEYS[key]
        if not least <= number <= most:
            raise ConfigurationError(
                f"device type {text!r}: {key}={value.strip()} is {number:g} {unit}, and no device has so "
                f"{'little' if number < least else 'much'}; write "
                f"plain numbers without units, such as speed=100e12,memory=40e9,local=32e9"
            )
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
