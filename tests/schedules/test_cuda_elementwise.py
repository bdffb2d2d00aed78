"""Elementwise and injective functions; values by emulation, resources by nvcc."""

from __future__ import annotations

import pytest
from tvm import relax

op = relax.op


def chain(emit, x, bias):
    """Bias, ReLU, GELU."""
    return emit(op.nn.gelu(emit(op.nn.relu(emit(op.add(x, bias))))))


CASES = [
    pytest.param(chain, ((3, 64, 55, 55), (64, 1, 1)), 1, "float32", id="odd rows"),
    pytest.param(chain, ((3, 64, 56, 56), (64, 1, 1)), 1, "float32", id="vectors"),
    pytest.param(chain, ((3, 64, 56, 56), (64, 1, 1)), 1, "float16", id="half vectors"),
    pytest.param(chain, ((5, 7), (7,)), 1, "float32", id="small"),
    pytest.param(lambda e, x: e(op.exp(x)), ((),), 1, "float32", id="scalar"),
    pytest.param(
        lambda e, x: e(op.greater(x, relax.const(0.0))), ((4, 9),), 1, "float32", id="bool"
    ),
    pytest.param(
        lambda e, x: e(op.permute_dims(x, [0, 2, 3, 1])),
        ((2, 16, 13, 13),),
        1,
        "float32",
        id="transpose",
    ),
    pytest.param(
        lambda e, x: e(op.reshape(e(op.nn.relu(x)), (2, 2704))),
        ((2, 16, 13, 13),),
        1,
        "float32",
        id="reshape",
    ),
    pytest.param(
        lambda e, x, y: e(op.concat([e(op.nn.relu(x)), y], 1)),
        ((4, 640), (4, 17)),
        1,
        "float32",
        id="concat",
    ),
    pytest.param(
        lambda e, x: (lambda r: (r, e(op.exp(r))))(e(op.nn.relu(x))),
        ((4, 640),),
        2,
        "float32",
        id="chained outputs",
    ),
    pytest.param(
        lambda e, x, y: (lambda r: (r, e(op.add(r, y))))(e(op.nn.relu(x))),
        ((3, 40), (4, 3, 40)),
        2,
        "float32",
        id="outputs of two sizes",
    ),
]


@pytest.mark.parametrize(("build", "shapes", "outputs", "dtype"), CASES)
def test_values(cuda, build, shapes, outputs, dtype):
    cuda.check(cuda.function(build, *shapes, dtype=dtype), "elementwise", outputs)


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize(("build", "shapes", "outputs", "dtype"), CASES)
def test_resources(cuda, arch, build, shapes, outputs, dtype):
    cuda.resources(cuda.function(build, *shapes, dtype=dtype), arch)


@pytest.mark.parametrize(("dtype", "vector"), [("float32", "float4"), ("float16", "uint4")])
def test_large_tensors_move_by_16_bytes(cuda, dtype, vector):
    source = cuda.check(
        cuda.function(chain, (4, 64, 56, 56), (64, 1, 1), dtype=dtype), "elementwise"
    )
    moves = [line for line in source.splitlines() if f"*({vector}*)(" in line]
    # One load and one store, whatever the function in between.
    assert len(moves) == 2


def test_reductions_are_left_to_others(cuda):
    func = cuda.function(lambda e, x: e(op.sum(x, [1])), (8, 64))
    assert cuda.template("elementwise").apply(func, cuda.target("cuda:sm_90")) is None
