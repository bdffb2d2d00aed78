"""Annotated groups → one PrimFunc each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compat import (
    Constant,
    PyExprMutator,
    ir,
    mutator,
    relax,
    structural_equal,
    structural_hash,
    tirx,
    tvm,
    with_functions,
)
from ..errors import LoweringError
from ..frontend.outline import ORDER
from ..schedules.base import CONSTANTS
from .annotate import NUMERICS
from .keep_roundings import keep_roundings
from .legalize import legalize
from .rewrite_groups import rewrite_group
from .strip_fusion import is_group


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.LowerGroups")
class LowerGroups:
    """Lower every operator to ``call_tir`` and every group to one PrimFunc.

    Groups are first rewritten by their option ``form``, whatever their strategy, to compute what
    their members share once; then TVM's LegalizeOps (with float32 accumulation of narrow types) and
    FuseTIR do the lowering. The groups' attributes move to the PrimFuncs, and equal kernels become
    one.

    Raises
    ------
    LoweringError
        If a group does not have the form that its options name.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Lower a module."""
        return lower_groups(mod)[0]


def lower_groups(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, str]]:
    """Lower a module and say which kernel serves each group.

    Returns
    -------
    mod : tvm.IRModule
        The module with PrimFuncs.
    kernels : dict of str to str
        Kernel name by group name (equal groups share one).

    Raises
    ------
    LoweringError
        If a group does not have the form that its options name, or does not become one PrimFunc.
    """
    names = [gv.name_hint for gv, f in mod.functions.items() if is_group(f)]
    strict = any(is_group(f) and f.attrs.get(NUMERICS) == "strict" for f in mod.functions.values())
    mod = legalize(_rewrite_groups(mod))
    if strict:
        mod = keep_roundings(mod)
    mod = _fuse_keeping_attrs(mod)
    kept = {gv.name_hint for gv, f in mod.functions.items() if isinstance(f, tirx.PrimFunc)}
    for name in names:
        if name not in kept:
            raise LoweringError(f"{name} does not become one kernel; leave its operators unfused")
    mod, aliases = share_equal_kernels(note_constants(mod))
    return mod, {name: aliases.get(name, name) for name in names}


def _rewrite_groups(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite the groups that ``main`` calls by their forms, and drop the order that only ``strip`` needs."""
    main = mod.get_global_var("main")
    func = mod[main]
    bindings = []
    for binding in func.body.blocks[0].bindings:
        value = binding.value
        if isinstance(value, relax.Call) and isinstance(value.op, ir.GlobalVar):
            callee = mod[value.op]
            if is_group(callee):
                gv = mod.get_global_var(value.op.name_hint)
                mod, value = rewrite_group(mod, gv, value)
        bindings.append(relax.VarBinding(binding.var, value))
    attrs = {k: v for k, v in (func.attrs.items() if func.attrs else ()) if k != ORDER}
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], func.body.body)
    out = with_functions(mod)
    new_main = relax.Function(func.params, body, func.ret_ty, func.is_pure, ir.DictAttrs(attrs))
    out.update_func(out.get_global_var("main"), new_main)
    return relax.transform.Normalize()(out)


def _fuse_keeping_attrs(mod: tvm.IRModule) -> tvm.IRModule:
    """Run FuseTIR, which drops custom attributes, and put them on the PrimFuncs by name."""
    kept: dict[str, dict[str, Any]] = {}
    for gv, func in mod.functions.items():
        if is_group(func):
            pairs = func.attrs.items()
            kept[gv.name_hint] = {k: v for k, v in pairs if k.startswith("tvm_fusion.")}
    out = relax.transform.FuseTIR()(mod)
    for gv, func in list(out.functions.items()):
        if isinstance(func, tirx.PrimFunc) and gv.name_hint in kept:
            attrs = kept[gv.name_hint]
            out.update_func(gv, func.with_attrs(attrs))
    return relax.transform.DeadCodeElimination()(out)


def note_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Write into every PrimFunc which of its parameters are constants wherever ``main`` calls it."""
    found: dict[str, set[int]] = {}
    for call in tir_calls(mod["main"]):
        numbers = {i for i, arg in enumerate(call.args[1].fields) if isinstance(arg, Constant)}
        name = call.args[0].name_hint
        found[name] = found.get(name, numbers) & numbers
    out = with_functions(mod)
    for name, numbers in found.items():
        if numbers:
            func = mod[name].with_attr(CONSTANTS, sorted(numbers))
            out.update_func(out.get_global_var(name), func)
    return out


def tir_calls(func: relax.Function) -> list[relax.Call]:
    """The ``call_tir`` bindings of a function in order."""
    values = [binding.value for binding in func.body.blocks[0].bindings]
    return [
        value
        for value in values
        if isinstance(value, relax.Call) and value.op == ir.Op.get("relax.call_tir")
    ]


def share_equal_kernels(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, str]]:
    """Let structurally equal PrimFuncs be one.

    Returns
    -------
    mod : tvm.IRModule
        The module without the duplicates.
    aliases : dict of str to str
        Name of the kept function by that of each duplicate.
    """
    kept: dict[int, list[tuple[ir.GlobalVar, Any]]] = {}
    aliases: dict[str, ir.GlobalVar] = {}
    for gv, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        same = kept.setdefault(structural_hash(func), [])
        twin = next((g for g, f in same if structural_equal(f, func)), None)
        if twin is None:
            same.append((gv, func))
        else:
            aliases[gv.name_hint] = twin
    if not aliases:
        return mod, {}
    redirect = Redirect(aliases)
    functions = {
        gv: redirect.visit_expr(f) if isinstance(f, relax.Function) else f
        for gv, f in mod.functions.items()
        if gv.name_hint not in aliases
    }
    out = with_functions(mod, functions)
    return out, {name: gv.name_hint for name, gv in aliases.items()}


@mutator
class Redirect(PyExprMutator):
    """Points calls at other functions, given by the name of the old one."""

    def __init__(self, aliases: Mapping[str, ir.GlobalVar]) -> None:
        super().__init__()
        self.aliases = aliases

    def visit_global_var_(self, op: ir.GlobalVar) -> ir.GlobalVar:
        """Replace one function."""
        return self.aliases.get(op.name_hint, op)
