"""ExpandEinsum: sums of products over named axes become matrix products."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax
from tvm_fusion.frontend.canonical import ExpandEinsum
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op

SIZES = dict(zip("abcdehijkst", (2, 3, 4, 5, 6, 3, 2, 4, 5, 7, 8), strict=True))


def einsum(subscripts, shapes=None, dtype="float32"):
    """A module of one sum, and arrays for it."""
    terms = subscripts.partition("->")[0].split(",")
    shapes = shapes or [tuple(SIZES[letter] for letter in term) for term in terms]
    b = ModuleBuilder(dtype)
    inputs = [b.input(f"x{number}", shape) for number, shape in enumerate(shapes)]
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, shape).astype(dtype) for shape in shapes]
    return b.finish(b.op("y", op.einsum(relax.Tuple(inputs), subscripts))), arrays


@pytest.mark.parametrize(
    ("subscripts", "names"),
    [
        ("bshd,bthd->bhst", ["permute_dims", "permute_dims", "matmul"]),
        ("bhst,bthd->bshd", ["permute_dims", "matmul", "permute_dims"]),
        ("bhsd,bhtd->bhst", ["permute_dims", "matmul"]),
        ("ij,jk->ik", ["matmul"]),
        ("ij,jk->ki", ["matmul", "permute_dims"]),
        ("bsd,dhk->bshk", ["reshape", "reshape", "matmul", "reshape"]),
        ("bshk,hkd->bsd", ["reshape", "reshape", "matmul", "reshape"]),
        ("ij,j->i", ["reshape", "matmul", "reshape"]),
        ("ij,jk", ["matmul"]),
    ],
)
def test_products(subscripts, names, operators, run_module):
    before, arrays = einsum(subscripts)
    after = ExpandEinsum()(before)
    assert [name for _, name in operators(after)] == names
    wanted = np.einsum(subscripts, *arrays)
    for module in (before, after):
        np.testing.assert_array_equal(run_module(module, *arrays)[0], wanted)


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("...ij,...jk->...ik", [(2, 3, 4, 5), (2, 3, 5, 6)]),
        ("...ij,jk->...ik", [(2, 3, 4, 5), (5, 6)]),
        ("ij,...jk->i...k", [(4, 5), (2, 3, 5, 6)]),
    ],
)
def test_ellipses(subscripts, shapes, operators, run_module):
    before, arrays = einsum(subscripts, shapes)
    after = ExpandEinsum()(before)
    assert "matmul" in [name for _, name in operators(after)]
    np.testing.assert_array_equal(run_module(after, *arrays)[0], np.einsum(subscripts, *arrays))


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ii,ij->j", [(4, 4), (4, 5)]),  # a diagonal
        ("ijk,jl->il", [(2, 3, 4), (3, 5)]),  # a sum of one operand
        ("i,j->ij", [(3,), (4,)]),  # no sum
        ("ij,ij->i", [(3, 4), (3, 4)]),  # rows by rows
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
        ("ij->ji", [(2, 3)]),
    ],
)
def test_other_sums_stay(subscripts, shapes, operators):
    before, _ = einsum(subscripts, shapes)
    assert [name for _, name in operators(ExpandEinsum()(before))] == ["einsum"]


def test_integers_stay(operators):
    before, _ = einsum("ij,jk->ik", dtype="int32")
    assert [name for _, name in operators(ExpandEinsum()(before))] == ["einsum"]
