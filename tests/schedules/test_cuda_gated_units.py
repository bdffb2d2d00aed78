"""Gated linear units (SwiGLU, GEGLU): both products in one kernel, values by emulation, resources by nvcc."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op
MERGED = {"form": "merged", "join": "multiply"}


def gated(rows, inner, columns, dtype, activation=op.nn.silu, bias=False):
    """``activation(x · W) * (x · V)``, x ``[rows, inner]``."""
    b = ModuleBuilder(dtype)
    x = b.input("x", (1, rows, inner))
    gate = b.dense("gate", x, columns, bias=bias)
    up = b.dense("up", x, columns, bias=bias)
    return b.finish(b.op("out", op.multiply(b.op("act", activation(gate)), up)))


CASES = [
    ("float16", "sm_90", "tensor_core"),
    ("float16", "sm_90a", "tensor_core"),
    ("bfloat16", "sm_80", "tensor_core"),
    ("float32", "sm_80", "multiply_add"),
]


@pytest.mark.parametrize(("dtype", "arch", "template"), CASES)
def test_swiglu(cuda, dtype, arch, template):
    group = cuda.group(gated(70, 64, 136, dtype), "compound", dtype, **MERGED)
    cuda.check_group(group, template, arch=arch)


def test_geglu_with_biases(cuda):
    module = gated(33, 40, 72, "float16", op.nn.gelu, bias=True)
    cuda.check_group(cuda.group(module, "compound", "float16", **MERGED), "tensor_core")


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize("rows", [16, 512])
def test_resources(cuda, arch, rows):
    module = gated(rows, 1024, 2816, "float16")
    cuda.resources(cuda.group(module, "compound", "float16", **MERGED).func, arch)
