"""Annotation → the function without groups: what TVM's graph executor compiles."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..config import STRATEGIES
from ..errors import InvalidModelError
from ..strategies.attributes import STRATEGY
from .compat import plain_attrs, relay, tvm
from .expressions import children, outside_scopes, post_order, with_operands


@dataclasses.dataclass(frozen=True)
class Stripped:
    """A module without groups, and what they were.

    Attributes
    ----------
    mod : IRModule
        With types.
    groups : mapping of str to dict
        Attributes of each group as plain values.
    owners : mapping of relay.Expr to str
        The group of each call that stood in one.
    """

    mod: Any
    groups: Mapping[str, dict[str, Any]]
    owners: Mapping[Any, str]


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.relay.StripFusion")
class StripFusion:
    """Inline every group, which gives the unannotated module back.

    TVM's graph executor wants this first: it takes no composite functions but those of its own
    back ends.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Strip ``main``."""
        return strip(mod).mod


def typed(mod: tvm.IRModule) -> tvm.IRModule:
    """A copy of a module with types.

    Raises
    ------
    InvalidModelError
        If there is no ``main``, or its types do not fit.
    """
    if not isinstance(mod, tvm.IRModule):
        raise TypeError(f"a model is a tvm.IRModule, not {type(mod).__name__}")
    names = [gv.name_hint for gv in mod.get_global_vars()]
    if "main" not in names or not isinstance(mod["main"], relay.Function):
        raise InvalidModelError(
            f"the module has no Relay function 'main'; it has {', '.join(names) or 'none'}"
        )
    try:
        return relay.transform.InferType()(mod)
    except tvm.TVMError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise InvalidModelError(
            f"the types of the module do not fit ({lines[-1] if lines else 'no reason is given'}); "
            "correct the model"
        ) from error


def strip(mod: tvm.IRModule) -> Stripped:
    """Inline the groups of ``main``.

    Parameters
    ----------
    mod : IRModule
        Module that may hold groups; it is left untouched.
    """
    mod = typed(mod)
    func = mod["main"]
    order = post_order([func.body], outside_scopes)
    if not any(map(is_group, order)):
        return Stripped(mod, {}, {})
    inliner = _Inliner()
    for expr in order:
        inliner.add(expr)
    body = inliner.new[func.body]
    flat = relay.Function(func.params, body, func.ret_type, func.type_params, func.attrs, func.span)
    mod.update_func(mod.get_global_var("main"), flat)
    result = relay.transform.InferType()(mod)
    # Type inference copies expressions and keeps their order.
    before = post_order([body], children)
    after = post_order([result["main"].body], children)
    owners = {
        new: inliner.owners[old]
        for old, new in zip(before, after, strict=True)
        if old in inliner.owners
    }
    return Stripped(result, inliner.groups, owners)


def is_group(expr: Any) -> bool:
    """Whether an expression is the call of a group of this package."""
    if not (isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function)):
        return False
    attrs = expr.op.attrs
    named = attrs is not None and STRATEGY in attrs.keys()
    return named and str(attrs[STRATEGY]) in STRATEGIES


class _Inliner:
    """Copies a function expression by expression, the bodies of groups in place of their calls."""

    def __init__(self) -> None:
        self.new: dict[Any, Any] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        self.owners: dict[Any, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, expr: Any) -> None:
        """Copy one expression; what it needs has been copied."""
        self.new[expr] = self._inline(expr) if is_group(expr) else _copy(expr, self.new)

    def _inline(self, call: Any) -> Any:
        attrs = plain_attrs(call.op.attrs)
        strategy = str(attrs[STRATEGY])
        name = f"fused_{strategy}_{self._counts[strategy]}"
        self._counts[strategy] += 1
        self.groups[name] = attrs
        new = {p: self.new[a] for p, a in zip(call.op.params, call.args, strict=True)}
        for expr in post_order([call.op.body], outside_scopes):
            if expr not in new:
                new[expr] = _copy(expr, new)
                if isinstance(new[expr], relay.Call):
                    self.owners[new[expr]] = name
        return new[call.op.body]


def _copy(expr: Any, new: Mapping[Any, Any]) -> Any:
    if isinstance(expr, relay.Let):
        return relay.Let(expr.var, new[expr.value], new[expr.body])
    if isinstance(expr, relay.TupleGetItem) and isinstance(new[expr.tuple_value], relay.Tuple):
        return new[expr.tuple_value].fields[expr.index]
    get: Callable[[Any], Any] = new.__getitem__
    return with_operands(expr, get, new.get)
