"""Rotary embeddings, and embeddings with their norm, as one kernel; values by emulation, resources by nvcc."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm_fusion.schedules import schedule

from tvm_fusion.testing import cuda_emulation

op = relax.op


def rotary(emit, x, cos, sin):
    """``x [B, T, H, D]`` → ``[B, H, T, D]``, halves rotated (LLaMA's ``rotate_half``)."""
    x = emit(op.permute_dims(x, [0, 2, 1, 3]))
    half = int(x.ty.shape[3]) // 2
    first = emit(op.strided_slice(x, [3], [0], [half], [1]))
    second = emit(op.strided_slice(x, [3], [half], [2**63 - 1], [1]))
    turned = emit(op.concat([emit(op.negative(second)), first], axis=-1))
    return emit(op.add(emit(op.multiply(x, cos)), emit(op.multiply(turned, sin))))


def embedding(emit, ids, segments, table, kinds, positions, gamma, beta):
    """Tokens, their segments and positions, and a layer norm, as BERT has them."""
    ids, segments = (emit(op.astype(i, "int32")) for i in (ids, segments))
    total = emit(op.add(emit(op.take(table, ids, axis=0)), positions))
    total = emit(op.add(total, emit(op.take(kinds, segments, axis=0))))
    return emit(op.nn.layer_norm(total, gamma, beta, axes=[-1]))


def masked(emit, mask, causal, score, least):
    """A padding mask and a causal one."""
    both = emit(op.bitwise_and(emit(op.astype(mask, "bool")), causal))
    return emit(op.where(both, score, least))


ROTARY = [((1, 9, 3, 16), "float16"), ((2, 5, 2, 8), "float32"), ((1, 33, 4, 128), "float16")]


@pytest.mark.parametrize(("shape", "dtype"), ROTARY)
def test_rotary_embedding(cuda, shape, dtype):
    table = (1, 1, shape[1], shape[3])
    cuda.check(cuda.function(rotary, shape, table, table, dtype=dtype), "elementwise")


def test_halves_are_read_16_bytes_at_a_time(cuda):
    table = (1, 1, 512, 128)
    func = cuda.function(rotary, (1, 512, 32, 128), table, table, dtype="float16")
    scheduled, _ = schedule(func, cuda.target("cuda:sm_90"))
    source = cuda_emulation.cuda_source(scheduled, cuda.target("cuda:sm_90"))
    assert (
        source.count("*(uint4*)") >= 6
    )  # itself, a half from either side, both tables, the result


@pytest.mark.parametrize("width", [64, 100])
def test_embedding(cuda, width):
    shapes = ((2, 9), (2, 9), (16, width), (16, width), (1, 9, width), (width,), (width,))
    dtypes = ("int64", "int64", *(5 * ("float16",)))
    cuda.check(cuda.function(embedding, *shapes, dtype=dtypes), "rows")


def test_mask(cuda):
    dtypes = ("int64", "bool", "float16", "float16")
    func = cuda.function(masked, (2, 1, 1, 7), (1, 1, 7, 7), (2, 3, 7, 7), (1,), dtype=dtypes)
    cuda.check(func, "elementwise")


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_resources(cuda, arch):
    table = (1, 1, 512, 128)
    cuda.resources(cuda.function(rotary, (1, 512, 32, 128), table, table, dtype="float16"), arch)
    shapes = ((1, 128), (1, 128), (30522, 768), (2, 768), (1, 128, 768), (768,), (768,))
    dtypes = ("int64", "int64", *(5 * ("float16",)))
    cuda.resources(cuda.function(embedding, *shapes, dtype=dtypes), arch)
