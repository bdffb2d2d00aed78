"""Integers that are divided by what a tensor holds: a zero there must not end the process.

A CPU raises a signal where an integer is divided by zero, or the least one by -1, which ends the whole program; so
would the zeros among the inputs that verification draws. A kernel cannot raise an error. Here the quotient and the
remainder of a division by zero are 0, as in NumPy, and those of -1 wrap around. Divisors that the code states (strides,
extents) stay as they are.
"""

from __future__ import annotations

import tvm_ffi

from ..compat import ir, tirx
from ..schedules.analysis import nodes_of

_QUOTIENTS = (tirx.Div, tirx.FloorDiv)
_REMAINDERS = (tirx.Mod, tirx.FloorMod)


def safe_division(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let integer divisions by values of tensors end well.

    Parameters
    ----------
    func : PrimFunc
        A function before TVM lowers it.

    Returns
    -------
    PrimFunc
        The function itself where it has no such division.
    """

    def divide(node: tirx.PrimExpr) -> tirx.PrimExpr:
        dtype = str(node.ty.dtype)
        scalar_integer = dtype.startswith(("int", "uint")) and "x" not in dtype
        if not scalar_integer or not nodes_of(node.b, ir.TensorLoad):
            return node
        zero, one = tirx.const(0, dtype), tirx.const(1, dtype)
        by_zero = tirx.EQ(node.b, zero)
        if dtype.startswith("uint"):
            safe = type(node)(node.a, tirx.Select(by_zero, one, node.b))
            return safe if isinstance(node, _REMAINDERS) else tirx.Select(by_zero, zero, safe)
        negated = tirx.EQ(node.b, tirx.const(-1, dtype))
        safe = type(node)(node.a, tirx.Select(tirx.Or(by_zero, negated), one, node.b))
        if isinstance(node, _REMAINDERS):
            return safe  # of 1 it is 0, as of 0 and -1
        return tirx.Select(by_zero, zero, tirx.Select(negated, tirx.Sub(zero, node.a), safe))

    rules = [(kind, divide) for kind in (*_QUOTIENTS, *_REMAINDERS)]
    body = tvm_ffi.structural_map(func.body, rules, order="post")
    return func if body.same_as(func.body) else func.with_body(body)
