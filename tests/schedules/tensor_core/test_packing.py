"""Constants in the layout that kernels copy best: what a kernel asks for, and that a compilation obeys."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.base import CONSTANTS, PACKED

from tvm_fusion.compat import Constant, structural_equal, tvm
from tvm_fusion.testing.modules import ModuleBuilder, as_group
from tvm_fusion.transform.lower_groups import lower_groups
from tvm_fusion.transform.pack_constants import pack_constants

op = relax.op


def permutations(scheduled) -> dict[int, list[int]]:
    """What a kernel asks for."""
    wanted = scheduled.attrs.get(PACKED) or {}
    return {int(number): [int(axis) for axis in axes] for number, axes in wanted.items()}


def product(emit, left, right):
    """A product."""
    return emit(op.matmul(left, right))


def square(emit, left, right):
    """A product whose right operand is read a second time."""
    return emit(op.add(emit(op.matmul(left, right)), right))


def conv(emit, data, weight, layout):
    """A convolution, channels last."""
    return emit(op.nn.conv2d(data, weight, padding=1, data_layout="NHWC", kernel_layout=layout))


def separable(emit, data, deep, point):
    """Depthwise, then pointwise."""
    attrs = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
    inner = emit(op.nn.conv2d(data, deep, padding=1, groups=int(data.ty.shape[3]), **attrs))
    return emit(op.nn.conv2d(emit(op.nn.relu(inner)), point, **attrs))


@pytest.mark.parametrize(
    ("build", "shapes", "constants", "expected"),
    [
        (product, ((33, 64), (64, 40)), (1,), {1: [1, 0]}),
        # Not what may change between calls, nor what is in order, nor a left operand.
        (product, ((33, 64), (64, 40)), (), {}),
        (product, ((33, 64), (64, 40)), (0,), {}),
        (product, ((3, 33, 64), (3, 64, 40)), (1,), {1: [0, 2, 1]}),
        (square, ((64, 64), (64, 64)), (1,), {}),
        (lambda e, x, w: conv(e, x, w, "OHWI"), ((1, 9, 9, 16), (24, 3, 3, 16)), (1,), {}),
        (
            lambda e, x, w: conv(e, x, w, "HWIO"),
            ((1, 9, 9, 16), (3, 3, 16, 24)),
            (1,),
            {1: [3, 0, 1, 2]},
        ),
        (
            separable,
            ((1, 9, 9, 16), (16, 3, 3, 1), (24, 1, 1, 16)),
            (1, 2),
            # The channels of a window beside each other; the product's weights are in order.
            {1: [1, 2, 3, 0]},
        ),
    ],
)
def test_what_a_kernel_asks_for(tensor, build, shapes, constants, expected):
    function = tensor.function(build, *shapes, constants=constants)
    scheduled = tensor.scheduled(function)
    assert permutations(scheduled) == expected
    for number, axes in expected.items():
        shape = tuple(int(extent) for extent in scheduled.params[number].ty.shape)
        assert shape == tuple(shapes[number][axis] for axis in axes)


def lowered(module):
    """A module of one vertical group, with its kernel scheduled."""
    mod, kernels = lower_groups(as_group(module, "vertical"))
    (name,) = kernels.values()
    scheduled, _ = schedule(mod[name], tvm.target.Target({"kind": "cuda", "arch": "sm_90"}))
    mod = tvm.IRModule(dict(mod.functions.items()))
    mod.update_func(mod.get_global_var(name), scheduled)
    return mod, name


def dense():
    """A product with weights of its own."""
    b = ModuleBuilder("float16")
    return b.finish(b.dense("dense", b.input("x", (33, 64)), 40))


def constants_of(mod) -> list:
    """The constants that ``main`` calls kernels with."""
    return [
        arg
        for binding in mod["main"].body.blocks[0].bindings
        if isinstance(binding.value, relax.Call)
        for arg in binding.value.args[1].fields
        if isinstance(arg, Constant)
    ]


def test_constants_are_noted():
    mod, name = lowered(dense())
    assert [int(n) for n in mod[name].attrs[CONSTANTS]] == [1, 2]


def test_constants_are_permuted_once():
    mod, name = lowered(dense())
    before = constants_of(mod)
    packed = pack_constants(mod)
    after = constants_of(packed)
    assert [c.value.shape for c in before] == [(64, 40), (40,)]
    assert [c.value.shape for c in after] == [(40, 64), (40,)]
    np.testing.assert_array_equal(after[0].value.numpy(), before[0].value.numpy().T)
    assert PACKED not in packed[name].attrs
    assert structural_equal(pack_constants(packed), packed)


def test_a_module_that_asks_for_nothing_stays_as_it_is():
    b = ModuleBuilder("float32")
    mod, _ = lowered(b.finish(b.relu("relu", b.input("x", (33, 64)))))
    assert pack_constants(mod) is mod


def test_equal_kernels_of_other_weights_share_the_kernel():
    b = ModuleBuilder("float16")
    x = b.input("x", (33, 64))
    weights = [b.const(64, 64) for _ in range(2)]
    first = b.op("first", op.matmul(x, weights[0]))
    module = b.finish(b.op("second", op.matmul(first, weights[1])))
    mod, kernels = lower_groups(as_group(module, "vertical", ["first"]))
    assert kernels
    mod = tvm.IRModule(dict(mod.functions.items()))
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    for gv, func in mod.functions_items():
        if isinstance(func, tvm.tirx.PrimFunc):
            mod.update_func(gv, schedule(func, target)[0])
    after = constants_of(pack_constants(mod))
    for found, weight in zip(after, weights, strict=True):
        np.testing.assert_array_equal(found.value.numpy(), weight.value.numpy().T)


@pytest.mark.parametrize(("channels", "outermost"), [(3, True), (5, True), (2, False), (4, False)])
def test_lines_that_begin_at_no_word_have_the_reduction_outermost(tensor, channels, outermost):
    """27 or 45 elements of two bytes a line are no multiple of four bytes; 18 and 36 are."""

    def build(emit, data, weight):
        return conv(emit, data, weight, "OHWI")

    shapes = (1, 9, 9, channels), (16, 3, 3, channels)
    made = tensor.scheduled(tensor.function(build, *shapes, constants=(1,)))
    assert permutations(made) == ({1: [1, 2, 3, 0]} if outermost else {})
