"""argmax and argmin whose NaN and infinities are PyTorch's and NumPy's.

TVM starts from index -1 of the least finite number, which is the result where all values are -inf; and a NaN loses or
wins by its place. Here places are searched among integers of the same order, above (or below) which stands NaN: the
first NaN wins, then the first infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat import BlockBuilder, ir, relax, te, topi
from ..schedules.order_key import order_key

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _place_of_extreme(name: str) -> Callable[[BlockBuilder, ir.Call], relax.Expr]:
    """Return a legalisation of an operator.

    Parameters
    ----------
    name : str
        ``"relax.argmax"`` or ``"relax.argmin"``.
    """
    default = ir.Op.get(name).get_attr("FLegalize")
    largest = name == "relax.argmax"
    function = topi.argmax if largest else topi.argmin

    def place(x: te.Tensor, axis: Any, keepdims: bool) -> te.Tensor:
        keys = te.compute(x.shape, lambda *i: order_key(x(*i), nan_last=largest), name="ordered")
        return function(keys, axis, keepdims)

    def legalize_call(builder: BlockBuilder, call: ir.Call) -> relax.Expr:
        if str(call.args[0].ty.dtype) not in _FLOATS:
            return default(builder, call)
        attrs = call.attrs
        hint = name.removeprefix("relax.")
        return builder.call_te(
            place, call.args[0], attrs.axis, attrs.keepdims, primfunc_name_hint=hint
        )

    return legalize_call


#: Legalisation functions by operator name, for ``relax.transform.LegalizeOps``.
PLACES = {name: _place_of_extreme(name) for name in ("relax.argmax", "relax.argmin")}
