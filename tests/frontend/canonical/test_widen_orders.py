"""WidenOrders: bfloat16 is sorted as float32, short integers as longer ones."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion
from tvm_fusion.compat import BlockBuilder, relax
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.frontend.canonical import WidenOrders, canonicalize
from tvm_fusion.frontend.canonical.constants import np_dtype

#: Over the middle of each unsigned type.
LARGE = np.array([[3, 250, 7, 130], [90, 4, 200, 11]]) * 0x01010101


def test_each_form(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "bfloat16")):
            with R.dataflow():
                both = R.topk(x, k=2, axis=1, ret_type="both", largest=True, dtype="int64")
                values = both[0]
                places = both[1]
                ordered = R.sort(x, axis=1)
                order = R.argsort(x, axis=1, dtype="int32")
                R.output(values, places, ordered, order)
            return (values, places, ordered, order)

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 3), "bfloat16")):
            with R.dataflow():
                wide = R.astype(x, "float32")
                both = R.topk(wide, k=2, axis=1, ret_type="both", largest=True, dtype="int64")
                largest = both[0]
                places = both[1]
                values = R.astype(largest, "bfloat16")
                again = R.astype(x, "float32")
                in_order = R.sort(again, axis=1)
                ordered = R.astype(in_order, "bfloat16")
                more = R.astype(x, "float32")
                order = R.argsort(more, axis=1, dtype="int32")
                R.output(places, values, ordered, order)
            return (values, places, ordered, order)

    check_pass(WidenOrders(), Before, After)


def module_of(dtype):
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 7), dtype)):
            with R.dataflow():
                both = R.topk(x, k=3, axis=1, ret_type="both", largest=True, dtype="int64")
                values = both[0]
                places = both[1]
                ordered = R.sort(x, axis=1, descending=True)
                order = R.argsort(x, axis=0, dtype="int64")
                R.output(values, places, ordered, order)
            return (values, places, ordered, order)

    return Module


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32"])
def test_other_types_stay(check_pass, dtype):
    check_pass(WidenOrders(), module_of(dtype), module_of(dtype))


def test_of_uint64_is_refused_by_name():
    with pytest.raises(UnsupportedOperatorError, match=r"operator topk \(both\) is of uint64"):
        canonicalize(module_of("uint64"))


@pytest.mark.parametrize("ret_type", ["both", "values", "indices"])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "uint32"])
def test_short_integers_are_in_order(dtype, ret_type):
    data = relax.Var("x", relax.TensorType((2, 4), dtype))
    builder = BlockBuilder()
    with builder.function("main", [data]):
        with builder.dataflow():
            largest = builder.emit(relax.op.topk(data, 2, 1, ret_type, largest=True, dtype="int64"))
            found = [largest[0], largest[1]] if ret_type == "both" else [largest]
            found += [relax.op.sort(data, 1), relax.op.argsort(data, 1, False, "int64")]
            outputs = [builder.emit_output(builder.emit(value)) for value in found]
        builder.emit_func_output(relax.Tuple(outputs))
    x = np.array([[0, 1, 1, 0], [0, 0, 0, 1]]) if dtype == "bool" else LARGE.astype(dtype)
    x = x.astype(dtype)
    results = [np.asarray(r) for r in tvm_fusion.compile(builder.get(), "llvm", verify=False)(x)]
    down = np.argsort(-x.astype("int64"), axis=1, kind="stable")[:, :2]
    wanted = {"values": [np.take_along_axis(x, down, 1)], "indices": [down]}
    wanted["both"] = wanted["values"] + wanted["indices"]
    wanted = [*wanted[ret_type], np.sort(x, axis=1), np.argsort(x, axis=1, kind="stable")]
    for result, expected in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(result, expected)
        assert result.dtype in (dtype, "int64")


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "as it is"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_in_order(dtype, converted):
    mod = canonicalize(module_of("float32"), dtype) if converted else canonicalize(module_of(dtype))
    x = np.array([[3, -1, 2, 0.5, -7, 11, 4], [1, 5, -2, 8, -3, 6, -9], [2, 9, 7, -4, 10, -6, 0]])
    compiled = tvm_fusion.compile(mod, "llvm", verify=False)
    results = compiled(x.astype(np_dtype(dtype)))
    values, places, ordered, order = (np.asarray(result) for result in results)
    np.testing.assert_array_equal(ordered.astype("float64"), -np.sort(-x, axis=1))
    np.testing.assert_array_equal(values.astype("float64"), -np.sort(-x, axis=1)[:, :3])
    np.testing.assert_array_equal(places, np.argsort(-x, axis=1)[:, :3])
    np.testing.assert_array_equal(order, np.argsort(x, axis=0))
