"""The device table and the arch names."""

from __future__ import annotations

import pytest

from tvm_fusion.devices import CPU, DEVICES, base_arch, capability, device_for
from tvm_fusion.targets import parse_target


@pytest.mark.parametrize("spec", DEVICES.values(), ids=DEVICES)
def test_entries_are_consistent(spec) -> None:
    """Limits that follow from each other, and speeds in the units they claim."""
    assert spec.kind == "cuda"
    assert spec.arch == base_arch(spec.arch)
    assert not spec.estimated
    assert spec.source
    assert (
        spec.shared_memory_per_block
        <= spec.shared_memory_per_block_optin
        <= spec.shared_memory_per_multiprocessor
        <= spec.cache_bytes
    )
    assert spec.max_threads_per_block <= spec.max_threads_per_multiprocessor
    assert spec.max_threads_per_multiprocessor % spec.warp_size == 0
    assert 1e11 < spec.memory_bandwidth < 1e13
    assert 1e12 < spec.peak_flops("float32") < spec.peak_flops("float16") < 1e16
    # What tensor cores do with TF32 is half of what they do with 16 bits, by all data sheets; before sm_80 nothing.
    half = spec.peak_flops("float16") / 2
    wanted = half if capability(spec.arch) >= 80 else spec.peak_flops("float32")
    assert spec.peak_flops("tf32") == pytest.approx(wanted, rel=0.01)
    assert 1e-7 < spec.launch_overhead < 1e-4


def test_a_dtype_without_an_entry_counts_as_float32() -> None:
    volta = DEVICES["sm_70"]
    assert volta.peak_flops("bfloat16") == volta.peak_flops("float32")


def test_specs_are_values() -> None:
    """Hashable and equal by content, so that they can key caches."""
    assert len({*DEVICES.values(), *DEVICES.values()}) == len(DEVICES)
    with pytest.raises(AttributeError):
        CPU.multiprocessors = 4


@pytest.mark.parametrize(
    ("arch", "number"), [("sm_75", 75), ("sm_90", 90), ("sm_90a", 90), ("sm_100f", 100)]
)
def test_capability(arch: str, number: int) -> None:
    assert capability(arch) == number
    assert base_arch(arch) == f"sm_{number}"


@pytest.mark.parametrize("arch", ["sm_12345", "90", "sm_90x", "sm_80a", "sm_90f", "sm_50", ""])
def test_unknown_arch(arch: str) -> None:
    with pytest.raises(ValueError, match=r"unknown CUDA arch .* use one of sm_70, .*sm_121"):
        capability(arch)


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_device_of_a_known_arch(arch: str) -> None:
    assert device_for(parse_target(f"cuda:{arch}")) is DEVICES["sm_90"]


def test_an_arch_without_an_entry_borrows_the_nearest_lower_one() -> None:
    spec = device_for(parse_target("cuda:sm_87"))
    assert spec.estimated
    assert spec.arch == "sm_87"
    assert spec.multiprocessors == DEVICES["sm_86"].multiprocessors


def test_cpu_scales_with_the_cores_of_the_target() -> None:
    assert device_for(parse_target("llvm")) == CPU
    two = device_for(parse_target({"kind": "llvm", "num-cores": 2}))
    assert two.multiprocessors == 2
    assert two.peak_flops("float32") == CPU.peak_flops("float32") / 4


@pytest.mark.gpu
def test_the_entry_agrees_with_the_present_gpu() -> None:
    """Limits (not speeds) of the arch are what the driver reports."""
    import tvm

    spec, device = device_for(parse_target("cuda")), tvm.cuda(0)
    assert device.warp_size == spec.warp_size
    assert device.max_threads_per_block == spec.max_threads_per_block
    assert device.max_shared_memory_per_block == spec.shared_memory_per_block
    if device.device_name.startswith(spec.name.removesuffix(" SXM")):
        assert device.multi_processor_count == spec.multiprocessors
