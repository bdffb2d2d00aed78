"""Kernels for tests of tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tvm_fusion.compat import relax, tirx, tvm
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.groups import group_function, group_module
from tvm_fusion.tuning.builder import Builder
from tvm_fusion.tuning.kernels import kernel_digest
from tvm_fusion.tuning.measure import KernelSource
from tvm_fusion.tuning.reference import References


def source_of(func: tirx.PrimFunc, target: str = "llvm") -> KernelSource:
    """A PrimFunc as tuning hands it to its workers."""
    func_json = tvm.ir.save_json(tvm.IRModule({"main": func}))
    return KernelSource(kernel_digest(func), func_json, str(parse_target(target)))


def kernel_of(
    shapes: Sequence[Sequence[int]], dtype: str, make: Callable, target: str = "llvm"
) -> KernelSource:
    """The kernel of a group of what ``make(builder, *inputs)`` emits."""
    func = group_function(group_module(shapes, dtype, make))
    return source_of(func.with_attr("tvm_fusion.strategy", "vertical"), target)


def dense(target: str = "llvm", dtype: str = "float32", rows: int = 32) -> KernelSource:
    """relu(x · w + b)."""

    def make(builder, x, w, b):
        product = builder.emit(relax.op.matmul(x, w))
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(product, b))))

    return kernel_of([(rows, 64), (64, 128), (128,)], dtype, make, target)


@pytest.fixture(scope="session")
def kernels():
    """Makers of kernels."""

    class Kernels:
        of = staticmethod(kernel_of)
        source = staticmethod(source_of)
        dense = staticmethod(dense)

    return Kernels


@pytest.fixture(scope="session")
def builder():
    """A builder that all tests share: importing TVM in a worker takes seconds."""
    with Builder(workers=1) as builder:
        yield builder


@pytest.fixture(scope="session")
def references():
    """Reference outputs that all tests share."""
    with References() as references:
        yield references
