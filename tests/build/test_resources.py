"""The planner's compiler: what it says of groups, and that one bad group spoils no other."""

from __future__ import annotations

import re

import pytest

import tvm_fusion as tf
from tvm_fusion.build import resources
from tvm_fusion.build.ptxas import KernelResources
from tvm_fusion.build.resources import KernelCompiler
from tvm_fusion.devices import device_for
from tvm_fusion.errors import CompilerError, LoweringError
from tvm_fusion.guards import Resources
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.blocks import conv_bias_relu, resnet_bottleneck
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import solved
from tvm_fusion.testing.synthetic_blocks import mixed_convs
from tvm_fusion.testing.transformer_blocks import dense_norm_heads
from tvm_fusion.transform import VerticalFusion

CUDA, CPU = parse_target("cuda:sm_90"), parse_target("llvm")


def equal_blocks(count, channels=8):
    """The same block over and over, and its groups."""
    b = ModuleBuilder()
    y = b.input("x", (1, channels, 6, 6))
    for i in range(count):
        y = conv_bias_relu(b, f"n{i}", y, channels)
    return b.finish(y), [vertical(f"n{i}_conv", f"n{i}_bias", f"n{i}_relu") for i in range(count)]


def vertical(*names):
    return Proposal("vertical", names, (names[0],), (names,), len(names))


def kernels_of(source):
    return sorted(set(re.findall(r"(\w+_kernel\w*)\(", source)))


@pytest.fixture
def fake_nvcc(monkeypatch):
    """Every kernel takes 40 registers; yields what was compiled, as lists of kernel names."""
    compiled = []

    def kernel_resources(source, arch):
        assert arch == "sm_90"
        names = kernels_of(source)
        compiled.append(names)
        return {name: KernelResources(40, 0, 1024) for name in names}

    monkeypatch.setattr(resources, "kernel_resources", kernel_resources)
    return compiled


def test_on_a_cpu_there_are_no_registers():
    module, groups = equal_blocks(1)
    (found,) = KernelCompiler(module, CPU)(groups)
    assert found.template and not found.error
    assert (found.registers, found.spill_bytes, found.threads) == (None, None, None)


def test_what_the_compiler_reports(fake_nvcc):
    module, groups = equal_blocks(1)
    (found,) = KernelCompiler(module, CUDA)(groups)
    assert (found.registers, found.spill_bytes) == (40, 0)
    # Static shared memory, and what the launch asks for.
    assert found.dynamic_shared and found.shared_bytes > 1024
    assert found.template == "multiply_add" and 0 < found.threads <= 1024
    assert fake_nvcc == [["kernel_0_kernel"]]


def test_equal_groups_are_compiled_once(fake_nvcc):
    module, groups = equal_blocks(4)
    compiler = KernelCompiler(module, CUDA)
    assert compiler(groups[:3]) == [compiler(groups[3:])[0]] * 3
    assert len(fake_nvcc) == 1 and len(fake_nvcc[0]) == 1


def test_unequal_groups_are_all_compiled(fake_nvcc):
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    module = b.finish(*(b.relu(f"r{i}", b.conv(f"c{i}", x, 8 * i)) for i in (1, 2, 3)))
    found = KernelCompiler(module, CUDA)([vertical(f"c{i}", f"r{i}") for i in (1, 2, 3)])
    assert [r.registers for r in found] == [40] * 3
    assert len([name for names in fake_nvcc for name in names]) == 3


def test_an_annotated_module_is_read_like_the_plain_one(fake_nvcc):
    module, groups = equal_blocks(2)
    annotated = VerticalFusion(target=CUDA)(module)
    assert KernelCompiler(annotated, CUDA)(groups) == KernelCompiler(module, CUDA)(groups)


def test_no_group_at_all(fake_nvcc):
    assert KernelCompiler(equal_blocks(1)[0], CUDA)([]) == []
    assert fake_nvcc == []


@pytest.mark.parametrize("target", [CUDA, CPU], ids=["cuda", "cpu"])
def test_a_group_that_cannot_be_scheduled_spoils_no_other(monkeypatch, fake_nvcc, target):
    real = resources.schedule

    def schedule(func, target):
        if "tanh" in func.script():
            raise LoweringError("no template takes it")
        return real(func, target)

    monkeypatch.setattr(resources, "schedule", schedule)
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    bad = b.op("t", tf.compat.relax.op.tanh(b.conv("a", x, 8)))
    module = b.finish(bad, b.relu("r", b.conv("c", x, 8)))
    found = KernelCompiler(module, target)([vertical("a", "t"), vertical("c", "r")])
    assert found[0] == Resources(error="no template takes it")
    assert found[1].template and not found[1].error


def test_a_group_that_cannot_be_lowered_spoils_no_other(monkeypatch, fake_nvcc):
    real = resources.lower_groups

    def lower_groups(mod):
        if any(
            g.attrs["tvm_fusion.depth"] == 2
            for n, g in mod.functions.items()
            if n.name_hint != "main"
        ):
            raise LoweringError("depth 2 cannot be lowered")
        return real(mod)

    monkeypatch.setattr(resources, "lower_groups", lower_groups)
    module, (first, second) = equal_blocks(2)
    short = vertical(*second.operators[:2])
    found = KernelCompiler(module, CUDA)([first, short])
    assert found[0].registers == 40
    assert found[1].error == "depth 2 cannot be lowered" and found[1].registers is None


def rejecting(message):
    """nvcc with a message for every source that holds the kernel of the second group."""

    def kernel_resources(source, arch):
        if "kernel_1_kernel" in source:
            raise CompilerError(message)
        return {name: KernelResources(40, 0, 1024) for name in kernels_of(source)}

    return kernel_resources


def two_groups():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    module = b.finish(*(b.relu(f"r{i}", b.conv(f"c{i}", x, 8 * i)) for i in (1, 2)))
    return module, [vertical(f"c{i}", f"r{i}") for i in (1, 2)]


def test_code_that_nvcc_rejects_is_one_groups_error(monkeypatch):
    monkeypatch.setattr(resources, "kernel_resources", rejecting("nvcc rejects it: too much"))
    module, groups = two_groups()
    good, bad = KernelCompiler(module, CUDA)(groups)
    assert good.registers == 40 and not good.error
    assert bad.error == "the compiler rejects the generated code: nvcc rejects it: too much"


def test_without_nvcc_nothing_is_guessed(monkeypatch):
    monkeypatch.setattr(
        resources, "kernel_resources", rejecting("nvcc is not installed; install it")
    )
    module, groups = two_groups()
    with pytest.raises(CompilerError, match="nvcc is not installed"):
        KernelCompiler(module, CUDA)(groups)


def test_a_group_that_becomes_several_kernels(monkeypatch):
    def kernel_resources(source, arch):
        one = KernelResources(40, 0, 1024)
        return {"kernel_0_kernel": one, "kernel_0_kernel_1": one}

    monkeypatch.setattr(resources, "kernel_resources", kernel_resources)
    module, groups = equal_blocks(1)
    (found,) = KernelCompiler(module, CUDA)(groups)
    assert found.error == "the group became 2 kernels instead of one"


def test_a_plan_without_building_is_static():
    for group in tf.plan(resnet_bottleneck(size=8), CUDA).groups:
        assert (group.registers, group.spill_bytes, group.shared_bytes, group.template) == (
            None,
        ) * 4
        assert group.estimated_registers > 0


def test_a_built_plan_for_a_cpu_names_its_templates():
    for group in tf.plan(resnet_bottleneck(channels=32, width=8, size=8), CPU, build=True).groups:
        assert group.template and group.registers is None


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_a_built_plan(arch):
    """Registers, spills and shared memory of every chosen kernel, as ptxas reports them."""
    plan = tf.plan(mixed_convs([16, 32]), f"cuda:{arch}", build=True)
    (group,) = plan.groups
    assert 16 <= group.registers <= 255 and group.spill_bytes == 0
    most = device_for(parse_target(f"cuda:{arch}")).shared_memory_per_block_optin
    template, limit = ("conv2d", 48 * 1024) if arch == "sm_75" else ("multiply_add", most)
    assert 0 < group.shared_bytes <= limit and group.template == template


@pytest.mark.nvcc
def test_kernels_of_every_form_are_one_each():
    module = dense_norm_heads(heads=2, rows=16, width=64, outputs=64)
    chosen = [c.proposal for c in solved(module).chosen]
    found = KernelCompiler(module, CUDA)(chosen)
    assert all(not r.error and r.registers and r.spill_bytes == 0 and r.threads for r in found)
