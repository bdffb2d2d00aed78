"""The last template: chains of anchors in one kernel, refusals of groups, several kernels without a group."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm_fusion.schedules import limits, schedule
from tvm_fusion.schedules.allocation import shared_bytes

from tvm_fusion.errors import LoweringError
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import ModuleBuilder, as_group
from tvm_fusion.transform.lower_groups import lower_groups

op = relax.op


def conv(emit, x, w, **attrs):
    """Convolution and ReLU."""
    return emit(op.nn.relu(emit(op.nn.conv2d(x, w, **attrs))))


def conv_and_mean(emit, x, w):
    """A tensor and its mean, which the tensor's threads cannot form alone."""
    total = emit(op.nn.conv2d(x, w))
    return total, emit(op.mean(total, [2, 3]))


ONE_KERNEL = [
    pytest.param(
        lambda e, x, w: e(op.nn.max_pool2d(conv(e, x, w, padding=1), 3, 2, 1)),
        ((1, 16, 55, 55), (16, 16, 3, 3)),
        id="convolution and pooling",
    ),
    pytest.param(
        lambda e, x, w: conv(e, e(op.nn.max_pool2d(x, 3, 1, 1)), w),
        ((1, 16, 13, 13), (16, 16, 1, 1)),
        id="pooling and convolution",
    ),
    pytest.param(
        lambda e, x, w: e(op.reshape(conv(e, x, w, padding=1), (1, 16 * 13 * 13))),
        ((1, 16, 13, 13), (16, 16, 3, 3)),
        id="flattened convolution",
    ),
    pytest.param(
        lambda e, q, k, v: e(op.nn.attention(q, k, v)), ((1, 16, 4, 8),) * 3, id="attention"
    ),
    pytest.param(
        lambda e, x, g, b: e(op.nn.group_norm(x, g, b, 4, 1, [2, 3])),
        ((2, 16, 8, 8), (16,), (16,)),
        id="group norm",
    ),
    pytest.param(
        lambda e, x: e(op.nn.adaptive_avg_pool2d(x, (3, 3))),
        ((1, 80, 13, 13),),
        id="windows of different size",
    ),
    pytest.param(
        lambda e, x, w, v, u: conv(e, conv(e, conv(e, x, w, padding=1), v), u, padding=1),
        ((1, 8, 13, 13), (16, 8, 3, 3), (8, 16, 1, 1), (8, 8, 3, 3)),
        id="three convolutions",
    ),
]

#: What templates of their own take, and this one can do as well, more slowly.
TAKEN = [
    pytest.param(
        lambda e, x, w, v: conv(e, conv(e, x, w, padding=1), v, padding=1),
        ((1, 16, 13, 13), (16, 16, 3, 3), (8, 16, 3, 3)),
        id="two convolutions",
    ),
    pytest.param(
        lambda e, x, w, v: conv(e, conv(e, x, w, padding=1, groups=16), v),
        ((2, 16, 27, 27), (16, 1, 3, 3), (24, 16, 1, 1)),
        id="depthwise and pointwise",
    ),
    pytest.param(
        lambda e, x, w: e(op.nn.softmax(e(op.matmul(x, w)))),
        ((16, 64), (64, 100)),
        id="product and softmax",
    ),
    pytest.param(
        lambda e, x, w, v: e(op.matmul(e(op.matmul(x, w)), v)),
        ((16, 64), (64, 100), (100, 30)),
        id="two products",
    ),
]


@pytest.mark.parametrize(("build", "shapes"), ONE_KERNEL)
def test_one_kernel(cuda, build, shapes):
    cuda.check(cuda.function(build, *shapes), "fallback")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("build", "shapes"), TAKEN)
def test_forms_that_have_templates_are_right_here_too(cuda, build, shapes, dtype):
    """Sums are float32, so that a half-precision result is off by its own rounding alone."""
    func = cuda.function(build, *shapes, dtype=dtype)
    target = cuda.target("cuda:sm_90")
    assert schedule(func, target)[1] != "fallback"
    scheduled = cuda.template("fallback").apply(func, target).without_attr("global_symbol")
    assert shared_bytes(scheduled) <= limits(target).shared_bytes
    inputs = cuda.inputs(func)
    (expected,) = cuda.expected(func, inputs)
    for backward in (False, True):
        (result,) = cuda_emulation.run(scheduled, inputs, target, backward=backward)
        error = np.abs(result.astype("float64") - expected.astype("float64")).max()
        assert error <= (1e-5 if dtype == "float32" else 2e-3) * np.abs(expected).max()


def test_shared_memory_bounds_the_tile(cuda):
    build, shapes = TAKEN[0].values
    target = cuda.target({"kind": "cuda", "arch": "sm_80", "max_shared_memory_per_block": 4096})
    scheduled = cuda.template("fallback").apply(cuda.function(build, *shapes), target)
    assert 0 < shared_bytes(scheduled) <= 4096


@pytest.mark.nvcc
@pytest.mark.parametrize(("build", "shapes"), ONE_KERNEL)
def test_resources(cuda, build, shapes):
    cuda.resources(cuda.function(build, *shapes), "sm_90")


def test_a_group_that_needs_several_kernels_is_refused(cuda):
    func = cuda.function(conv_and_mean, (1, 16, 13, 13), (16, 16, 1, 1))
    with pytest.raises(LoweringError, match="leave it ungrouped"):
        schedule(func, cuda.target("cuda:sm_90"))


def test_without_a_group_several_kernels_are_legal(cuda):
    func = cuda.function(conv_and_mean, (1, 16, 13, 13), (16, 16, 1, 1), group=False)
    target = cuda.target("cuda:sm_90")
    scheduled, name = schedule(func, target)
    assert name == "fallback"
    assert len(cuda_emulation.kernels(cuda_emulation.cuda_source(scheduled, target))) == 3


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32"])
def test_sums_of_numbers_are_nobody_elses(dtype):
    """Integers times 0 are no reads: a sum of them has no source that a template of rows could look at."""
    builder = ModuleBuilder(dtype)
    value = builder.op("zeros", op.multiply(builder.input("x", (4, 17)), relax.const(0, dtype)))
    value = builder.op("sum", op.sum(value, axis=[1]))
    module = builder.finish(builder.op("more", op.add(value, relax.const(1, dtype))))
    lowered, kernels = lower_groups(as_group(module, "vertical"))
    func = lowered[kernels["fused_vertical_0"]].with_attr("tvm_fusion.strategy", "vertical")
    target = parse_target("cuda:sm_90")
    made, name = schedule(func, target)
    assert name == "fallback"
    (found,) = cuda_emulation.run(made, [np.ones((4, 17), dtype)], target)
    assert (found == 1).all()


def test_symbolic_shapes(cuda):
    rows = tvm.tirx.Var("n", "int64")
    func = cuda.function(lambda e, x: e(op.nn.softmax(x)), (rows, 64), group=False)
    target = cuda.target("cuda:sm_90")
    scheduled, name = schedule(func, target)
    assert name == "fallback"
    assert cuda_emulation.kernels(cuda_emulation.cuda_source(scheduled, target))
