"""From texts, mappings and targets to complete TVM targets."""

from __future__ import annotations

import pytest
import tvm
from tvm.target import Target

from tvm_fusion.devices import device_for
from tvm_fusion.errors import TargetError
from tvm_fusion.targets import parse_target, with_products, with_variant

LIMITS = {
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
}


def limits(target: Target) -> dict[str, int]:
    return {name: int(target.attrs[name]) for name in LIMITS}


def test_llvm() -> None:
    assert parse_target("llvm").kind.name == "llvm"


@pytest.mark.parametrize(
    "given",
    [
        "cuda:sm_90a",
        " cuda:sm_90a ",
        {"kind": "cuda", "arch": "sm_90a"},
        '{"kind": "cuda", "arch": "sm_90a"}',
        "nvidia/nvidia-h100",
        Target({"kind": "cuda", "arch": "sm_90a"}),
    ],
)
def test_every_form_of_a_cuda_target_is_completed(given) -> None:
    target = parse_target(given)
    assert target.kind.name == "cuda"
    assert target.attrs["arch"] == "sm_90a"
    assert limits(target) == LIMITS


def test_what_the_user_gave_is_kept() -> None:
    target = parse_target(
        {"kind": "cuda", "arch": "sm_80", "max_shared_memory_per_block": 101376, "host": "llvm"}
    )
    assert target.attrs["max_shared_memory_per_block"] == 101376
    assert target.host.kind.name == "llvm"
    tagged = parse_target({"tag": "nvidia/nvidia-a100", "max_threads_per_block": 512})
    assert tagged.attrs["max_threads_per_block"] == 512
    assert tagged.attrs["arch"] == "sm_80"
    assert parse_target({"kind": "llvm", "num-cores": 2}).attrs["num-cores"] == 2


@pytest.mark.parametrize("given", ["llvm", "cuda:sm_80", "nvidia/nvidia-a100"])
def test_parsing_twice_changes_nothing(given: str) -> None:
    target = parse_target(given)
    assert str(parse_target(target)) == str(target)


def test_the_target_in_scope() -> None:
    with parse_target("cuda:sm_75"):
        assert parse_target().attrs["arch"] == "sm_75"
    with pytest.raises(TargetError, match="none is in scope"):
        parse_target()


def test_cuda_needs_a_gpu(monkeypatch) -> None:
    class Missing:
        exist = False

    monkeypatch.setattr(tvm, "cuda", lambda index: Missing())
    with pytest.raises(TargetError, match=r'there is none; name the arch, as in "cuda:sm_90a"'):
        parse_target("cuda")


def test_cuda_takes_the_arch_of_the_gpu(monkeypatch) -> None:
    class Present:
        exist = True
        compute_version = "8.6"

    monkeypatch.setattr(tvm, "cuda", lambda index: Present())
    assert parse_target("cuda").attrs["arch"] == "sm_86"


@pytest.mark.parametrize(
    "given",
    [
        "",
        "foo",
        "opencl",
        "cuda:",
        "cuda:90",
        "cuda:sm_12345",
        "nvidia/no-such-card",
        "llvm -mcpu=skylake",
        "{bad",
        "{}",
        "[1]",
        '{"kind": "vulkan"}',
        {"kind": "cuda", "arch": "sm_12345"},
        {"kind": "cuda", "arch": 90},
        {"kind": "cuda", "arch": "sm_80", "bogus": 1},
        {"kind": "llvm", "bogus": 1},
        {"tag": "no/such-tag"},
        {"tag": 3},
        {},
        5,
        ["llvm"],
    ],
)
def test_bad_targets_are_one_sentence_that_says_what_is_accepted(given) -> None:
    with pytest.raises(TargetError, match=r'use "llvm"|use one of sm_70') as info:
        parse_target(given)
    assert "\n" not in str(info.value)


def test_a_cpu_that_llvm_lacks_is_refused() -> None:
    with pytest.raises(TargetError, match="LLVM knows no CPU 'zzz'"):
        parse_target('{"kind":"llvm","mcpu":"zzz"}')


def test_hoppers_own_instructions_need_the_variant() -> None:
    given = parse_target("cuda:sm_90")
    assert str(with_variant(given).attrs["arch"]) == "sm_90a"
    assert int(with_variant(given).attrs["max_threads_per_block"]) == 1024


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a", "cuda:sm_120", "llvm"])
def test_other_targets_have_no_variant(target) -> None:
    given = parse_target(target)
    assert with_variant(given).same_as(given)


@pytest.mark.parametrize("given", ["cuda:sm_80", "cuda:sm_90a", "nvidia/nvidia-a100"])
def test_a_target_says_what_float32_products_are_computed_in(given) -> None:
    exact = parse_target(given)
    target = with_products(exact, "tf32")
    assert device_for(target).tf32 and not device_for(exact).tf32
    assert limits(target) == limits(exact)
    assert "tf32" in parse_target(target).keys and "tf32" in with_variant(target).keys
    assert str(with_products(target, "float32")) == str(exact)
    assert with_products(exact, "float32").same_as(exact)


@pytest.mark.parametrize("given", ["llvm", "cuda:sm_75"])
def test_chips_without_tf32_stay_as_they_are(given) -> None:
    target = parse_target(given)
    assert with_products(target, "tf32").same_as(target)
