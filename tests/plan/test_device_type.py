"""Known device types, types described by hand, and refusals."""

import pytest
from refusals import refusal

from lightning_holmes.plan.device_type import DEVICE_TYPES, find_device_type, type_of_device


def test_names_are_read_loosely() -> None:
    assert find_device_type("A100-80GB").peak_flops_per_s == 312e12
    assert find_device_type("nvidia a100 80gb") is DEVICE_TYPES["A100-80GB"]
    assert find_device_type("NVIDIA H100-80GB").memory_bytes == 80 * 2**30
    assert all(entry.source != "given by hand" for entry in DEVICE_TYPES.values())


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI250X", "MI250X"),
        ("NVIDIA A10G", None),
        ("Tesla V100-PCIE-32GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
    ],
)
def test_devices_are_known_by_the_names_that_drivers_give_them(told: str, name: str | None) -> None:
    found = type_of_device(told)
    assert (None if found is None else found.name) == name


def test_an_mi250x_is_two_devices_as_for_torch() -> None:
    """AMD's data sheet gives 383 TFLOP/s, 128 GB and 3,277 GB/s for both dies."""
    die = find_device_type("MI250X")
    assert (2 * die.peak_flops_per_s, 2 * die.memory_bytes, "two dies" in die.source) == (383e12, 128 * 2**30, True)


def test_by_hand() -> None:
    device = find_device_type("speed=100e12, memory=40e9, peak=200e12")
    assert (device.flops_per_s, device.memory_bytes, device.efficiency) == (100e12, 40e9, 0.5)
    assert find_device_type("speed=1e12,memory=4e9,local=1e9").local_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A100-90GB", ["'A100-90GB'", "did you mean A100-80GB", "H100-80GB", "speed=100e12"]),
        ("Cray-1", ["'Cray-1'", "V100-16GB", "MI300X", "speed=100e12,memory=40e9"]),
        ("speed=inf,memory=1e9", ["speed=inf", "positive, finite"]),
        ("speed=0,memory=1e9", ["speed=0"]),
        ("speed=1e12,memory=-4", ["memory=-4"]),
        ("speed=fast,memory=4", ["speed=nan"]),
        ("speed=1e12", ["memory is missing"]),
        ("speed=1e12,memory=1e9,colour=2", ["'colour'", "speed (FLOP/s)"]),
        ("speed=2e12,memory=1e9,peak=1e12", ["above peak"]),
        ("speed=100,memory=40e9", ["speed=100", "speed=100e12", "without units"]),
        ("speed=100e12,memory=40", ["memory=40", "bytes"]),
        ("speed=100e12,memory=81920", ["memory=81920", "81920 bytes", "so little", "memory=40e9"]),
        ("speed=1e9,memory=40e9", ["speed=1e9", "FLOP/s", "so little"]),
        ("speed=1e30,memory=40e9", ["speed=1e30", "FLOP/s", "so much", "speed=100e12"]),
        ("speed=100e12,memory=40e18", ["memory=40e18", "bytes", "so much"]),
        ("speed=100e12,memory=40e9,local=300", ["local=300", "bytes/s"]),
    ],
)
def test_refused(text: str, words: list[str]) -> None:
    with refusal(*words):
        find_device_type(text)


def test_products_in_other_precisions_have_their_own_rate() -> None:
    for name in ("A100-80GB", "V100-32GB", "H200"):
        half = find_device_type(name)
        assert half.at("half") == half
        assert half.at("fp32").flops_per_s < half.flops_per_s / 4 and half.at("fp32").memory_bytes == half.memory_bytes
        assert half.at("fp64").flops_per_s <= half.at("fp32").flops_per_s
    by_hand = find_device_type("speed=1e12,memory=4e9")
    assert by_hand.at("fp32") == by_hand, "what the layers reach is given for the run's precision"
