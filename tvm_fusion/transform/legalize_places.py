"""argmax and argmin whose NaN, infinities and limits of integer types are PyTorch's and NumPy's.

TVM starts from index -1 of the least number of the type, which is the result where all values are that number (zeros of
uint8) or -inf; and a NaN loses or wins by its place. Here places are searched among integers of the same order, above
(or below) which stands NaN, and whose limits no value has: the first NaN wins, then the first infinity. Of integers of
64 bits, which have no wider ones, -1 says that all are alike, so that the first counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat import BlockBuilder, ir, relax, te, tirx, topi
from ..schedules.order_key import order_key

_FLOATS = ("float16", "bfloat16", "float32", "float64")

#: Wider types of integers and truth values.
_WIDER = {
    "bool": "int32", "int8": "int32", "uint8": "int32", "int16": "int32", "uint16": "int32", "int32": "int64",
    "uint32": "int64",
}  # fmt: skip


def _place_of_extreme(name: str) -> Callable[[BlockBuilder, ir.Call], relax.Expr]:
    """Return a legalisation of an operator.

    Parameters
    ----------
    name : str
        ``"relax.argmax"`` or ``"relax.argmin"``.
    """
    largest = name == "relax.argmax"
    function = topi.argmax if largest else topi.argmin

    def key(value: tirx.PrimExpr) -> tirx.PrimExpr:
        dtype = str(value.ty.dtype)
        return tirx.Cast(_WIDER[dtype], value) if dtype in _WIDER else order_key(value, largest)

    def place(x: te.Tensor, axis: Any, keepdims: bool) -> te.Tensor:
        if str(x.dtype) in (*_WIDER, *_FLOATS):
            return function(
                te.compute(x.shape, lambda *i: key(x(*i)), name="ordered"), axis, keepdims
            )
        found = function(x, axis, keepdims)
        return topi.maximum(found, tirx.const(0, found.dtype))

    def legalize_call(builder: BlockBuilder, call: ir.Call) -> relax.Expr:
        attrs = call.attrs
        hint = name.removeprefix("relax.")
        return builder.call_te(
            place, call.args[0], attrs.axis, attrs.keepdims, primfunc_name_hint=hint
        )

    return legalize_call


#: Legalisation functions by operator name, for ``relax.transform.LegalizeOps``.
PLACES = {name: _place_of_extreme(name) for name in ("relax.argmax", "relax.argmin")}
