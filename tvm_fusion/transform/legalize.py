"""LegalizeOps with sums that accumulate in float32.

TVM's own legalisation adds float16 and bfloat16 values in their own type: a float16 mean over 7x7
can be infinite, and a convolution over 4608 products loses its low bits. Here every reduction on
such types accumulates in float32 and is rounded once, at its end, and so is what TVM has no
bfloat16 code for. Operators on float32 and on integers keep TVM's legalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..compat import BlockBuilder, ir, relax, te, tirx, topi, tvm
from .infinite_identities import infinite_identities
from .legalize_lookups import LOOKUPS
from .legalize_places import PLACES

#: Types whose sums accumulate in float32.
NARROW_TYPES: tuple[str, ...] = ("float16", "bfloat16")

#: Anchors that multiply their operands: those stay narrow, for tensor cores and for memory traffic.
_PRODUCTS: tuple[str, ...] = (
    "relax.matmul",
    "relax.nn.conv1d",
    "relax.nn.conv2d",
    "relax.nn.conv3d",
    "relax.nn.conv1d_transpose",
    "relax.nn.conv2d_transpose",
    "relax.nn.conv3d_transpose",
)

#: Reductions, and samples between elements, that are computed wholly in float32, their operands widened first.
_REDUCTIONS: tuple[str, ...] = (
    "relax.einsum",
    "relax.image.grid_sample",
    "relax.mean",
    "relax.nn.adaptive_avg_pool1d",
    "relax.nn.adaptive_avg_pool2d",
    "relax.nn.adaptive_avg_pool3d",
    "relax.nn.attention",
    "relax.nn.attention_bias",
    "relax.nn.avg_pool1d",
    "relax.nn.avg_pool2d",
    "relax.nn.avg_pool3d",
    "relax.nn.batch_norm",
    "relax.nn.cross_entropy_with_logits",
    "relax.nn.group_norm",
    "relax.nn.instance_norm",
    "relax.nn.layer_norm",
    "relax.nn.log_softmax",
    "relax.nn.rms_norm",
    "relax.nn.softmax",
    "relax.prod",
    "relax.std",
    "relax.sum",
    "relax.variance",
    "relax.vision.roi_align",
)

#: Elementwise operators that TVM has no bfloat16 code for.
_ELEMENTWISE: tuple[str, ...] = (
    "relax.isfinite",
    "relax.isinf",
    "relax.isnan",
    "relax.mod",
    "relax.power",
)

LegalizeFunction = Callable[[BlockBuilder, ir.Call], relax.Expr]


def legalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Lower every operator to ``call_tir``, with float32 accumulation of float16 and bfloat16.

    Parameters
    ----------
    mod : IRModule
        Any Relax module. It is left untouched.

    Returns
    -------
    IRModule
        The module after TVM's LegalizeOps with ``LEGALIZE_MAP``; ``Primitive`` functions are
        entered too. Maxima and minima start from infinity.
    """
    return infinite_identities(relax.transform.LegalizeOps(LEGALIZE_MAP)(mod))


class _RoundingBuilder:
    """A BlockBuilder whose ``call_te`` widens the operands, or not, and rounds the results.

    Handing it to TVM's own legalisation keeps that one definition of each operator.
    """

    def __init__(self, builder: BlockBuilder, result_types: Sequence[str], widen: bool) -> None:
        self._builder = builder
        self._result_types = result_types
        self._widen = widen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def call_te(
        self, func: Callable, *args: Any, primfunc_name_hint: str | None = None, **kwargs: Any
    ) -> relax.Expr:
        """Emit ``func`` with its operands widened and its results rounded."""

        def rounded(*operands: Any, **options: Any) -> Any:
            if self._widen:
                operands = [_widened(operand) for operand in operands]
                options = {key: _widened(value) for key, value in options.items()}
            results = func(*operands, **options)
            if isinstance(results, te.Tensor):
                return _as_type(results, self._result_types[0])
            return [
                _as_type(result, dtype)
                for result, dtype in zip(results, self._result_types, strict=True)
            ]

        name = primfunc_name_hint or func.__name__
        return self._builder.call_te(rounded, *args, primfunc_name_hint=name, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, te.Tensor) and str(value.dtype) in NARROW_TYPES:
        return topi.cast(value, "float32")
    if isinstance(value, (list, tuple)) and any(isinstance(item, te.Tensor) for item in value):
        return [_widened(item) for item in value]
    return value


def _as_type(tensor: te.Tensor, dtype: str) -> te.Tensor:
    return tensor if str(tensor.dtype) == dtype else topi.cast(tensor, dtype)


def _tensor_types(ty: ir.Type) -> list[str]:
    """Return the dtypes of a tensor type or, in order, of a tuple of tensors."""
    if isinstance(ty, relax.TensorType):
        return [str(ty.dtype)]
    return (
        [dtype for field in ty.fields for dtype in _tensor_types(field)]
        if isinstance(ty, ir.TupleType)
        else []
    )


def _in_float32(name: str) -> LegalizeFunction:
    """Return TVM's legalisation of the operator ``name``, changed for narrow operands only."""
    default = ir.Op.get(name).get_attr("FLegalize")

    def legalize_call(builder: BlockBuilder, call: ir.Call) -> relax.Expr:
        if not any(dtype in NARROW_TYPES for arg in call.args for dtype in _tensor_types(arg.ty)):
            return default(builder, call)
        results = _tensor_types(call.ty)
        if name == "relax.matmul":
            return builder.call_te(
                _matmul(call.ty.shape, results[0]), *call.args, primfunc_name_hint="matmul"
            )
        if name in _PRODUCTS:
            wide = builder.normalize(_with_result_type(call, "float32"))
            return default(_RoundingBuilder(builder, results, widen=False), wide)
        return default(_RoundingBuilder(builder, results, widen=True), call)

    return legalize_call


def _matmul(shape: Sequence[tirx.Expr], dtype: str) -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    """Return a numpy-style matrix product that accumulates in float32.

    TVM's own definition asks the builder for the result shape, which a wrapped builder cannot
    answer.
    """

    def product(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, a.shape[-1]), name="k")
        rows, columns = min(len(a.shape) - 1, 1), min(len(b.shape) - 1, 1)

        def batch(operand: te.Tensor, index: Sequence[tirx.Expr]) -> list[tirx.Expr]:
            lead = operand.shape[: max(len(operand.shape) - 2, 0)]
            aligned = index[len(index) - rows - columns - len(lead) : len(index) - rows - columns]
            return [0 if _is_one(extent) else i for extent, i in zip(lead, aligned, strict=True)]

        def element(*index: tirx.Expr) -> tirx.Expr:
            row = [index[len(index) - columns - 1]] if rows else []
            column = [index[-1]] if columns else []
            left = a(*batch(a, index), *row, k).astype("float32")
            return te.sum(left * b(*batch(b, index), k, *column).astype("float32"), axis=k)

        return _as_type(te.compute(tuple(shape), element, name="matmul"), dtype)

    return product


def _is_one(extent: tirx.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def with_fields(node: Any, **changes: Any) -> Any:
    """Return attributes, or another node, with some fields replaced; they are immutable, so all are rebuilt."""
    infos = [cls.__dict__.get("__tvm_ffi_type_info__") for cls in type(node).__mro__]
    names = [field.name for info in infos if info is not None for field in info.fields]
    fields = {name: getattr(node, name) for name in names}
    return ir.make_node(type(node).__tvm_ffi_type_info__.type_key, **{**fields, **changes})


def _with_result_type(call: ir.Call, dtype: str) -> ir.Call:
    attrs = with_fields(call.attrs, out_dtype=dtype)
    return relax.Call(call.op, call.args, attrs, call.ty_args)


#: Legalisation functions by operator name, for ``relax.transform.LegalizeOps``.
LEGALIZE_MAP: dict[str, LegalizeFunction] = {
    **{name: _in_float32(name) for name in _PRODUCTS + _REDUCTIONS + _ELEMENTWISE},
    **LOOKUPS,
    **PLACES,
}
