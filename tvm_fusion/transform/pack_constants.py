"""Constants in the layout that the kernels which read them ask for."""

from __future__ import annotations

import numpy as np

from ..compat import Constant, ir, relax, tvm, with_functions
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
                args = [value.args[0], relax.Tuple(fields), *value.args[2:]]
                value = relax.Call(value.op, args, value.attrs, value.ty_args)
        bindings.append(relax.VarBinding(binding.var, value))
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], main.body.body)
    out = with_functions(mod)
    new_main = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    out.update_func(out.get_global_var("main"), new_main)
    for name in wanted:
        out.update_func(out.get_global_var(name), mod[name].without_attr(PACKED))
    return relax.transform.Normalize()(out)
