"""Matrix products: dense, batched, transposed, few rows; values by emulation, resources by nvcc."""

from __future__ import annotations

import re

import pytest
from tvm import relax

op = relax.op


def product(emit, left, right):
    """A product alone."""
    return emit(op.matmul(left, right))


def dense(emit, data, weight, bias):
    """Transposed weights, bias, GELU."""
    total = emit(op.matmul(data, emit(op.permute_dims(weight))))
    return emit(op.nn.gelu(emit(op.add(total, bias))))


def half(emit, left, right):
    """Half precision with a sum in single."""
    total = emit(op.matmul(left, right, out_dtype="float32"))
    return emit(op.astype(emit(op.nn.silu(total)), "float16"))


CASES = [
    pytest.param("matmul", product, ((33, 23), (23, 47)), "float32", id="tails"),
    pytest.param("matmul", product, ((3, 409), (409, 100)), "float32", id="three rows"),
    pytest.param("matmul", product, ((3, 33, 20), (3, 20, 47)), "float32", id="batched"),
    pytest.param("matmul", product, ((3, 33, 20), (20, 47)), "float32", id="batched, one weight"),
    pytest.param("matmul", dense, ((50, 64), (100, 64), (100,)), "float32", id="dense gelu"),
    pytest.param("matmul", half, ((33, 40), (40, 104)), "float16", id="half"),
    pytest.param("matrix_vector", product, ((1, 409), (409, 1000)), "float32", id="vector"),
    pytest.param("matrix_vector", product, ((1, 409), (409, 101)), "float32", id="vector, prime"),
    pytest.param("matrix_vector", product, ((2, 100), (100, 64)), "float32", id="two rows"),
    pytest.param(
        "matrix_vector", dense, ((1, 508), (109, 508), (109,)), "float32", id="vector dense"
    ),
    pytest.param("matrix_vector", half, ((1, 300), (300, 128)), "float16", id="vector half"),
]


#: From sm_80 on other templates take products of more than a few rows.
ARCH = "sm_75"


@pytest.mark.parametrize(("template", "build", "shapes", "dtype"), CASES)
def test_values(cuda, template, build, shapes, dtype):
    cuda.check(cuda.function(build, *shapes, dtype=dtype), template, arch=ARCH)


@pytest.mark.parametrize(
    ("template", "build", "shapes", "dtype"),
    [
        *(case for case in CASES if case.values[0] == "matrix_vector"),
        pytest.param("matmul", product, ((3, 409), (409, 100)), "float32", id="three rows"),
        pytest.param("multiply_add", product, ((4, 409), (409, 100)), "float32", id="four rows"),
    ],
)
def test_values_on_newer_chips(cuda, template, build, shapes, dtype):
    cuda.check(cuda.function(build, *shapes, dtype=dtype), template, arch="sm_90")


def test_one_row_is_too_few_for_tensor_cores(cuda):
    cuda.check(cuda.function(half, (1, 300), (300, 128), dtype="float16"), "matrix_vector")


@pytest.mark.nvcc
@pytest.mark.parametrize(("template", "build", "shapes", "dtype"), CASES)
def test_resources(cuda, template, build, shapes, dtype):
    cuda.resources(cuda.function(build, *shapes, dtype=dtype), ARCH)


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("template", "build", "shapes", "dtype"), CASES)
def test_resources_on_other_archs(cuda, arch, template, build, shapes, dtype):
    cuda.resources(cuda.function(build, *shapes, dtype=dtype), arch)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_large_matrix_vector_product_uses_the_whole_chip(cuda, transposed):
    from tvm_fusion.schedules import limits, schedule

    from tvm_fusion.testing.cuda_emulation import launch_of

    weight = (4096, 25088) if transposed else (25088, 4096)

    def build(emit, data, matrix):
        return emit(op.matmul(data, emit(op.permute_dims(matrix)) if transposed else matrix))

    target = cuda.target("cuda:sm_90")
    scheduled, name = schedule(cuda.function(build, (1, 25088), weight), target)
    launch = launch_of(scheduled)
    threads = launch.grid[0] * launch.block[0] * launch.block[1]
    assert name == "matrix_vector"
    assert threads >= 256 * limits(target).multiprocessors


def test_a_reduction_of_one_operand_is_no_product(cuda):
    func = cuda.function(lambda e, x: e(op.sum(x, [-1])), (8, 64))
    for name in ("matmul", "matrix_vector"):
        assert cuda.template(name).apply(func, cuda.target("cuda:sm_90")) is None


def test_products_in_sequence_are_left_to_others(cuda):
    func = cuda.function(lambda e, x, y, z: product(e, product(e, x, y), z), (9, 8), (8, 7), (7, 6))
    assert cuda.template("matmul").apply(func, cuda.target("cuda:sm_90")) is None


def test_the_tile_follows_the_limits_of_the_target(cuda):
    func = cuda.function(product, (256, 256), (256, 256))
    target = cuda.target(
        {
            "kind": "cuda",
            "arch": "sm_80",
            "max_threads_per_block": 128,
            "max_shared_memory_per_block": 4096,
        }
    )
    scheduled = cuda.template("matmul").apply(func, target)
    from tvm_fusion.schedules.allocation import shared_bytes

    from tvm_fusion.testing.cuda_emulation import launch_of

    assert launch_of(scheduled).block[0] <= 128
    assert 0 < shared_bytes(scheduled) <= 4096
    assert not re.search("sm_90", str(target))
