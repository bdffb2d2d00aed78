"""Strip kernels: depthwise and narrow grouped convolutions; values by emulation, resources by nvcc."""

from __future__ import annotations

import re

import pytest
from tvm import relax
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.base import PACKED
from tvm_fusion.schedules.cuda.strips import template
from tvm_fusion.schedules.cuda.strips.form import pack, problem_of, strips
from tvm_fusion.schedules.cuda.strips.kernel import kernel
from tvm_fusion.schedules.cuda.tensor_core.template import constants_of

from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.devices import DEVICES
from tvm_fusion.guards.strip_model import Choice, Tile, best_strips, promised_blocks
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op


def grouped(
    image: tuple[int, int],
    channels: int,
    window: int = 3,
    *,
    stride: int = 1,
    dilation: int = 1,
    padding: int | None = None,
    groups: int | None = None,
    outputs: int | None = None,
    batch: int = 1,
    layout: str = "NHWC",
    dtype: str = "float16",
    before=None,
    after=None,
    shortcut: bool = False,
):
    """A (depthwise) convolution with functions before and after it, bias, and perhaps a shortcut."""
    b = ModuleBuilder(dtype, layout)
    groups, outputs = groups or channels, outputs or channels
    shape = (batch, *image, channels) if layout == "NHWC" else (batch, channels, *image)
    x = b.input("x", shape)
    value = x if before is None else b.op("before", before(x))
    each = channels // groups
    weight = (
        (outputs, window, window, each) if layout == "NHWC" else (outputs, each, window, window)
    )
    call = op.nn.conv2d(
        value,
        b.const(*weight, scale=1 / window),
        strides=stride,
        padding=dilation * (window // 2) if padding is None else padding,
        dilation=dilation,
        groups=groups,
        data_layout=layout,
        kernel_layout="OHWI" if layout == "NHWC" else "OIHW",
    )
    value = b.bias("bias", b.op("conv", call))
    if after is not None:
        value = b.op("after", after(value))
    return b.finish(b.add("add", value, x) if shortcut else value)


def six(value):
    """ReLU6."""
    return op.clip(value, 0, 6)


#: name: arguments of `grouped`, a strip, arch.
CASES = {
    "3x3": (((9, 9), 16), {"after": six}, Tile(8, 1, 4, 64), "sm_90"),
    "several rows": (((9, 11), 16), {}, Tile(8, 3, 3, 64), "sm_80"),
    "strided": (((9, 11), 16), {"stride": 2}, Tile(4, 2, 3, 64), "sm_75"),
    "dilated, strided, prologue": (
        ((10, 11), 20),
        {"stride": 2, "dilation": 2, "before": op.nn.relu, "after": op.nn.silu},
        Tile(4, 2, 3, 64),
        "sm_80",
    ),
    "prologue that is not zero": (
        ((9, 9), 17, 5),
        {"batch": 2, "before": op.exp, "shortcut": True},
        Tile(1, 3, 2, 64),
        "sm_90",
    ),
    "no padding": (((8, 9), 12, 2), {"padding": 0}, Tile(4, 2, 4, 64), "sm_90"),
    "one sided padding": (((8, 9), 12), {"padding": [0, 1, 2, 0]}, Tile(4, 1, 2, 64), "sm_90"),
    "7x7": (((9, 8), 16, 7), {"dtype": "float32"}, Tile(4, 1, 4, 64), "sm_75"),
    "13x13, rows in a loop": (((15, 14), 8, 13), {"dtype": "float32"}, Tile(4, 1, 4, 64), "sm_90"),
    "channels first": (
        ((9, 12), 6),
        {"layout": "NCHW", "dtype": "float32", "after": six},
        Tile(1, 3, 4, 64),
        "sm_90",
    ),
    "channels first, strided": (
        ((9, 13), 5, 5),
        {"layout": "NCHW", "stride": 2},
        Tile(1, 2, 1, 64),
        "sm_75",
    ),
    "channels first, prologue": (
        ((9, 12), 6),
        {"layout": "NCHW", "before": op.nn.gelu},
        Tile(1, 2, 4, 64),
        "sm_80",
    ),
    "bfloat16": (
        ((9, 9), 24),
        {"dtype": "bfloat16", "after": op.nn.silu},
        Tile(8, 2, 2, 64),
        "sm_80",
    ),
    "bfloat16, one by one": (((7, 7), 7), {"dtype": "bfloat16"}, Tile(1, 2, 2, 64), "sm_90"),
    "4 channels a group": (
        ((9, 9), 32),
        {"groups": 8, "dtype": "float32"},
        Tile(4, 1, 3, 64),
        "sm_90",
    ),
    "3 and 6 channels a group": (
        ((9, 9), 24),
        {"groups": 8, "outputs": 48, "dilation": 2},
        Tile(2, 2, 3, 64),
        "sm_80",
    ),
    "multiplier": (((9, 9), 12), {"outputs": 24}, Tile(2, 2, 2, 64), "sm_75"),
    "18 channels a group, channels in a loop": (
        ((7, 7), 36, 5),
        {"groups": 2, "outputs": 72, "dtype": "float32"},
        Tile(4, 1, 2, 64),
        "sm_75",
    ),
    "groups, channels first": (
        ((9, 9), 12),
        {"groups": 3, "outputs": 24, "layout": "NCHW", "dtype": "float32"},
        Tile(1, 3, 1, 64),
        "sm_90",
    ),
}


def group_of(cuda, name: str):
    """One of the functions above."""
    arguments, options, *_ = CASES[name]
    return cuda.group(grouped(*arguments, **options), "vertical", options.get("dtype", "float16"))


@pytest.mark.parametrize("positions", [True, False], ids=["positions", "random"])
@pytest.mark.parametrize("name", CASES)
def test_values_of_strips(cuda, monkeypatch, name, positions):
    *_, tile, arch = CASES[name]
    monkeypatch.setattr(template, "best_strips", lambda *_: (Choice(tile, 0.0),))
    cuda.check_group(group_of(cuda, name), "strips", positions, arch)


@pytest.mark.parametrize("name", CASES)
def test_values_of_the_strip_that_is_chosen(cuda, name):
    *_, arch = CASES[name]
    # Groups that are not so narrow are left to products where there are any.
    arch = "sm_75" if "bfloat16" not in name and "group" in name else arch
    cuda.check_group(group_of(cuda, name), "strips", arch=arch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_values_of_every_strip(cuda, dtype, layout):
    """Strips of all sizes, whatever is left over along each axis."""
    module = grouped((9, 12), 24, stride=2, dtype=dtype, layout=layout, after=six)
    group = cuda.group(module, "vertical", dtype)
    target = parse_target("cuda:sm_90")
    form, packed = pack(strips(group.func), constants_of(group.func))
    tiles = [c.tile for c in best_strips(problem_of(form), DEVICES["sm_90"], 1000)]
    for tile in [tile for tile in tiles if tile.threads == 64][::7]:
        made = kernel(form, tile)
        made = made.with_attr(PACKED, packed) if packed else made
        cuda.check_kernel(group, made, target, backwards=(False,))


def test_weights_that_may_change(cuda):
    group = group_of(cuda, "several rows")
    group.func = group.func.without_attr("tvm_fusion.constants")
    scheduled, _ = schedule(group.func, parse_target("cuda:sm_90"))
    assert PACKED not in scheduled.attrs
    source = cuda.check_group(group, "strips")
    # Nothing is read before the previous kernel is complete.
    assert source.index("tvmf_wait_for_previous();") < source.index(
        "tvmf_load_global_2(", source.index("__global__")
    )


def test_constant_weights_are_read_before_the_previous_kernel_is_complete(cuda):
    source = cuda.check_group(group_of(cuda, "several rows"), "strips")
    body = source[source.rindex("__global__") :]
    before, after = body.split("tvmf_wait_for_previous();")
    assert "const0" in before.split("{", 1)[1] and "x_ptr" not in before.split("{", 1)[1]
    assert "x_ptr" in after


def test_two_depthwise_convolutions_that_meet(cuda):
    b = ModuleBuilder("float16", "NHWC")
    x = b.input("x", (1, 9, 9, 16))
    parts = [b.relu(f"r{k}", b.conv(f"conv{k}", x, 16, k, groups=16)) for k in (3, 5)]
    group = cuda.group(b.finish(b.add("add", *parts)), "cross", "float16", form="joined")
    cuda.check_group(group, "strips")


@pytest.mark.parametrize(
    ("options", "template"),
    [
        ({"groups": 1}, "multiply_add"),  # no groups
        ({"groups": 2, "outputs": 32}, "multiply_add"),  # wide groups
        ({"window": 1}, "conv2d"),  # no window
    ],
    ids=["dense", "wide groups", "1x1"],
)
def test_other_convolutions_are_left_to_others(cuda, options, template):
    module = grouped((9, 9), 128, dtype="float32", **options)
    func = cuda.group(module, "vertical", "float32").func
    _, name = schedule(func, parse_target("cuda:sm_90"))
    assert name == template


def test_bfloat16_before_sm_80_is_left_to_others(cuda):
    func = group_of(cuda, "bfloat16").func
    assert schedule(func, parse_target("cuda:sm_75"))[1] == "conv2d"


# -- what nvcc makes of real sizes ----------------------------------------------------------------

#: MobileNetV2, EfficientNet, ConvNeXt, ResNeXt.
REAL = {
    "112x112x32": (((112, 112), 32), {"after": six}),
    "112x112x96 strided": (((112, 112), 96), {"stride": 2, "after": six}),
    "56x56x144": (((56, 56), 144), {"after": six}),
    "14x14x384": (((14, 14), 384), {"after": six}),
    "7x7x960": (((7, 7), 960), {"after": six}),
    "5x5 silu": (((28, 28), 240, 5), {"after": op.nn.silu}),
    "7x7 ConvNeXt": (((56, 56), 96, 7), {}),
    "groups of 4": (((56, 56), 128), {"groups": 32, "after": op.nn.relu}),
}


def real(cuda, name: str, batch: int = 1, dtype: str = "float16", layout: str = "NHWC"):
    """The unscheduled function of one of the above."""
    arguments, options = REAL[name]
    module = grouped(*arguments, batch=batch, dtype=dtype, layout=layout, **options)
    return cuda.group(module, "vertical", dtype).func


def check_resources(cuda, func, arch: str) -> None:
    """No spills, no stack, and room for as many blocks as promised."""
    found = cuda.resources(func, arch)
    form, _ = pack(strips(func), constants_of(func))
    problem = problem_of(form)
    (choice,) = best_strips(problem, DEVICES[arch])
    device, tile = DEVICES[arch], choice.tile
    room = promised_blocks(problem, device, tile) * tile.threads
    assert room * found.registers <= device.registers_per_multiprocessor
    assert room <= device.max_threads_per_multiprocessor


@pytest.mark.nvcc
@pytest.mark.parametrize("name", ["112x112x32", "7x7 ConvNeXt"])
def test_resources(cuda, name):
    check_resources(cuda, real(cuda, name, 32), "sm_90")


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("dtype", "layout"), [("float16", "NHWC"), ("float32", "NHWC"), ("float32", "NCHW")]
)
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("name", [n for n in REAL if n != "groups of 4"])
def test_resources_of_all(cuda, name, batch, dtype, layout, arch):
    check_resources(cuda, real(cuda, name, batch, dtype, layout), arch)


@pytest.mark.nvcc
def test_a_strip_is_loads_and_multiply_adds(cuda):
    """Each input of a strip is loaded once, each weight too: none is left to the epilogue or the padding."""
    func = real(cuda, "56x56x144", 32)
    form, _ = pack(strips(func), constants_of(func))
    made = kernel(form, Tile(8, 2, 4, 64))
    source = cuda_emulation.cuda_source(made, parse_target("cuda:sm_90"))
    body = source[source.rindex("__global__") :]
    loads = re.findall(r"tvmf_load_global_16\(\w+, 0, (\w+)_ptr", body)
    assert (loads.count("x"), loads.count("const0"), len(loads)) == (4 * 6, 9, 33)
    (found,) = kernel_resources(source, "sm_90").values()
    assert found.spill_bytes == 0
