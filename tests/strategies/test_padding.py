"""Kernels that fit into a common one by zero-padding, and kernels that do not."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.strategies.padding import pad_offsets
from tvm_fusion.testing.modules import ModuleBuilder


def common(kernels, *, layout="NCHW", extent=12, change=None):
    """The common kernel of convolutions of one input, given as (size, options)."""
    b = ModuleBuilder(layout=layout)
    shape = {"N": 1, "C": 4, "H": extent, "W": extent}
    x = b.input("x", [shape[axis] for axis in layout])
    letters = "OIHW" if layout == "NCHW" else "OHWI"
    values = []
    for i, (size, options) in enumerate(kernels):
        inner = 4 // options.get("groups", 1)
        sizes = {"O": 4 + 2 * i, "I": inner, "H": size[0], "W": size[1]}
        weight = b.const(*[sizes[axis] for axis in letters])
        data = b.relu("other", x) if change == "input" and i else x
        if change == "weight" and i:
            weight = b.input("w", [sizes[axis] for axis in letters])
        call = relax.op.nn.conv2d(
            data, weight, data_layout=layout, kernel_layout=letters, **options
        )
        values.append(b.op(f"c{i}", call))
    graph = from_relax(b.finish(*values)).graph
    return pad_offsets(graph, [o for o in graph.operators if o.op == "conv2d"])


SAME = {1: {}, 3: {"padding": 1}, 5: {"padding": 2}, 7: {"padding": 3}}


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (5, 1, 3), (7, 3)])
def test_same_padding_is_centred(sizes, layout):
    found = common([((k, k), SAME[k]) for k in sizes], layout=layout)
    largest = max(sizes)
    assert found.size == (largest, largest)
    assert found.padding == (largest // 2,) * 4 and found.dilation == (1, 1)
    assert found.offsets == tuple(((largest - k) // 2,) * 2 for k in sizes)
    assert not found.is_exact


def test_axes_are_independent():
    found = common([((1, 3), {"padding": (0, 1)}), ((3, 1), {"padding": (1, 0)})])
    assert found.size == (3, 3) and found.padding == (1, 1, 1, 1)
    assert found.offsets == ((1, 0), (0, 1))


def test_padding_on_one_side():
    """An even kernel with padding (1, 0) reads the first two taps of a 3×3."""
    found = common([((3, 3), {"padding": 1}), ((2, 2), {"padding": (1, 1, 0, 0)})])
    assert found.offsets == ((0, 0), (0, 0)) and found.padding == (1, 1, 1, 1)


def test_strided_kernels():
    found = common([((3, 3), {"padding": 1, "strides": 2}), ((1, 1), {"strides": 2})])
    assert found.offsets == ((0, 0), (1, 1))


def test_dilation_becomes_a_step():
    found = common([((5, 5), {"padding": 2}), ((3, 3), {"padding": 2, "dilation": 2})])
    assert found.steps == ((1, 1), (2, 2)) and found.offsets == ((0, 0), (0, 0))


def test_dilation_of_the_common_kernel():
    """A 1×1 falls on the centre of a dilated 3×3; a plain 3×3 does not fall on its taps."""
    dilated = ((3, 3), {"padding": 2, "dilation": 2})
    found = common([dilated, ((1, 1), {})])
    assert found.dilation == (2, 2) and found.offsets == ((0, 0), (1, 1))
    assert common([dilated, ((3, 3), {"padding": 1})]) is None


def test_equal_kernels_are_exact():
    assert common([((3, 3), {"padding": 1})] * 2).is_exact


@pytest.mark.parametrize(
    "kernels",
    [
        [((3, 3), {"padding": 1}), ((1, 1), {"strides": 2})],  # strides
        [((3, 3), {}), ((1, 1), {})],  # output extents
        [((3, 3), {"padding": 1}), ((3, 3), {"padding": 1, "groups": 2})],
    ],
)
def test_kernels_that_do_not_fit(kernels):
    assert common(kernels) is None


@pytest.mark.parametrize(("padding", "fits"), [(0, True), (1, False)])
def test_a_tap_before_the_first_of_the_common_kernel(padding, fits):
    """Both have two results a row, but the padded 1×1 reads one position more on the left."""
    kernels = [((3, 3), {"strides": 5}), ((1, 1), {"padding": padding, "strides": 5})]
    assert (common(kernels, extent=8) is not None) == fits


@pytest.mark.parametrize("change", ["input", "weight"])
def test_one_input_and_constant_weights(change):
    kernels = [((3, 3), {"padding": 1}), ((1, 1), {})]
    assert common(kernels) is not None
    assert common(kernels, change=change) is None


def test_other_operators_have_no_kernel():
    b = ModuleBuilder()
    x = b.input("x", (2, 4))
    graph = from_relax(b.finish(b.dense("a", x, 3), b.dense("b", x, 3))).graph
    assert pad_offsets(graph, [o for o in graph.operators if o.op == "matmul"]) is None
    assert pad_offsets(graph, []) is None
