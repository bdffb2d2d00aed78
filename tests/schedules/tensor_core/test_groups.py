"""Groups on tensor cores, lowered as a compilation lowers them: merged, joined, back to back, side by side."""

from __future__ import annotations

import pytest
from tvm import relax

from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.transformer_blocks import head_projections

op = relax.op


def convs(members: int, **options):
    """Parallel convolutions of one input."""
    options = {"channels": 16, "spatial": 9, "dtype": "float16", "layout": "NHWC", **options}
    return parallel_convs(members, **options)


def separable(kernel: int, stride: int = 1, dtype: str = "float16", channels=(16, 24), size=9):
    """A depthwise convolution and a pointwise one, each with bias and ReLU6."""
    b = ModuleBuilder(dtype, "NHWC")
    value = b.input("x", (1, size, size, channels[0]))
    value = b.conv("deep", value, channels[0], kernel, stride=stride, groups=channels[0])
    value = b.op("six0", op.clip(b.bias("bias0", value), 0, 6))
    value = b.bias("bias1", b.conv("point", value, channels[1], 1))
    return b.finish(b.op("six1", op.clip(value, 0, 6)))


def joined_products(dtype: str = "float16"):
    """Two products of other lengths that meet in a sum with one of the inputs."""
    b = ModuleBuilder(dtype)
    x, y = b.input("x", (33, 40)), b.input("y", (33, 50))
    first = b.op("gelu", op.nn.gelu(b.dense("dense0", x, 40)))
    return b.finish(b.add("add1", b.add("add0", first, b.dense("dense1", y, 40)), x))


def heads(count: int, tokens: int = 33, width: int = 16, dtype: str = "float16"):
    """Projections of one input with a bias each."""
    return head_projections(heads=count, tokens=tokens, hidden=64, width=width, dtype=dtype)


#: name: module, strategy, options.
GROUPS = {
    "3 apart": (lambda: heads(1), "horizontal", {"join": "apart"}),
    "24 apart": (lambda: heads(8), "horizontal", {"join": "apart"}),
    "24 apart of 20": (lambda: heads(8, width=20), "horizontal", {"join": "apart"}),
    "3 apart of 64": (lambda: heads(1, width=64), "horizontal", {"join": "apart"}),
    "apart, unequal": (
        lambda: convs(3, outputs=[16, 32, 48], join=None, kernel=1),
        "horizontal",
        {"join": "apart"},
    ),
    "apart, 24 8 40": (
        lambda: convs(3, outputs=[24, 8, 40], join=None, relu=True),
        "horizontal",
        {"join": "apart"},
    ),
    "apart, 10 6 13": (
        lambda: convs(3, outputs=[10, 6, 13], join=None, kernel=1),
        "horizontal",
        {"join": "apart"},
    ),
    "apart, bfloat16": (lambda: heads(2, dtype="bfloat16"), "horizontal", {"join": "apart"}),
    "concat": (
        lambda: convs(3, outputs=[24, 8, 40], join="concat", relu=True),
        "horizontal",
        {"join": "concat"},
    ),
    "sum of 4 ReLUs": (lambda: convs(4, relu=True), "horizontal", {"join": "add"}),
    "maximum of 3 ReLUs": (
        lambda: convs(3, relu=True, join="maximum", outputs=[20] * 3),
        "horizontal",
        {"join": "maximum"},
    ),
    "sum of 3, 10 columns": (
        lambda: convs(3, relu=True, outputs=[10] * 3, kernel=1),
        "horizontal",
        {"join": "add"},
    ),
    "collapsed": (lambda: convs(4), "horizontal", {"form": "collapsed"}),
    "joined products": (joined_products, "cross", {"form": "joined"}),
    "joined convolutions": (
        lambda: convs(2, relu=True, separate=True),
        "cross",
        {"form": "joined"},
    ),
    "separable": (lambda: separable(3), "vertical", {"form": "back_to_back"}),
    "separable 5x5, strided": (lambda: separable(5, 2), "vertical", {"form": "back_to_back"}),
    "separable, 20 channels": (
        lambda: separable(3, channels=(20, 18)),
        "vertical",
        {"form": "back_to_back"},
    ),
    "separable, bfloat16": (
        lambda: separable(3, dtype="bfloat16"),
        "vertical",
        {"form": "back_to_back"},
    ),
}


def group(tensor, name: str):
    """One of the groups above."""
    make, strategy, options = GROUPS[name]
    options = {"form": "merged", **options}
    dtype = "bfloat16" if "bfloat16" in name else "float16"
    return tensor.group(make(), strategy, dtype, **options)


#: Groups whose outputs end after columns that are no multiple of a warpgroup's least share, 16.
UNEVEN = ("24 apart of 20", "apart, 24 8 40", "apart, 10 6 13")

#: The instructions of sm_80, launches that overlap, warpgroup instructions.
ARCHS = ("sm_80", "sm_90", "sm_90a")


def on_archs(names) -> list:
    """Every name with every arch: each arch in turn has one that is not slow."""
    return [
        pytest.param(
            name,
            arch,
            id=f"{name}-{arch}",
            marks=pytest.mark.slow if (i + j) % len(ARCHS) else (),
        )
        for i, name in enumerate(names)
        for j, arch in enumerate(ARCHS)
    ]


@pytest.mark.parametrize(("name", "arch"), on_archs(GROUPS))
def test_values(tensor, name, arch):
    function = group(tensor, name)
    assert function.constants
    source = tensor.check(function, tensor.on_arch(function, arch), arch=arch)
    takes = arch == "sm_90a" and name not in UNEVEN
    assert ("wgmma.mma_async" in source) == takes


@pytest.mark.parametrize(
    ("name", "arch"), on_archs(["3 apart", "sum of 4 ReLUs", "separable", "joined products"])
)
def test_values_of_weights_that_may_change(tensor, name, arch):
    function = group(tensor, name).unpacked
    tensor.check(function, tensor.on_arch(function, arch), arch=arch)
