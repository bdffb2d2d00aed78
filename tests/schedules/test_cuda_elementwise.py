"""Elementwise and injective functions; values by emulation, resources by nvcc."""

from __future__ import annotations

import re

import pytest
from tvm import relax
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.cuda.elements import element_kernel

from tvm_fusion.testing import cuda_emulation

op = relax.op


def chain(emit, x, bias):
    """Bias, ReLU, GELU."""
    return emit(op.nn.gelu(emit(op.nn.relu(emit(op.add(x, bias))))))


def concat_channels(emit, x, y):
    """ReLU of one branch beside another."""
    return emit(op.concat([emit(op.nn.relu(x)), y], 3))


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
    pytest.param(chain, ((2, 24, 24, 64), (64,)), 1, "float16", id="channels last"),
    pytest.param(chain, ((3, 64, 55, 55), (64, 1, 1)), 1, "float16", id="half odd rows"),
    pytest.param(concat_channels, ((1, 28, 28, 64), (1, 28, 28, 32)), 1, "float16", id="channels"),
    pytest.param(
        lambda e, x: e(op.nn.pad(x, [0, 0, 1, 1, 1, 1, 0, 0])),
        ((2, 13, 13, 16),),
        1,
        "float16",
        id="pad",
    ),
    pytest.param(
        lambda e, x, y: e(op.where(e(op.greater(x, y)), e(op.nn.silu(x)), y)),
        ((64, 640), (64, 1)),
        1,
        "float16",
        id="choice",
    ),
    pytest.param(
        lambda e, x, y: e(op.add(e(op.astype(x, "float32")), e(op.astype(y, "float32")))),
        ((64, 640), (640,)),
        1,
        "float16",
        id="two types",
    ),
    pytest.param(
        lambda e, x, i: e(op.take(x, e(op.astype(e(op.nn.relu(i)), "int32")), 0)),
        ((9, 64), (4,)),
        1,
        "float32",
        id="gather",
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
    lines = [line for line in source.splitlines() if f"*({vector}*)(" in line]
    # One load and one store, whatever the function in between; one load of the channel's bias.
    assert len(lines) == 2
    assert len(set(re.findall(r"x1_ptr\[[^;]*?\]\)?\)", source))) == 1


def test_a_bias_of_neighbouring_channels_is_one_load(cuda):
    func = cuda.function(chain, (8, 56, 56, 64), (64,), dtype="float16")
    source = cuda_emulation.cuda_source(
        schedule(func, cuda.target("cuda:sm_90"))[0], cuda.target("cuda:sm_90")
    )
    assert len([line for line in source.splitlines() if "*(uint4*)(x1_ptr" in line]) == 1
    assert "x1_ptr[" not in source


def test_branches_that_end_between_chunks_are_read_in_chunks(cuda):
    def source(*channels: int) -> str:
        shapes = [(1, 28, 28, c) for c in channels]
        return cuda.check(cuda.function(concat_channels, *shapes, dtype="float16"), "elementwise")

    whole, cut = source(64, 32), source(64, 31)
    assert "x1_ptr[" not in whole
    assert "x1_ptr[" in cut


def test_many_elements_have_several_loads_under_way(cuda):
    target = cuda.target("cuda:sm_90")
    chunks = {}
    for rows in (64, 16384):
        func = cuda.function(lambda e, x: e(op.nn.relu(x)), (rows, 1024), dtype="float16")
        text = cuda_emulation.cuda_source(schedule(func, target)[0], target)
        chunks[rows] = text.count("*(uint4*)(x0_ptr") + text.count("*(half4*)(x0_ptr")
    assert chunks == {64: 1, 16384: 4}


@pytest.mark.parametrize("name", ["gather", "outputs of two sizes"])
def test_other_forms_have_a_schedule(cuda, name):
    build, shapes, _, dtype = next(case for case in CASES if case.id == name).values
    func = cuda.function(build, *shapes, dtype=dtype)
    target = cuda.target("cuda:sm_90")
    assert element_kernel(func, target) is None
    assert cuda.template("elementwise").apply(func, target) is not None


def test_reductions_are_left_to_others(cuda):
    func = cuda.function(lambda e, x: e(op.sum(x, [1])), (8, 64))
    assert cuda.template("elementwise").apply(func, cuda.target("cuda:sm_90")) is None
