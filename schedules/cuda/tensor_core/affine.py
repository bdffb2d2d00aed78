"""Expressions of a function as what they are: guarded reads of a tensor, and affine offsets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tvm_ffi

from ....compat import ir, sym, tirx
from ...analysis import nodes_of
from .form import InnerSum, Iterator

_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")

#: Expressions by the variable that they replace.
Substitution = dict


def substitute(expr, replaced: Substitution):
    """Replace variables in an expression or statement."""
    table = {var.__chandle__(): value for var, value in replaced.items()}
    return tvm_ffi.structural_map(expr, [(tirx.Var, lambda var: table.get(var.__chandle__(), var))])


def uses(expr: tirx.PrimExpr, var: tirx.Var) -> bool:
    """Whether a variable occurs in an expression."""
    return any(node.same_as(var) for node in nodes_of(expr, tirx.Var))


def is_conditional(value: tirx.PrimExpr) -> bool:
    """Whether an expression is ``condition ? a : b``, of which only one side is evaluated."""
    return isinstance(value, ir.Call) and value.op.same_as(_IF_THEN_ELSE)


@dataclasses.dataclass(frozen=True)
class Copy:
    """A value that is read from a buffer where some conditions hold and zero elsewhere.

    Attributes
    ----------
    buffer : Buffer
        A parameter.
    offset : PrimExpr
        Element number in the buffer.
    conditions : tuple of PrimExpr
        What must hold.
    """

    buffer: tirx.Buffer
    offset: tirx.PrimExpr
    conditions: tuple[tirx.PrimExpr, ...]


def as_copy(value: tirx.PrimExpr, inner: Sequence[InnerSum] = ()) -> Copy | None:
    """Describe a value as a guarded read of a parameter; None when it is anything else."""
    conditions: list[tirx.PrimExpr] = []
    while is_conditional(value):
        condition, value, other = value.args
        if not (isinstance(other, tirx.FloatImm) and float(other.value) == 0.0):
            return None
        if nodes_of(condition, ir.TensorLoad):
            return None
        conditions += conjuncts(condition)
    if not isinstance(value, ir.TensorLoad) or any(
        value.source.same_as(sum_.buffer) for sum_ in inner
    ):
        return None
    return Copy(value.source, flat_offset(value), tuple(conditions))


def conjuncts(condition: tirx.PrimExpr) -> list[tirx.PrimExpr]:
    """The conditions that all hold where a condition does."""
    if isinstance(condition, tirx.And):
        return [*conjuncts(condition.a), *conjuncts(condition.b)]
    return [condition]


def flat_offset(load: ir.TensorLoad) -> tirx.PrimExpr:
    """Element number of a load in a compact row-major buffer."""
    offset: tirx.PrimExpr = tirx.IntImm("int32", 0)
    for extent, index in zip(load.source.shape, load.indices, strict=True):
        offset = offset * tirx.IntImm("int32", int(extent)) + index
    return sym.Analyzer().simplify(offset)


def coefficients(offset: tirx.PrimExpr, variables: list[tirx.Var]) -> list[int] | None:
    """Coefficients of variables in an affine expression; None when it is not affine with numbers.

    Parameters
    ----------
    offset : PrimExpr
        The expression.
    variables : list of Var
        The variables.

    Returns
    -------
    list of int or None
        One number a variable, and the rest, where that is a number too.
    """
    found = sym.detect_linear_equation(offset, variables)
    numbers = [sym.Analyzer().simplify(f) for f in found]
    if not numbers or not all(isinstance(n, tirx.IntImm) for n in numbers):
        return None
    return [int(n) for n in numbers]


def steps_in(offset: tirx.PrimExpr) -> dict[int, int] | None:
    """Coefficients of an offset by the variable's handle (0: the rest); None when it is not affine with numbers."""
    variables = list({v.__chandle__(): v for v in nodes_of(offset, tirx.Var)}.values())
    if not variables:
        simple = sym.Analyzer().simplify(offset)
        return {0: int(simple)} if isinstance(simple, tirx.IntImm) else None
    numbers = coefficients(offset, variables)
    if numbers is None or len(numbers) != len(variables) + 1:
        return None
    return dict(zip([*(v.__chandle__() for v in variables), 0], numbers, strict=True))


def contiguous_iterator(value: tirx.PrimExpr, candidates: list[Iterator]) -> Iterator | None:
    """The iterator along which a guarded read touches neighbouring elements."""
    copy = as_copy(value)
    if copy is None:
        return None
    variables = list({v.__chandle__(): v for v in nodes_of(copy.offset, tirx.Var)}.values())
    numbers = coefficients(copy.offset, variables) if variables else None
    if numbers is None:
        return None
    for candidate in candidates:
        for var, number in zip(variables, numbers, strict=False):
            if number == 1 and var.same_as(candidate.var) and candidate.extent > 1:
                return candidate
    return None
