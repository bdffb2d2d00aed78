"""Constants in the layout that the kernels which read them ask for."""

from __future__ import annotations

import numpy as np

from ..compat import Constant, ir, relax, tirx, tvm, update_type, with_functions
from ..schedules.base import PACKED


def pack_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Permute the constants of ``main`` that kernels want permuted (``schedules.base.PACKED``).

    Parameters
    ----------
    mod : tvm.IRModule
        Module whose kernels are scheduled. A kernel's attribute is taken off when it was obeyed, so that the pass can
        run again.
    """
    wanted = {
        gv.name_hint: {int(n): [int(a) for a in axes] for n, axes in func.attrs[PACKED].items()}
        for gv, func in mod.functions_items()
        if func.attrs is not None and PACKED in func.attrs
    }
    if not wanted:
        return mod
    renewed = {name: _renewed(mod[name], name) for name in wanted}
    made: dict[tuple, Constant] = {}

    def permuted(constant: Constant, axes: list[int]) -> Constant:
        key = (constant.__chandle__(), *axes)
        if key not in made:
            array = np.ascontiguousarray(np.transpose(constant.value.numpy(), axes))
            made[key] = relax.const(array, str(constant.ty.dtype))
        return made[key]

    main = mod["main"]
    bindings = []
    for binding in main.body.blocks[0].bindings:
        value = binding.value
        if isinstance(value, relax.Call) and value.op == ir.Op.get("relax.call_tir"):
            axes_of = wanted.get(value.args[0].name_hint, {})
            fields = [
                permuted(arg, axes_of[number]) if number in axes_of else arg
                for number, arg in enumerate(value.args[1].fields)
            ]
            if axes_of:
                callee = renewed[value.args[0].name_hint][0]
                args = [callee, relax.Tuple(fields), *value.args[2:]]
                value = relax.Call(value.op, args, value.attrs, value.ty_args)
        bindings.append(relax.VarBinding(binding.var, value))
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], main.body.body)
    new_main = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    functions = {gv: f for gv, f in mod.functions.items() if gv.name_hint not in wanted}
    functions[mod.get_global_var("main")] = new_main
    return relax.transform.Normalize()(with_functions(mod, functions | dict(renewed.values())))


def _renewed(func: tirx.PrimFunc, name: str) -> tuple[ir.GlobalVar, tirx.PrimFunc]:
    """The function without the attribute, and a name for it that has its own type: shapes changed."""
    var, func = ir.GlobalVar(name), func.without_attr(PACKED)
    update_type(var, func.ty)
    return var, func
