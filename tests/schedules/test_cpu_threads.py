"""Loops that are too small for the thread pool are serial, others are not; numbers stay."""

import math

import numpy as np
import pytest
from tvm_fusion.schedules import registry
from tvm_fusion.schedules.analysis import nodes_of
from tvm_fusion.schedules.cpu.threads import MOST_SERIAL, nanoseconds, serial_where_small

from tvm_fusion.compat import Target, relax, s_tir, structural_equal, tirx
from tvm_fusion.testing.groups import (
    group_function,
    group_module,
    run_on_cpu,
    with_group_function,
)

op = relax.op
LLVM = Target("llvm")


def relu(builder, x):
    return builder.emit(op.nn.relu(x))


def gelu(builder, x):
    return builder.emit(op.nn.gelu(x))


def softmax(builder, x):
    return builder.emit(op.nn.softmax(x))


def mean(builder, x):
    return builder.emit(op.mean(x, axis=[2, 3]))


def pool(builder, x):
    return builder.emit(op.nn.max_pool2d(x, pool_size=(3, 3), strides=(2, 2)))


def conv(builder, x, w):
    return builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(x, w, padding=1))))


def dense(builder, x, w):
    return builder.emit(op.matmul(x, w))


def loops(func):
    """Extents of the parallel loops."""
    found = nodes_of(func.body, tirx.For)
    return [int(loop.extent) for loop in found if loop.kind == tirx.ForKind.PARALLEL]


def scheduled(shapes, make, dtype="float32", target=LLVM):
    return registry.schedule(group_function(group_module(shapes, dtype, make)), target)[0]


SMALL = {
    "relu": ([(4, 8)], relu),
    "gelu": ([(2, 32)], gelu),
    "softmax": ([(4, 64)], softmax),
    "mean": ([(2, 8, 7, 7)], mean),
    "pool": ([(1, 2, 8, 8)], pool),
    "conv": ([(1, 4, 7, 7), (8, 4, 3, 3)], conv),
    "dense": ([(16, 16), (16, 16)], dense),
}
LARGE = {
    "relu": ([(1024, 256)], relu),
    "gelu": ([(64, 64)], gelu),
    "softmax": ([(512, 256)], softmax),
    "mean": ([(1, 512, 28, 28)], mean),
    "pool": ([(1, 32, 56, 56)], pool),
    "conv": ([(1, 64, 28, 28), (64, 64, 3, 3)], conv),
    "dense": ([(256, 256), (256, 256)], dense),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_small_work_is_serial(name, dtype):
    shapes, make = SMALL[name]
    mod = group_module(shapes, dtype, make)
    func, _ = registry.schedule(group_function(mod), LLVM)
    assert not loops(func)
    rng = np.random.default_rng(0)
    arrays = [(rng.standard_normal(shape) / 2).astype(dtype) for shape in shapes]
    tolerance = {"float32": 1e-5, "float16": 2e-3}[dtype]
    found = run_on_cpu(with_group_function(mod, func), arrays)
    for result, reference in zip(found, run_on_cpu(mod, arrays), strict=True):
        np.testing.assert_allclose(
            result.astype("float64"), reference.astype("float64"), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("name", LARGE)
def test_large_work_is_parallel(name):
    found = loops(scheduled(*LARGE[name]))
    assert found and max(found) >= 4


def test_each_loop_is_judged_by_its_own_work():
    """The padding of a convolution is little work, the convolution is not."""
    padded = scheduled([(1, 16, 7, 7), (64, 16, 3, 3)], conv)
    assert len(loops(padded)) == 1


def test_what_is_fused_counts():
    def chain(builder, x):
        for _ in range(4):
            x = builder.emit(op.tanh(x))
        return x

    alone = scheduled([(16, 64)], lambda builder, x: builder.emit(op.tanh(x)))
    assert not loops(alone) and loops(scheduled([(16, 64)], chain))


def test_unknown_extents_stay_parallel():
    n = tirx.Var("n", "int64")
    func, template = registry.schedule(
        group_function(group_module([(n, 16)], "float32", relu)), LLVM
    )
    loop = next(node for node in nodes_of(func.body, tirx.For))
    assert template == "cpu_fallback" and loop.kind == tirx.ForKind.PARALLEL
    assert math.isinf(nanoseconds(loop, 4))


def test_a_fallback_of_little_work_is_serial():
    """Empty tensors, and whatever else no other template takes."""
    sch = s_tir.Schedule(group_function(group_module([(4, 8)], "float32", relu)))
    sch.parallel(sch.get_loops(sch.get_sblock("compute"))[0])
    func = sch.mod["main"]
    assert loops(func) == [4]
    assert not loops(serial_where_small(func, LLVM))


def test_a_function_without_small_loops_is_untouched():
    func = scheduled(*LARGE["relu"])
    assert structural_equal(serial_where_small(func, LLVM), func)


def relu_nest(rows, columns, vector):
    """A parallel loop over rows of ReLU whose columns are vectors."""
    sch = s_tir.Schedule(group_function(group_module([(rows, columns)], "float32", relu)))
    i, j = sch.get_loops(sch.get_sblock("compute"))
    if vector:
        sch.vectorize(sch.split(j, [None, vector])[1])
    sch.parallel(i)
    return sch.mod["main"].body.block.body


def test_estimates_are_proportional_and_know_vectors():
    one = nanoseconds(relu_nest(64, 64, 16), 4)
    assert nanoseconds(relu_nest(128, 64, 16), 4) == pytest.approx(2 * one)
    assert nanoseconds(relu_nest(64, 64, 16), 8) == pytest.approx(one / 2)
    assert nanoseconds(relu_nest(64, 64, 0), 4) == pytest.approx(4 * one)
    # Registers of 512 bits are counted as two of 256.
    assert nanoseconds(relu_nest(64, 64, 16), 16) == pytest.approx(one / 2)


def transposed(vector_of_rows):
    sch = s_tir.Schedule(
        group_function(group_module([(64, 64)], "float32", lambda b, x: b.emit(op.permute_dims(x))))
    )
    i, j = sch.get_loops(sch.get_sblock("T_transpose"))
    if vector_of_rows:
        sch.reorder(j, i)
        sch.vectorize(i)
    else:
        sch.vectorize(j)
    return sch.mod["main"].body.block.body


def test_scattered_elements_cost_one_access_each():
    """Of a transposition either the loads or the stores are scattered."""
    width = 8
    copied = 64 * 64 / width
    for vector_of_rows in (False, True):
        assert nanoseconds(transposed(vector_of_rows), width) == pytest.approx(
            0.1 * (64 * 64 + copied)
        )


def test_tiles_of_a_row_that_wraps_are_neighbours():
    """The panel of a convolution is read through divisions and remainders that together are one step."""
    func = scheduled([(1, 64, 28, 28), (64, 64, 3, 3)], conv)
    products = 64 * 64 * 9 * 28 * 28
    loop = max(
        (n for n in nodes_of(func.body, tirx.For) if n.kind == tirx.ForKind.PARALLEL),
        key=lambda n: nanoseconds(n, 4),
    )
    # One instruction for four products, and less than a third of that for packing and the epilogue.
    assert 0.1 * products / 4 <= nanoseconds(loop, 4) <= 1.33 * 0.1 * products / 4
    assert nanoseconds(loop, 4) > MOST_SERIAL


def test_a_batch_of_one_leaves_the_channels_parallel():
    """Means of one image are one task a channel, not one in all."""
    assert max(loops(scheduled(*LARGE["mean"]))) >= 64
