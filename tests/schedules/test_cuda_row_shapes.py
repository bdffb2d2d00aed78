"""How threads divide rows: what the model chooses, and that every choice computes the same."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules.cuda.row_across import AcrossRows
from tvm_fusion.schedules.cuda.row_along import AlongRows
from tvm_fusion.schedules.cuda.row_pieces import RowShape
from tvm_fusion.schedules.cuda.row_shape import row_shapes, row_work
from tvm_fusion.schedules.cuda.row_stages import row_function

from tvm_fusion.devices import device_for
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation

op = relax.op


def softmax(emit, x):
    """Softmax of the last axis."""
    return emit(op.nn.softmax(x))


def mean(emit, x):
    """Mean over the positions of a channels-last map."""
    return emit(op.mean(x, [1, 2]))


def scaled(emit, x, y):
    """Rows divided by the square root of a sum that another tensor adds to."""
    total = emit(op.sqrt(emit(op.sum(emit(op.multiply(x, x)), [1], keepdims=True))))
    return emit(op.add(emit(op.divide(x, total)), y))


def chosen(func, arch: str = "sm_90", most: int = 1024):
    """The shape that the model chooses, with the function's form."""
    form, rows = row_function(func)
    device = device_for(parse_target(f"cuda:{arch}"))
    return form, rows, next(iter(row_shapes(row_work(form, rows.across), device, most)), None)


@pytest.mark.parametrize(
    ("build", "shapes", "dtype", "shape"),
    [
        (softmax, ((6, 96),), "float16", RowShape(4, 8, 8, 3)),
        (softmax, ((6, 96),), "float16", RowShape(16, 2, 8, 1)),
        (softmax, ((5, 1000),), "float16", RowShape(32, 2, 8, 4)),
        (softmax, ((5, 1000),), "float32", RowShape(96, 2, 4, 3)),
        (softmax, ((5, 1000),), "float16", RowShape(32, 1, 8, 2, 2)),
        (softmax, ((3, 1003),), "float16", RowShape(64, 2, 1, 4, 4)),
        (scaled, ((4, 40, 5, 7), (5, 7)), "float32", RowShape(8, 4, 1, 10)),
        (scaled, ((4, 40, 8, 8), (8, 8)), "float16", RowShape(4, 8, 8, 5)),
        (scaled, ((4, 40, 8, 8), (8, 8)), "float16", RowShape(8, 2, 2, 4, 5)),
        (mean, ((3, 5, 5, 48),), "float16", RowShape(4, 16, 4, 2)),
        (mean, ((3, 5, 5, 48),), "float32", RowShape(8, 1, 4, 25)),
        (mean, ((3, 5, 5, 47),), "float32", RowShape(32, 8, 1, 2, 2)),
    ],
)
def test_every_shape_is_right(cuda, build, shapes, dtype, shape):
    func = cuda.function(build, *shapes, dtype=dtype)
    form, rows = row_function(func, keep=shape.rounds == 1)
    kernel = (AcrossRows if rows.across else AlongRows)(form, shape).function()
    inputs = cuda.inputs(func)
    (expected,) = cuda.expected(func, inputs)
    for backward in (False, True):
        (result,) = cuda_emulation.run(
            kernel, inputs, parse_target("cuda:sm_90"), backward=backward
        )
        error = np.abs(result.astype("float64") - expected.astype("float64")).max()
        assert error <= (1e-6 if dtype == "float32" else 1e-3) * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("length", [512, 768, 1024, 4096])
def test_long_problems_read_a_row_once(cuda, length, dtype):
    _, rows, shape = chosen(cuda.function(softmax, (16384, length), dtype=dtype))
    assert not rows.across
    assert shape.rounds == 1
    assert shape.vector == (8 if dtype == "float16" else 4)
    assert shape.elements >= 8
    assert 64 <= shape.lanes * shape.lines <= 256


def test_one_row_gets_many_threads(cuda):
    _, _, one = chosen(cuda.function(softmax, (1, 1000)))
    _, _, many = chosen(cuda.function(softmax, (65536, 1000)))
    assert one.lanes >= 2 * many.lanes
    assert one.lines == 1


def test_short_rows_share_a_warp(cuda):
    _, _, shape = chosen(cuda.function(softmax, (4096, 24), dtype="float16"))
    assert shape.lanes < 32 <= shape.lanes * shape.lines


def test_rows_that_no_block_holds_are_walked_in_rounds(cuda):
    _, _, shape = chosen(cuda.function(softmax, (8, 300000), dtype="float16"))
    assert shape.rounds > 1


def test_few_threads_are_kept_to(cuda):
    func = cuda.function(softmax, (8, 4096))
    _, _, shape = chosen(func, most=128)
    assert shape.lanes * shape.lines <= 128


def test_a_small_map_is_spread_over_the_chip(cuda):
    form, rows, shape = chosen(cuda.function(mean, (1, 7, 7, 2048), dtype="float16"))
    assert rows.across
    assert form.count / (shape.lanes * shape.vector) >= 64
    # Neighbouring lanes read whole sectors of memory.
    assert shape.lanes * shape.vector * 2 >= 32


def test_registers_bound_what_a_thread_holds(cuda):
    func = cuda.function(softmax, (64, 16384))
    for arch in ("sm_75", "sm_90"):
        _, _, shape = chosen(func, arch)
        assert shape.elements * shape.lanes * shape.lines <= 65536
        assert shape.elements <= 100


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        # A reduction of one element behind one of many: its element counts once, not once a column.
        (lambda e, x, y: e(op.nn.softmax(e(op.matmul(x, y)))), ((3, 5, 16), (3, 16, 1))),
        (lambda e, x, y: e(op.nn.softmax(e(op.matmul(x, y)))), ((5, 700), (700, 1))),
        (lambda e, x: e(op.sum(e(op.sum(x, [2], keepdims=True)), [2])), ((3, 5, 40),)),
        (lambda e, x: e(op.nn.log_softmax(e(op.max(x, [1], keepdims=True)))), ((6, 33),)),
    ],
)
def test_reductions_of_one_element_behind_others(cuda, build, shapes, arch, dtype):
    cuda.check(cuda.function(build, *shapes, dtype=dtype), "rows", arch=arch)
