"""Lookups and updates at places that a tensor holds stay inside of the buffer.

Which element is read or written is known at run time only, and TVM's code trusts the number: a token behind the end of
an embedding reads foreign memory or ends the process, where NumPy, PyTorch and ONNX say that it is an error. A kernel
cannot raise one. Here such a place is moved to the first or last element of its axis, which changes nothing for places
that are inside.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm_ffi

from ..compat import BlockBuilder, ir, relax, tirx
from ..schedules.analysis import nodes_of

#: Operators whose places come from a tensor, besides ``take``, which has a mode for it.
_LOOKUPS = (
    "relax.gather_elements",
    "relax.gather_nd",
    "relax.index_put",
    "relax.index_tensor",
    "relax.scatter_elements",
    "relax.scatter_nd",
)


def inside(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Bound every index that is read from a buffer.

    Parameters
    ----------
    func : PrimFunc
        A function in block form, or one that is written out.

    Returns
    -------
    PrimFunc
        The function, each such index between 0 and its axis' extent less one.
    """

    def bounded(index: tirx.PrimExpr, extent: tirx.PrimExpr) -> tirx.PrimExpr:
        if isinstance(index, tirx.Ramp) or not nodes_of(index, ir.TensorLoad):
            return index
        dtype = str(index.ty.dtype)
        last = tirx.Cast(dtype, extent) if str(extent.ty.dtype) != dtype else extent
        if isinstance(extent, tirx.IntImm):
            last = tirx.const(int(extent), dtype)
        return tirx.max(tirx.min(index, last - tirx.const(1, dtype)), tirx.const(0, dtype))

    def load(node: ir.TensorLoad) -> ir.TensorLoad:
        indices = [bounded(*pair) for pair in zip(node.indices, node.source.shape, strict=True)]
        return tirx.BufferLoad(node.source, indices)

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        indices = [bounded(*pair) for pair in zip(node.indices, node.buffer.shape, strict=True)]
        return tirx.BufferStore(node.buffer, node.value, indices)

    rules = [(ir.TensorLoad, load), (tirx.BufferStore, store)]
    return func.with_body(tvm_ffi.structural_map(func.body, rules, order="post"))


def _bounded(name: str) -> Callable[[BlockBuilder, ir.Call], relax.Expr]:
    default = ir.Op.get(name).get_attr("FLegalize")

    def legalize_call(builder: BlockBuilder, call: ir.Call) -> relax.Expr:
        result = default(builder, call)
        if isinstance(result, ir.Call) and result.op == ir.Op.get("relax.call_tir"):
            place = result.args[0]
            builder.update_func(place, inside(builder.get()[place]))
        return result

    return legalize_call


def _take(builder: BlockBuilder, call: ir.Call) -> relax.Expr:
    """TVM's legalisation of ``take``; in the mode that does not look, in that which stays inside."""
    if call.attrs.mode == "fast":
        call = builder.normalize(relax.op.take(*call.args, call.attrs.axis, mode="clip"))
    return ir.Op.get("relax.take").get_attr("FLegalize")(builder, call)


#: Legalisation functions by operator name, for ``relax.transform.LegalizeOps``.
LOOKUPS = {"relax.take": _take, **{name: _bounded(name) for name in _LOOKUPS}}
