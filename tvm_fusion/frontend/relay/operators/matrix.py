"""Matrix products."""

from __future__ import annotations

from ....compat import ir, relax
from ..site import Site
from .registry import operator


def _product(site: Site, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """Return a matrix product after a check of its operands."""
    if str(a.ty.dtype) != str(b.ty.dtype) or str(a.ty.dtype) == "bool":
        site.refuse(f"its operands are of dtypes {a.ty.dtype} and {b.ty.dtype}: cast them")
    if site.shape(a)[-1] != site.shape(b)[-2]:
        site.damaged(
            f"matrices of {site.shape(a)[-2:]} and {site.shape(b)[-2:]} cannot be multiplied"
        )
    return site.emit(relax.op.matmul(a, b, out_dtype=site.dtype("out_dtype", str(a.ty.dtype))))


def _swapped(site: Site, x: ir.Expr) -> ir.Expr:
    """Return a matrix, or a stack of them, transposed."""
    rank = site.rank(x)
    return site.permute(x, [*range(rank - 2), rank - 1, rank - 2])


@operator("nn.dense")
def dense(site: Site, data: ir.Expr, weight: ir.Expr) -> ir.Expr:
    """A fully connected layer: a product with the transposed weight."""
    if site.rank(data) == 0:
        site.damaged("its data are one number")
    site.rank(weight, 2)
    if site.rank(data) == 1:
        result = _product(site, site.reshape(data, [1, *site.shape(data)]), _swapped(site, weight))
        return site.reshape(result, site.shape(result)[1:])
    return _product(site, data, _swapped(site, weight))


@operator("nn.matmul")
def matmul(site: Site, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """A matrix product, either operand transposed or not."""
    if site.rank(a) < 2:
        site.damaged("its first operand is no matrix")
    site.rank(b, 2)
    a = _swapped(site, a) if site.flag("transpose_a") else a
    b = _swapped(site, b) if site.flag("transpose_b") else b
    return _product(site, a, b)


@operator("nn.batch_matmul")
def batch_matmul(site: Site, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """A stack of matrix products; the second operand is transposed unless the module says otherwise.

    TVM 0.8's files say so too, older ones hold no such attributes.
    """
    site.rank(a, 3)
    site.rank(b, 3)
    if site.shape(a)[0] != site.shape(b)[0] and 1 not in (site.shape(a)[0], site.shape(b)[0]):
        site.damaged(f"stacks of {site.shape(a)[0]} and {site.shape(b)[0]} matrices do not fit")
    a = _swapped(site, a) if site.flag("transpose_a") else a
    b = _swapped(site, b) if site.flag("transpose_b", True) else b
    return _product(site, a, b)
