"""Values of integer expressions for many values of their variables at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..compat import ir, tirx

_OPERATORS: dict[type, Callable] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}


def values_of(
    expression: tirx.PrimExpr, variables: Mapping[ir.Var, np.ndarray]
) -> np.ndarray | None:
    """Evaluate an expression of integers.

    Parameters
    ----------
    expression : PrimExpr
        Sums, products, floor divisions, comparisons and choices of integers and variables.
    variables : mapping of Var to numpy.ndarray
        Values of each variable, int64, of shapes that broadcast.

    Returns
    -------
    numpy.ndarray or None
        The values, of the shape to which those of the variables that occur broadcast; None where the expression
        holds anything else.
    """
    if isinstance(expression, tirx.IntImm):
        return np.asarray(int(expression.value))
    if isinstance(expression, ir.Var):
        return variables.get(expression)
    if isinstance(expression, tirx.Cast):
        return values_of(expression.value, variables)
    if isinstance(expression, tirx.Not):
        operand = values_of(expression.a, variables)
        return None if operand is None else np.logical_not(operand)
    if isinstance(expression, tirx.Select):
        parts = (expression.condition, expression.true_value, expression.false_value)
        values = [values_of(part, variables) for part in parts]
        return None if any(value is None for value in values) else np.where(*values)
    operator = _OPERATORS.get(type(expression))
    if operator is None:
        return None
    one, other = values_of(expression.a, variables), values_of(expression.b, variables)
    if one is None or other is None:
        return None
    is_division = operator in (np.floor_divide, np.mod)
    return None if is_division and not np.all(other) else operator(one, other)
