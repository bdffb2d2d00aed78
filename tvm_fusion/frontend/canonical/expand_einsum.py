"""Write a sum of products over named axes as a matrix product of moved axes."""

from __future__ import annotations

import dataclasses
import math
import string

from ...compat import ir, relax, tvm
from .rewrite import BindingRewriter, dtype_of, op_name, static_shape

_FLOATS = ("float16", "bfloat16", "float32", "float64")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.ExpandEinsum")
class ExpandEinsum:
    """einsum("bshd,bthd->bhst", q, k) -> matmul(q as bhsd, k as bhdt)

    Two operands, each of which has every letter once; a letter that only one operand has must be in the result, at
    least one such there is, and at least one that is summed over. Several letters of one kind become one axis. Other
    sums stay as they are.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


@dataclasses.dataclass(frozen=True)
class _Axes:
    """Letters of two operands and the result, and by kind: shared, of one operand, summed over."""

    left: str
    right: str
    result: str
    batch: str
    rows: str
    columns: str
    summed: str


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if op_name(value) != "einsum" or not isinstance(value.args[0], relax.Tuple):
            return value
        operands = list(value.args[0].fields)
        shapes = [static_shape(operand) for operand in operands]
        if len(operands) != 2 or None in shapes:
            return value
        if any(dtype_of(operand) not in _FLOATS for operand in operands):
            return value
        axes = _axes_of(str(value.attrs.subscripts), [len(shape) for shape in shapes])
        if axes is None:
            return value
        sizes = dict(zip(axes.left, shapes[0], strict=True))
        if any(sizes.get(a, n) != n for a, n in zip(axes.right, shapes[1], strict=True)):
            return value
        sizes.update(zip(axes.right, shapes[1], strict=True))
        return self._product(name, operands, axes, sizes)

    def _product(
        self, name: str, operands: list[ir.Expr], axes: _Axes, sizes: dict[str, int]
    ) -> ir.Expr:
        left = self._moved(
            name, operands[0], axes.left, (axes.batch, axes.rows, axes.summed), sizes
        )
        right = self._moved(
            name, operands[1], axes.right, (axes.batch, axes.summed, axes.columns), sizes
        )
        product = self.emit(name, relax.op.matmul(left, right))
        order = axes.batch + axes.rows + axes.columns
        if len(axes.rows) != 1 or len(axes.columns) != 1:
            product = self.emit(name, relax.op.reshape(product, [sizes[a] for a in order]))
        if order == axes.result:
            return product
        return relax.op.permute_dims(product, [order.index(a) for a in axes.result])

    def _moved(
        self, name: str, operand: ir.Expr, letters: str, kinds: tuple[str, ...], sizes: dict
    ) -> ir.Expr:
        """An operand as ``[*batch, one, other]``."""
        order = "".join(kinds)
        if order != letters:
            places = [letters.index(letter) for letter in order]
            operand = self.emit(name, relax.op.permute_dims(operand, places))
        batch, *last = kinds
        if all(len(kind) == 1 for kind in last):
            return operand
        joined = [math.prod(sizes[letter] for letter in kind) for kind in last]
        shape = [*(sizes[letter] for letter in batch), *joined]
        return self.emit(name, relax.op.reshape(operand, shape))


def _axes_of(subscripts: str, ranks: list[int]) -> _Axes | None:
    """Read subscripts; None where they say something else than a matrix product."""
    inputs, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ranks):
        return None
    named = [len(term.replace("...", "")) for term in terms]
    spare = [letter for letter in string.ascii_letters if letter not in subscripts]
    lengths = [
        rank - n if "..." in t else 0 for t, n, rank in zip(terms, named, ranks, strict=True)
    ]
    if min(lengths) < 0 or max(lengths) > len(spare):
        return None
    longest = max(lengths)
    if not arrow:
        once = sorted(a for a in set(inputs) - set(",.") if inputs.count(a) == 1)
        result = ("..." if longest else "") + "".join(once)
    for number, length in enumerate(lengths):
        letters = "".join(spare[longest - length : longest])
        terms[number] = terms[number].replace("...", letters)
    result = result.replace("...", "".join(spare[:longest]))
    left, right = terms
    if any(len(set(t)) != len(t) for t in (left, right, result)):
        return None
    if [len(left), len(right)] != ranks or not set(result) <= set(left + right):
        return None
    shared = [a for a in left if a in right]
    kinds = (
        "".join(a for a in result if a in shared),
        "".join(a for a in result if a in left and a not in right),
        "".join(a for a in result if a in right and a not in left),
        "".join(a for a in shared if a not in result),
    )
    summed = kinds[-1]
    alone = [a for a in left + right if a not in shared and a not in result]
    # Products of places alone are a multiplication and a sum, which no matrix product does better.
    is_matrix = summed and (kinds[1] or kinds[2])
    return None if alone or not is_matrix else _Axes(left, right, result, *kinds)
