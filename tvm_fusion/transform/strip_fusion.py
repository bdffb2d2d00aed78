"""Annotation → the module it was made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..compat import ir, relax, tvm, with_functions
from ..frontend.outline import ORDER
from ..frontend.rename import Substitute
from ..strategies.attributes import STRATEGY


@dataclasses.dataclass(frozen=True)
class ExistingGroup:
    """A group found in an annotated module: its attributes and the variables that its operators bind."""

    name: str
    attrs: dict[str, Any]
    variables: tuple[Any, ...]


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.StripFusion")
class StripFusion:
    """Inline every group function, which gives the unannotated module back."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Strip every function of a module."""
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function) and not is_group(func):
                mod, _ = strip(mod, gv.name_hint)
        return mod


def is_group(func: Any) -> bool:
    """Whether a function is a group of this package."""
    return isinstance(func, relax.Function) and func.attrs is not None and STRATEGY in func.attrs


def strip(mod: tvm.IRModule, func_name: str = "main") -> tuple[tvm.IRModule, list[ExistingGroup]]:
    """Inline the groups that one function calls.

    Parameters
    ----------
    mod : tvm.IRModule
        Module that may hold groups; it is left untouched.
    func_name : str
        The calling function.

    Returns
    -------
    mod : tvm.IRModule
        The module without those groups (the same object when there are none).
    groups : list of ExistingGroup
        What was inlined, in call order.
    """
    groups = {gv: f for gv, f in mod.functions.items() if is_group(f)}
    func = mod[func_name]
    if not groups or len(func.body.blocks) != 1:
        return mod, []
    out: list[Any] = []
    found: list[ExistingGroup] = []
    packed: dict[Any, list[Any]] = {}
    bindings = list(func.body.blocks[0].bindings)
    for binding in bindings:
        value = binding.value
        if isinstance(value, relax.Call) and value.op in groups:
            inlined = _inline(binding, groups[value.op], bindings)
            packed[binding.var] = inlined
            out.extend(inlined)
            group = groups[value.op]
            variables = tuple(b.var for b in inlined)
            found.append(ExistingGroup(value.op.name_hint, dict(group.attrs.items()), variables))
        elif not (isinstance(value, relax.TupleGetItem) and value.tuple_value in packed):
            out.append(binding)
    attrs = dict(func.attrs.items()) if func.attrs else {}
    out = _reordered(out, attrs.pop(ORDER, None))
    body = relax.SeqExpr([relax.DataflowBlock(out)], func.body.body)
    kept_attrs = ir.DictAttrs(attrs) if attrs else None
    main = relax.Function(func.params, body, func.ret_ty, func.is_pure, kept_attrs)
    kept = {gv: f for gv, f in mod.functions.items() if gv not in groups}
    result = with_functions(mod, kept)
    result.update_func(mod.get_global_var(func_name), main)
    return relax.transform.Normalize()(result), found


def _reordered(bindings: list[Any], order: Sequence[Any] | None) -> list[Any]:
    """Put bindings back where ``annotate`` found them; other passes may have added or removed some since."""
    if order is None or len(order) != len(bindings):
        return bindings
    return [
        binding
        for _, binding in sorted(zip(map(int, order), bindings, strict=True), key=lambda p: p[0])
    ]


def _inline(call: Any, group: relax.Function, bindings: Sequence[Any]) -> list[Any]:
    """Copy a group's bindings with its parameters replaced by the call's operands."""
    inner = list(group.body.blocks[0].bindings)
    returned = group.body.body
    last = inner[-1]
    if isinstance(last.value, relax.Tuple) and last.var.same_as(returned):
        results, inner = list(last.value.fields), inner[:-1]
        items = {
            b.value.index: b.var
            for b in bindings
            if isinstance(b.value, relax.TupleGetItem) and b.value.tuple_value.same_as(call.var)
        }
        outer = {v: items[k] for k, v in enumerate(results) if k in items}
    else:
        outer = {returned: call.var}
    rename = Substitute(dict(zip(group.params, call.value.args, strict=True)))
    out = []
    for binding in inner:
        var = outer.get(binding.var)
        if var is None:
            var = relax.DataflowVar(binding.var.name, binding.var.ty)
        out.append(relax.VarBinding(var, rename.visit_expr(binding.value)))
        rename.names[binding.var] = var
    return out
