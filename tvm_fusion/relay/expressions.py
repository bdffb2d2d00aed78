"""Walks through Relay expressions that need no recursion: chains of calls are thousands long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .compat import NAMES, REFERENCES, ExprMutator, relay


def post_order(roots: Iterable[Any], needs: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Expressions that can be reached, each once, and after those that it needs.

    Parameters
    ----------
    roots : iterable of relay.Expr
        Where to start.
    needs : callable
        What an expression needs. Where needs go round in a circle (a recursive function), the one
        that closes it is passed over.
    """
    out: list[Any] = []
    seen: set[Any] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(list(needs(root))))]
        while stack:
            expr, rest = stack[-1]
            following = next((e for e in rest if e not in seen), None)
            if following is None:
                out.append(expr)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(list(needs(following)))))
    return out


def children(expr: Any) -> list[Any]:
    """Every expression that stands directly inside another."""
    if isinstance(expr, relay.Call):
        return [*expr.args, expr.op]
    if isinstance(expr, relay.Tuple):
        return list(expr.fields)
    if isinstance(expr, relay.TupleGetItem):
        return [expr.tuple_value]
    if isinstance(expr, relay.Let):
        return [expr.value, expr.body]
    if isinstance(expr, relay.If):
        return [expr.cond, expr.true_branch, expr.false_branch]
    if isinstance(expr, relay.Function):
        return [expr.body]
    if isinstance(expr, relay.Match):
        return [expr.data, *(clause.rhs for clause in expr.clauses)]
    if isinstance(expr, REFERENCES):
        return [getattr(expr, field) for field in ("value", "ref") if hasattr(expr, field)]
    return []


def outside_scopes(expr: Any) -> list[Any]:
    """What an expression always computes first: all children but branches and bodies of functions."""
    if isinstance(expr, relay.If):
        return [expr.cond]
    if isinstance(expr, relay.Match):
        return [expr.data]
    if isinstance(expr, relay.Function):
        return []
    if isinstance(expr, relay.Call):
        called = isinstance(expr.op, (*NAMES, relay.Function))
        return [*expr.args, *([] if called else [expr.op])]
    return children(expr)


def inside_scopes(expr: Any) -> list[Any]:
    """The branches of control flow and the body of a function."""
    if isinstance(expr, relay.If):
        return [expr.true_branch, expr.false_branch]
    if isinstance(expr, relay.Match):
        return [clause.rhs for clause in expr.clauses]
    if isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function):
        return [expr.op.body]
    return [expr.body] if isinstance(expr, relay.Function) else []


def with_operands(expr: Any, get: Callable[[Any], Any], known: Callable[[Any], Any]) -> Any:
    """An expression with its operands replaced; itself where none differs.

    Parameters
    ----------
    expr : relay.Expr
        The expression.
    get : callable
        What stands for an operand.
    known : callable
        What stands for an expression inside a branch or a local function, None where it stays.
    """
    named = not isinstance(expr, relay.Call) or isinstance(expr.op, NAMES)
    if isinstance(expr, relay.Call) and named:
        old = list(expr.args)
        args = [get(arg) for arg in old]
        if all(a.same_as(b) for a, b in zip(args, old, strict=True)):
            return expr
        return relay.Call(expr.op, args, expr.attrs, expr.type_args, expr.span)
    if isinstance(expr, relay.Tuple):
        old = list(expr.fields)
        fields = [get(field) for field in old]
        same = all(a.same_as(b) for a, b in zip(fields, old, strict=True))
        return expr if same else relay.Tuple(fields, expr.span)
    if isinstance(expr, relay.TupleGetItem):
        value = get(expr.tuple_value)
        return expr if value.same_as(expr.tuple_value) else relay.TupleGetItem(value, expr.index)
    return _Scopes(known).copy(expr) if children(expr) else expr


class _Scopes(ExprMutator):
    """Replaces what branches and local functions take from outside."""

    def __init__(self, known: Callable[[Any], Any]) -> None:
        super().__init__()
        self._known = known

    def copy(self, expr: Any) -> Any:
        """Copy the expression itself, whatever stands for it."""
        return super().visit(expr)

    def visit(self, expr: Any) -> Any:
        known = self._known(expr)
        return super().visit(expr) if known is None else known

    def visit_let(self, let: Any) -> Any:
        return relay.Let(let.var, self.visit(let.value), self.visit(let.body))
