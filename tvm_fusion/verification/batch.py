"""Several small modules in one: each compiler run has a cost of its own, for CUDA seconds."""

from __future__ import annotations

from collections.abc import Mapping

from ..compat import ir, relax, tvm, update_type
from ..transform.lower_groups import Redirect, share_equal_kernels


def join_modules(modules: Mapping[str, tvm.IRModule]) -> tvm.IRModule:
    """Put the ``main`` functions of lowered modules side by side.

    Parameters
    ----------
    modules : mapping of str to tvm.IRModule
        Modules of one Relax function ``main`` and PrimFuncs, by the name that ``main`` gets.

    Returns
    -------
    tvm.IRModule
        One module; equal PrimFuncs are there once.
    """
    functions = {}
    for name, mod in modules.items():
        renamed = {
            gv.name_hint: _renamed(gv, f"{name}_{gv.name_hint}")
            for gv, func in mod.functions.items()
            if not isinstance(func, relax.Function)
        }
        redirect = Redirect(renamed)
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function):
                main = redirect.visit_expr(func).with_attr("global_symbol", name)
                functions[ir.GlobalVar(name)] = main
            else:
                functions[renamed[gv.name_hint]] = func
    joined, _ = share_equal_kernels(tvm.IRModule(functions))
    return joined


def _renamed(gv: ir.GlobalVar, name: str) -> ir.GlobalVar:
    """The same function under another name, with its type, which calls of it need."""
    out = ir.GlobalVar(name)
    update_type(out, gv.ty)
    return out
