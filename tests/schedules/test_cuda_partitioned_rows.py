"""Row operators, pools and elementwise chains of several branches in one launch: one kernel, by emulation."""

from __future__ import annotations

import re

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op
SIDE_BY_SIDE = {"form": "partitioned", "join": "apart"}


def norms(b, rows=32, width=1024, count=4):
    """Layer norms of as many tensors."""
    return [b.layer_norm(f"norm{i}", b.input(f"x{i}", (rows, width))) for i in range(count)]


def residual_norms(b):
    """Sum with another tensor, layer norm, ReLU, with rows that do not fill a block."""
    made = []
    for i in range(3):
        y = b.add(f"sum{i}", b.input(f"x{i}", (5, 96)), b.input(f"r{i}", (5, 96)))
        made.append(b.relu(f"relu{i}", b.layer_norm(f"norm{i}", y)))
    return made


def softmaxes(b):
    return [b.op(f"s{i}", op.nn.softmax(b.input(f"x{i}", (7, 77)))) for i in range(2)]


def pools(b):
    made = []
    for i in range(3):
        x = b.input(f"x{i}", (1, 9, 9, 16))
        pool = op.nn.max_pool2d(x, (3, 3), padding=1, layout="NHWC")
        made.append(b.relu(f"relu{i}", b.op(f"pool{i}", pool)))
    return made


def means(b):
    return [b.op(f"m{i}", op.mean(b.input(f"x{i}", (2, 7, 7, 24)), [1, 2])) for i in range(2)]


def gelus(b):
    made = []
    for i in range(3):
        y = b.add(f"sum{i}", b.input(f"x{i}", (32, 128)), b.input(f"r{i}", (32, 128)))
        made.append(b.op(f"gelu{i}", op.nn.gelu(y)))
    return made


MEMBERS = [norms, residual_norms, softmaxes, pools, means, gelus]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("make", MEMBERS, ids=lambda make: make.__name__)
def test_members_are_one_kernel(cuda, make, dtype):
    b = ModuleBuilder(dtype, "NHWC")
    made = make(b)
    group = cuda.group(b.finish(*made), "horizontal", dtype, **SIDE_BY_SIDE)
    source = cuda.check_group(group, "partitioned")
    # each branch lets the next kernel start and waits for the previous one before it reads anything
    assert len(re.findall(r"tvmf_wait_for_previous\(\);", source)) == len(made)


def test_a_concatenation(cuda):
    b = ModuleBuilder("float16")
    joined = b.concat("cat", norms(b, rows=4, width=64, count=2), axis=-1)
    options = {"form": "partitioned", "join": "concat"}
    cuda.check_group(
        cuda.group(b.finish(joined), "horizontal", "float16", **options), "partitioned"
    )


def test_one_member_is_an_ordinary_kernel(cuda):
    b = ModuleBuilder("float16")
    group = cuda.group(b.finish(*norms(b, count=1)), "vertical", "float16")
    source = cuda.check_group(group, "rows")
    assert len(cuda_emulation.kernels(source)) == 1


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_resources(cuda, arch):
    b = ModuleBuilder("float16")
    group = cuda.group(b.finish(*norms(b)), "horizontal", "float16", **SIDE_BY_SIDE)
    assert cuda.resources(group.func, arch).registers <= 64
