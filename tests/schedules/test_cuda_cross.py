"""Cross groups: anchors of different kinds that meet in registers, or through shared memory after a spill.

Groups are annotated by hand, lowered as LowerGroups does, scheduled, run on the CPU by emulation and compared with the
unfused operators in float32.
"""

from __future__ import annotations

import re

import pytest
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.allocation import shared_bytes

from tvm_fusion.compat import relax
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op

SM75, SM90 = parse_target("cuda:sm_75"), parse_target("cuda:sm_90")
ARCHS = ("sm_75", "sm_80", "sm_90", "sm_90a", "sm_120")


def joined(cuda, mod, dtype: str = "float32", **options: str):
    """The whole module as one joined cross group."""
    return cuda.group(mod, "cross", dtype, form="joined", **options)


# ---- what joins --------------------------------------------------------------------------------


def projection(b: ModuleBuilder, channels=(8, 32, 24), size=7, stride=2):
    """The end of a ResNet block with a projection: two 1x1 convolutions of different inputs."""
    inner, outer, before = channels
    y = b.input("y", _shape(b, inner, size))
    x = b.input("x", _shape(b, before, size * stride))
    main = b.bias("bias0", b.conv("conv0", y, outer, 1))
    short = b.bias("bias1", b.conv("conv1", x, outer, 1, stride=stride))
    return b.finish(b.relu("relu", b.add("add", main, short)))


def repvgg(b: ModuleBuilder, channels=16, size=13):
    """3x3, 1x1 and an identity."""
    x = b.input("x", _shape(b, channels, size))
    wide = b.bias("bias3", b.conv("conv3", x, channels, 3))
    narrow = b.bias("bias1", b.conv("conv1", x, channels, 1))
    return b.finish(b.relu("relu", b.add("add1", b.add("add0", wide, narrow), x)))


def head(b: ModuleBuilder, channels=(20, 12), size=9, kernels=(3, 1), join="add"):
    """A segmentation head: branches of other kernel sizes, each with its own activation."""
    x = b.input("x", _shape(b, channels[0], size))
    parts = [b.conv(f"conv{k}", x, channels[1], k) for k in kernels]
    parts = [b.relu(f"relu{i}", b.bias(f"bias{i}", part)) for i, part in enumerate(parts)]
    total = parts[0]
    for i, part in enumerate(parts[1:]):
        total = b.op(f"join{i}", getattr(op, join)(total, part))
    return b.finish(total)


def depthwise_gate(b: ModuleBuilder):
    """A depthwise convolution times the sigmoid of a dense one."""
    x = b.input("x", _shape(b, 16, 14))
    deep = b.conv("deep", x, 16, 3, groups=16)
    wide = b.op("sigmoid", op.sigmoid(b.conv("wide", x, 16, 1)))
    return b.finish(b.relu("relu", b.op("times", op.multiply(deep, wide))))


def mixed_groups(b: ModuleBuilder):
    """Two grouped convolutions whose groups differ in size."""
    x = b.input("x", _shape(b, 24, 9))
    parts = [b.conv(f"conv{g}", x, 48, 3, groups=g) for g in (4, 6)]
    return b.finish(b.op("smaller", op.minimum(*parts)))


def tree(b: ModuleBuilder):
    """max(1x1, 3x3) + tanh(5x5) * shortcut, then ReLU; the inner sum is returned too."""
    x, y = b.input("x", _shape(b, 8, 13)), b.input("y", _shape(b, 8, 13))
    largest = b.op("max", op.maximum(b.conv("conv1", x, 8, 1), b.conv("conv3", x, 8, 3)))
    scaled = b.op("times", op.multiply(b.op("tanh", op.tanh(b.conv("conv5", x, 8, 5))), y))
    total = b.add("add", largest, scaled)
    return b.finish(total, b.relu("relu", total))


def prologues(b: ModuleBuilder):
    """Every branch transforms its own input first."""
    x, y = b.input("x", _shape(b, 8, 14)), b.input("y", _shape(b, 12, 28))
    first = b.conv("conv0", b.relu("relu0", b.bias("shift", x)), 16, 3)
    second = b.conv("conv1", b.op("tanh", op.tanh(y)), 16, 1, stride=2)
    return b.finish(b.relu("relu", b.add("add", first, second)))


def products(b: ModuleBuilder, batch=(), transposed=False):
    """Two matrix products of other lengths, and the first operand added."""
    x, y = b.input("x", (*batch, 33, 20)), b.input("y", (*batch, 33, 50))
    w = b.const(20, 20) if transposed else b.const(*batch, 20, 20)
    if transposed:
        w = b.op("turned", op.permute_dims(w))
    first = b.op("gelu", op.nn.gelu(b.op("matmul0", op.matmul(x, w))))
    second = b.op("matmul1", op.matmul(y, b.const(*batch, 50, 20, scale=0.1)))
    return b.finish(b.add("add1", b.add("add0", first, second), x))


def few_rows(b: ModuleBuilder):
    """Two matrix-vector products of other lengths."""
    x, y = b.input("x", (1, 120)), b.input("y", (1, 50))
    first, second = b.dense("dense0", x, 47), b.dense("dense1", y, 47)
    return b.finish(b.relu("relu", b.add("add", first, second)))


def gate_beside(b: ModuleBuilder):
    """A convolution times a gate: the gate is too small to be a template's own business here."""
    x, p = b.input("x", (2, 8, 9, 9)), b.input("p", (2, 6))
    gate = b.op("sigmoid", op.sigmoid(b.dense("gate", p, 12)))
    wide = b.op("reshape", op.reshape(gate, (2, 12, 1, 1)))
    return b.finish(b.op("times", op.multiply(b.relu("relu", b.conv("conv", x, 12, 3)), wide)))


def _shape(b: ModuleBuilder, channels: int, size: int) -> tuple[int, ...]:
    return (1, channels, size, size) if b.layout == "NCHW" else (1, size, size, channels)


JOINS = {
    "projection": projection,
    "projection 1:4": lambda b: projection(b, (6, 16, 24), 7, 1),
    "repvgg": repvgg,
    "head": head,
    "ratio 1:25": lambda b: head(b, (7, 13), 13, (1, 5), "maximum"),
    "ratio 1:49": lambda b: head(b, (6, 10), 13, (7, 1), "multiply"),
    "depthwise gate": depthwise_gate,
    "mixed groups": mixed_groups,
    "tree": tree,
    "prologues": prologues,
    "gate beside": gate_beside,
}
PRODUCTS = {
    "products": (products, "matmul"),
    "batched": (lambda b: products(b, (3,)), "matmul"),
    "transposed": (lambda b: products(b, transposed=True), "matmul"),
    "few rows": (few_rows, "matrix_vector"),
}


#: Joins of other anchors than dense convolutions of images.
MIXED = ("depthwise gate", "mixed groups", "gate beside")


def template_of(name: str, arch: str) -> str:
    """The template of a join of float32 convolutions, of which newer chips copy the operands of dense ones."""
    return "conv2d" if arch == "sm_75" or name in MIXED else "multiply_add"


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("name", JOINS)
def test_convolutions_meet_in_registers(cuda, name, arch):
    group = joined(cuda, JOINS[name](ModuleBuilder()))
    cuda.check_group(group, template_of(name, arch), arch=arch)
    assert _sums_in_shared_memory(group, cuda.target(f"cuda:{arch}")) == 0


@pytest.mark.parametrize("name", JOINS)
def test_channels_first_in_half_precision(cuda, name):
    group = joined(cuda, JOINS[name](ModuleBuilder("float16")), "float16")
    cuda.check_group(group, "conv2d")
    assert _sums_in_shared_memory(group) == 0


#: Template by the name of a join that tensor cores can, or cannot, compute.
LAST = {
    "projection": "tensor_core",
    "repvgg": "tensor_core",
    "head": "tensor_core",
    "depthwise gate": "conv2d",
    "mixed groups": "conv2d",
}


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("name", LAST)
def test_channels_last(cuda, name, arch):
    group = joined(cuda, JOINS[name](ModuleBuilder("float16", "NHWC")), "float16")
    cuda.check_group(group, "conv2d" if arch == "sm_75" else LAST[name], arch=arch)


@pytest.mark.parametrize("name", ["projection", "head"])
def test_bfloat16(cuda, name):
    cuda.check_group(joined(cuda, JOINS[name](ModuleBuilder("bfloat16")), "bfloat16"), "conv2d")


#: Template of products with more than a few rows on newer chips.
NEWER = {"float32": "multiply_add", "float16": "tensor_core"}


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_matrix_products_meet_in_registers(cuda, name, dtype, arch):
    make, template = PRODUCTS[name]
    if arch == "sm_90" and template == "matmul":
        template = NEWER[dtype]
    cuda.check_group(joined(cuda, make(ModuleBuilder(dtype)), dtype), template, arch=arch)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("name", ["projection", "repvgg", "tree", "mixed groups"])
def test_every_index_is_right(cuda, name, arch):
    group = joined(cuda, JOINS[name](ModuleBuilder()))
    cuda.check_group(group, template_of(name, arch), positions=True, arch=arch)


def test_an_anchor_that_feeds_another_is_no_cross_group(cuda):
    def make(emit, x, w, v):
        inner = emit(op.nn.conv2d(x, w, padding=1))
        return emit(op.add(inner, emit(op.nn.conv2d(inner, v))))

    func = cuda.function(make, (1, 8, 9, 9), (8, 8, 3, 3), (8, 8, 1, 1))
    assert cuda.template("conv2d").apply(func, SM90) is None


def test_a_stride_is_not_staged_where_nothing_is_read(cuda):
    """A 1x1 window with stride 2 touches a quarter of the box around it."""

    def make(emit, x, w):
        return emit(op.nn.conv2d(x, w, strides=2))

    func = cuda.function(make, (1, 32, 28, 28), (32, 32, 1, 1))
    source = cuda_emulation.cuda_source(schedule(func, SM75)[0], SM75)
    sizes = [int(n) for n in re.findall(r"__shared__ alignas\(64\) float \w+\[(\d+)\]", source)]
    launch = cuda_emulation.launch_of(schedule(func, SM75)[0])
    outputs = 32 * 14 * 14 // launch.grid[0]
    assert 0 < sum(sizes) <= 32 * (outputs + 32)


def test_anchors_share_the_space_of_their_slices(cuda):
    scheduled, _ = schedule(joined(cuda, head(ModuleBuilder(), (64, 64), 28)).func, SM75)
    source = cuda_emulation.cuda_source(scheduled, SM75)
    sizes = [int(n) for n in re.findall(r"__shared__ alignas\(64\) float \w+\[(\d+)\]", source)]
    assert 0 < 4 * sum(sizes) < shared_bytes(scheduled)


# ---- resources of real shapes ------------------------------------------------------------------

#: name: module, registers of a thread at most (recorded on the archs of ``ARCHS`` with nvcc 13).
REAL = {
    "resnet50 56": (lambda b: projection(b, (64, 256, 64), 56, 1), 128),
    "resnet50 28": (lambda b: projection(b, (128, 512, 256), 28, 2), 128),
    "repvgg 56": (lambda b: repvgg(b, 64, 56), 128),
    "segmentation": (lambda b: head(b, (256, 128), 64), 128),
}


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", REAL)
def test_real_shapes_do_not_spill(cuda, name, arch):
    make, most = REAL[name]
    found = cuda.resources(joined(cuda, make(ModuleBuilder())).func, arch)
    # From sm_80 on one block of a multiprocessor is enough, with as many registers as it gets.
    assert found.registers <= (most if arch == "sm_75" else 255)


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("name", REAL)
def test_real_shapes_do_not_spill_in_half_precision(cuda, name, layout, arch):
    make, most = REAL[name]
    group = joined(cuda, make(ModuleBuilder("float16", layout)), "float16")
    found = cuda.resources(group.func, arch)
    # Tensor cores keep as many sums in registers as fit.
    on_tensor_cores = layout == "NHWC" and arch != "sm_75"
    assert found.spill_bytes == 0 and (on_tensor_cores or found.registers <= most)


# ---- through shared memory ---------------------------------------------------------------------


@pytest.mark.parametrize("name", JOINS)
def test_sums_through_shared_memory(cuda, name):
    group = joined(cuda, JOINS[name](ModuleBuilder()), stage="shared")
    if name == "gate beside":
        # A gate has no sum for the threads along the axes that it is broadcast over.
        assert schedule(group.func, SM90)[1] != "conv2d"
        return
    cuda.check_group(group, "conv2d")
    assert _sums_in_shared_memory(group) >= 2


def _sums_in_shared_memory(group, target=SM90) -> int:
    """Buffers of convolutions' results that the schedule puts into shared memory."""
    text = schedule(group.func, target)[0].script()
    return len(re.findall(r'conv2d\w* = T.sblock_alloc_buffer\([^\n]*scope="shared"\)', text))


@pytest.mark.parametrize("name", ["products", "batched"])
def test_products_through_shared_memory(cuda, name):
    cuda.check_group(
        joined(cuda, PRODUCTS[name][0](ModuleBuilder("float16")), "float16", stage="shared"),
        "matmul",
        arch="sm_75",
    )


def test_sums_through_shared_memory_need_room(cuda):
    group = joined(cuda, head(ModuleBuilder()), stage="shared")
    small = {"kind": "cuda", "arch": "sm_80", "max_shared_memory_per_block": 256}
    assert cuda.template("conv2d").apply(group.func, cuda.target(small)) is None
    assert cuda.template("conv2d").apply(group.func, SM90) is not None


@pytest.mark.nvcc
@pytest.mark.parametrize("name", ["resnet50 28", "repvgg 56"])
def test_sums_through_shared_memory_take_fewer_registers(cuda, name):
    make, _ = REAL[name]
    direct = cuda.resources(joined(cuda, make(ModuleBuilder())).func, "sm_75")
    staged = cuda.resources(joined(cuda, make(ModuleBuilder()), stage="shared").func, "sm_75")
    assert staged.registers <= direct.registers
