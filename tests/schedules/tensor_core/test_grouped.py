"""Grouped convolutions on tensor cores and by multiply-adds: the group as a batch, several groups as one product."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.cuda.tensor_core import template
from tvm_fusion.schedules.cuda.tensor_core.access import access_of
from tvm_fusion.schedules.cuda.tensor_core.groups import group_of, join_groups
from tvm_fusion.schedules.cuda.tensor_core.recognition import products

from tvm_fusion.guards.grouped_products import joinable
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op


def grouped(
    channels: int,
    groups: int,
    *,
    outputs: int | None = None,
    size: int = 9,
    kernel: int = 3,
    stride: int = 1,
    dtype: str = "float16",
    layout: str = "NHWC",
    shortcut: bool = False,
):
    """A grouped convolution with bias, perhaps a shortcut, and ReLU."""
    b = ModuleBuilder(dtype, layout)
    image = (size, size + 1)
    x = b.input("x", (2, *image, channels) if layout == "NHWC" else (2, channels, *image))
    value = b.conv("conv", x, outputs or channels, kernel, stride=stride, groups=groups)
    value = b.bias("bias", value)
    return b.finish(b.relu("relu", b.add("add", value, x) if shortcut else value))


#: name: arguments of `grouped`.
CASES = {
    "32 groups of 4": ((128, 32), {}),
    "8 groups of 8": ((64, 8), {"shortcut": True}),
    "3 groups of 16, strided": ((48, 3), {"stride": 2}),
    "2 groups of 32 and 24": ((64, 2), {"outputs": 48, "kernel": 5}),
    "6 groups of 4 and 8, 1x1": ((24, 6), {"outputs": 48, "kernel": 1}),
    "10 groups of 2": ((20, 10), {"shortcut": True}),
    "bfloat16": ((32, 4), {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", CASES)
def test_values(tensor, name, arch):
    arguments, options = CASES[name]
    function = tensor.group(
        grouped(*arguments, **options), "vertical", options.get("dtype", "float16")
    )
    tensor.check(function, tensor.by_template(function, arch=arch), arch=arch)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_values_whatever_is_joined(tensor, monkeypatch, count):
    monkeypatch.setattr(template, "joinable", lambda *_: [count])
    function = tensor.group(grouped(64, 8), "vertical")
    tensor.check(function, tensor.by_template(function))


def test_values_of_weights_that_may_change(tensor):
    function = tensor.group(grouped(*CASES["8 groups of 8"][0]), "vertical").unpacked
    tensor.check(function, tensor.scheduled(function))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_values_of_multiply_adds(tensor, layout):
    module = grouped(64, 4, dtype="float32", layout=layout, size=14)
    function = tensor.group(module, "vertical", "float32")
    tensor.check(function, tensor.scheduled(function, "multiply_add"))


def form_of(tensor, *arguments, **options):
    """The products of a grouped convolution."""
    return products(tensor.group(grouped(*arguments, **options), "vertical").func)


def test_the_group_is_a_batch(tensor):
    form = form_of(tensor, 64, 8, outputs=128)
    assert (form.batch_count, form.row_count, form.column_count) == (8, 2 * 9 * 10, 16)
    assert form.anchors[0].depth == 9 * 8


def test_joined_groups_follow_each_other_in_memory(tensor):
    """The rows of four groups of four channels are copied 16 bytes at a time; weights are zero off the diagonal."""
    form = join_groups(form_of(tensor, 64, 16), 4)
    assert (form.batch_count, form.column_count, form.anchors[0].depth) == (4, 16, 9 * 16)
    (anchor,) = form.anchors
    rows = access_of(anchor.rows, (*form.batch, *form.rows), anchor.reduced)
    columns = access_of(anchor.columns, (*form.batch, *form.columns), anchor.reduced)
    assert (rows.major, rows.width) == ("k", 8)
    assert (columns.major, columns.width, len(columns.copy.conditions)) == ("k", 4, 1)


def test_joined_groups_stay_narrow():
    assert joinable(32, 4, 4) == [1, 2, 4, 8, 16]
    assert joinable(6, 16, 8) == [1, 2, 3]
    assert joinable(4, 128, 128) == [1]


@pytest.mark.parametrize("case", ["dense", "batched product"])
def test_other_products_have_no_groups(tensor, case):
    if case == "dense":
        form = form_of(tensor, 32, 1)
    else:
        multiply = lambda emit, a, b: emit(op.matmul(a, b))  # noqa: E731
        form = products(tensor.function(multiply, (4, 32, 64), (4, 64, 32)).func)
    assert group_of(form) is None


def test_odd_groups_are_left_to_strips(tensor):
    function = tensor.group(grouped(24, 8), "vertical")
    assert schedule(function.func, parse_target("cuda:sm_90"))[1] == "strips"


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize(("size", "channels"), [(56, 128), (14, 512)])
def test_resources(tensor, size, channels, arch):
    function = tensor.group(grouped(channels, 32, size=size), "vertical")
    tensor.resources(tensor.scheduled(function, arch=arch), arch)
