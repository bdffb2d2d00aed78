"""Rewriting of calls in lowered functions for the CPU, which several passes do."""

from __future__ import annotations

from collections.abc import Callable

import tvm_ffi

from ..compat import ir, tirx, tvm


def rewrite_calls(mod: tvm.IRModule, rewrite: Callable[[ir.Call], tirx.PrimExpr]) -> tvm.IRModule:
    """Replace each call in the functions of a module whose target is llvm.

    Parameters
    ----------
    mod : IRModule
        Lowered functions with targets; changed in place.
    rewrite : callable
        Gives what takes a call's place, or the call itself.

    Returns
    -------
    IRModule
        The same module.
    """
    for gv, func in mod.functions_items():
        target = func.attrs.get("target") if func.attrs is not None else None
        if not isinstance(func, tirx.PrimFunc) or target is None or target.kind.name != "llvm":
            continue
        body = tvm_ffi.structural_map(func.body, [(ir.Call, rewrite)])
        if not body.same_as(func.body):
            mod.update_func(gv, func.with_body(body))
    return mod
