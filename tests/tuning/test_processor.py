"""What a processor is called in records."""

from __future__ import annotations

import pytest

from tvm_fusion.targets import parse_target
from tvm_fusion.tuning import processor, workbench
from tvm_fusion.tuning.processor import named_in, processor_name
from tvm_fusion.tuning.workbench import Remote, device_of

X86 = "processor\t: 0\nvendor_id\t: A\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: A  CPU @ 2 GHz\nmodel name\t: B\n"
BOARD = (
    "processor\t: 0\nBogoMIPS\t: 108.00\n\nHardware\t: BCM2835\nModel\t\t: Raspberry Pi 4 Model B\n"
)
POWER = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n"
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [(X86, "A  CPU @ 2 GHz"), (BOARD, "Raspberry Pi 4 Model B"), (POWER, "POWER9, altivec supported"),
     (ARM, ""), ("", "")],
)  # fmt: skip
def test_names_in_cpuinfo(text, name):
    assert named_in(text) == name


@pytest.mark.parametrize(
    ("system", "seen", "name"),
    [("A  CPU @ 2 GHz\n", "skylake", "A CPU @ 2 GHz (skylake)"), ("", "neoverse-n1", "neoverse-n1"),
     ("apple-m1", "apple-m1", "apple-m1"), ("A", "", "A")],
)  # fmt: skip
def test_a_name_says_what_code_runs_there(system, seen, name, monkeypatch):
    monkeypatch.setattr(processor, "_name_of_system", lambda: system)
    monkeypatch.setattr(processor.codegen, "llvm_get_system_cpu", lambda: seen)
    processor_name.cache_clear()
    try:
        assert processor_name() == name
    finally:
        processor_name.cache_clear()


def test_a_device_is_the_processor_with_the_features_of_the_target(monkeypatch):
    monkeypatch.setattr(workbench, "processor_name", lambda: "A CPU")
    plain = device_of(parse_target("llvm"), None)
    assert (plain.name, plain.former) == ("A CPU", "cpu")
    wide = device_of(parse_target('{"kind": "llvm", "mcpu": "skylake-avx512"}'), None)
    assert (wide.name, wide.former) == ("A CPU, mcpu=skylake-avx512", "skylake-avx512")
    some = device_of(parse_target('{"kind": "llvm", "mattr": ["+avx2", "+fma"]}'), None)
    assert (some.name, some.former) == ("A CPU, +avx2, +fma", "cpu")
    # Servers are named by their key, GPUs by their driver.
    assert device_of(parse_target("llvm"), Remote("h", 1, "k")).name == "rpc:k"


def test_this_machine_has_a_name():
    assert processor_name().strip() == processor_name() != ""
