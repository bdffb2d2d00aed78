"""SliceLookups: lookups of constant, neighbouring places."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import FoldConstants, SliceLookups


def module(index, axis: int = 1):
    """A lookup of constant places along an axis of ``[2, 5, 3]``."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 5, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            index = relax.const(np.array(index, "int64"))
            out = builder.emit_output(relax.op.take(x, index, axis=axis))
        builder.emit_func_output(out)
    return builder.get()


def operators(mod) -> list[str]:
    return [b.value.op.name for block in mod["main"].body.blocks for b in block.bindings]


def test_one_place(check_pass) -> None:
    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 5, 3), "float32")):
            with R.dataflow():
                part = R.strided_slice(x, axes=[1], begin=[3], end=[4])
                out = R.reshape(part, R.shape([2, 3]))
                R.output(out)
            return out

    check_pass(SliceLookups(), module(3), After)


def test_neighbours(check_pass) -> None:
    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 5, 3), "float32")):
            with R.dataflow():
                out = R.strided_slice(x, axes=[2], begin=[1], end=[3])
                R.output(out)
            return out

    check_pass(SliceLookups(), module([1, 2], axis=-1), After)


@pytest.mark.parametrize("index", [[0, 2], [2, 1], [1, 1], 5, -1, [4, 5], [[1, 2]]])
def test_other_places_stay_lookups(index) -> None:
    assert operators(SliceLookups()(module(index))) == ["relax.take"]


def test_indices_that_are_no_constants_stay_lookups() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 5, 3), "float32"), i: R.Tensor((2,), "int64")):
            with R.dataflow():
                out = R.take(x, i, axis=1)
                R.output(out)
            return out

    assert operators(SliceLookups()(Before)) == ["relax.take"]


def test_known_extents_are_numbers(check_pass) -> None:
    """What ONNX's importer makes of an index: -2 counts from the end."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 5, 3), "float32")):
            with R.dataflow():
                shape = R.shape_of(x)
                sizes = R.shape_to_tensor(shape)
                size = R.take(sizes, R.const(1, "int64"), axis=0)
                index = R.add(R.const(-2, "int64"), size)
                out = R.take(x, index, axis=1)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 5, 3), "float32")):
            with R.dataflow():
                part = R.strided_slice(x, axes=[1], begin=[3], end=[4])
                out = R.reshape(part, R.shape([2, 3]))
                R.output(out)
            return out

    check_pass(lambda mod: SliceLookups()(FoldConstants()(mod)), Before, After)
