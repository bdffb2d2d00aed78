"""Evaluate operators on constants with numpy; broadcast results stay views until something needs them whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...compat import ir, relax, tirx, tvm
from .compact_constants import compact_operands
from .constants import (
    cast,
    check_size,
    is_constant,
    is_float,
    np_dtype,
    to_constant,
    to_numpy,
    widen,
)
from .elementwise import BINARY, UNARY
from .remove_no_ops import permutation
from .rewrite import BindingRewriter, dims, dtype_of, op_name, static_shape, substitute, variables

#: Of their first operand they take the shape only.
_LIKE = ("full_like", "zeros_like", "ones_like")

_INEXACT = {"divide", "power"}  # integer division and powers round differently in numpy

#: Of integers and truth values the same in numpy, the least integer of a type included.
_EXACT = frozenset(("abs", "negative", "logical_not", "bitwise_not"))


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.FoldConstants")
class FoldConstants:
    """Replace operators whose operands are all constants by their value.

    Floating arithmetic is done in float64 and rounded once. A constant that is a broadcast of a
    smaller one is not materialised when its consumer is an elementwise operator that broadcasts by
    itself: it gets the small constant. Constants of more than 4 GiB raise ``InvalidModelError``.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def __init__(self) -> None:
        super().__init__()
        self._arrays: dict[
            relax.Var, np.ndarray
        ] = {}  # folded values, by the placeholder that stands for them
        self._constants: dict[relax.Var, ir.GenericConst] = {}

    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        folded = self._evaluate(name, value) if isinstance(value, ir.Call) else None
        if folded is not None:
            return folded
        lazy = [var for var in variables(value) if var in self._arrays]
        if not lazy:
            return value
        # Of a shape that is not known nothing says how far an operand is repeated.
        if op_name(value) in BINARY and dims(self.typed(value)) is not None:
            return compact_operands(self.typed(value), self.array)
        return substitute(value, {var: self._constant(var) for var in lazy})

    def visit_output(self, output: ir.Expr) -> ir.Expr:
        return self._constant(output) if output in self._arrays else output

    def array(self, expr: ir.Expr) -> np.ndarray | None:
        """Return the value of a constant or of a folded placeholder, else None."""
        if isinstance(expr, relax.Var):
            return self._arrays.get(expr)
        return to_numpy(expr) if is_constant(expr) else None

    def _constant(self, var: relax.Var) -> ir.GenericConst:
        if var not in self._constants:
            self._constants[var] = to_constant(self._arrays[var])
        return self._constants[var]

    def _evaluate(self, name: str, call: ir.Call) -> ir.Expr | None:
        op = op_name(call)
        rule = _RULES.get(op or "")
        if rule is None:
            return None
        operands = []
        for arg in call.args[1:] if op in _LIKE else call.args:
            fields = arg.fields if isinstance(arg, relax.Tuple) else [arg]
            arrays = [self.array(field) for field in fields]
            if isinstance(arg, relax.ShapeExpr) or not all(
                isinstance(f.ty, relax.TensorType) for f in fields
            ):
                continue  # shapes and integers: the rule reads them from the type
            if any(array is None for array in arrays):
                return None
            operands += arrays
        typed = self.typed(call)
        is_tuple = isinstance(typed.ty, ir.TupleType)
        results = list(typed.ty.fields) if is_tuple else [typed.ty]
        if any(static_shape(relax.Var("t", ty)) is None for ty in results):
            return None
        arrays = rule(typed, operands)
        if arrays is None:
            return None
        placeholders = [
            self._placeholder(name, a, ty) for a, ty in zip(arrays, results, strict=True)
        ]
        return relax.Tuple(placeholders) if is_tuple else placeholders[0]

    def _placeholder(self, name: str, array: np.ndarray, ty: relax.TensorType) -> relax.Var:
        var = relax.DataflowVar(name, ty)
        self._arrays[var] = (
            array if array.dtype == np_dtype(str(ty.dtype)) else cast(array, str(ty.dtype))
        )
        return var


def _shape(call: ir.Call) -> tuple[int, ...]:
    shape = static_shape(call)
    assert shape is not None
    return shape


def _binary(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    op = op_name(call)
    if not is_float(str(operands[0].dtype)) and op in _INEXACT:
        return None
    check_size(_shape(call), 8)
    with np.errstate(all="ignore"):
        return [BINARY[op](*(widen(array) for array in operands))]


def _unary(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    if not is_float(str(operands[0].dtype)):
        # Integers as they are: as wide floats those of 64 bits would lose digits.
        return [UNARY[op_name(call)](operands[0])] if op_name(call) in _EXACT else None
    with np.errstate(all="ignore"):
        return [UNARY[op_name(call)](widen(operands[0]))]


def _reshape(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray]:
    shape, array = _shape(call), operands[0]
    if array.size and not any(array.strides[i] for i in range(array.ndim) if array.shape[i] > 1):
        return [np.broadcast_to(array.flat[0], shape)]  # one repeated value: stays a view
    check_size(shape, array.dtype.itemsize)
    return [array.reshape(shape)]


def _broadcast(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray]:
    return [np.broadcast_to(operands[0], _shape(call))]


def _permute(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray]:
    return [np.transpose(operands[0], permutation(call))]


def _cast(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    if dtype_of(call) == "bool":
        return [operands[0] != 0]
    if is_float(str(operands[0].dtype)) and not is_float(dtype_of(call)):
        return None  # out-of-range floats are undefined as integers
    return [operands[0]]


def _concat(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray]:
    check_size(_shape(call), operands[0].dtype.itemsize)
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    return [np.concatenate(operands, axis=axis)]


def _stack(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray]:
    check_size(_shape(call), operands[0].dtype.itemsize)
    return [np.stack(operands, axis=0 if call.attrs.axis is None else int(call.attrs.axis))]


def _split(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray]:
    axis, begin, out = int(call.attrs.axis), 0, []
    axis %= operands[0].ndim
    for field in call.ty.fields:
        size = int(field.shape.values[axis])
        out.append(operands[0][(slice(None),) * axis + (slice(begin, begin + size),)])
        begin += size
    return out


def _full(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray]:
    value = operands[0] if operands else int((op_name(call) or "").startswith("ones"))
    return [np.broadcast_to(np.asarray(value, np_dtype(dtype_of(call))), _shape(call))]


def _arange(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    numbers = [_integer(arg) for arg in call.args]
    if None in numbers or is_float(dtype_of(call)):
        return None
    check_size(_shape(call), 8)
    return [np.arange(*numbers)]


def _slice(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    numbers = [[_integer(v) for v in getattr(arg, "fields", [])] for arg in call.args[1:]]
    if any(v is None for values in numbers for v in values):
        return None
    axes, begins, ends, *rest = numbers
    strides = rest[0] if rest and rest[0] else [1] * len(axes)
    if any(stride <= 0 for stride in strides):
        return None
    index = [slice(None)] * operands[0].ndim
    for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True):
        index[axis] = slice(begin, end, stride)
    out = operands[0][tuple(index)]
    return [out] if out.shape == _shape(call) else None


def _where(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray]:
    check_size(_shape(call), operands[1].dtype.itemsize)
    return [np.where(*operands)]


def _scan(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    """``cumsum``: of integers and truth values; sums of floating-point numbers depend on their order."""
    array, attrs = operands[0], call.attrs
    if is_float(str(array.dtype)) or not dtype_of(call).startswith("int") or attrs.exclusive:
        return None
    check_size(_shape(call), np_dtype(dtype_of(call)).itemsize)
    axis = None if attrs.axis is None else int(attrs.axis)
    return [np.cumsum(array, axis=axis, dtype=dtype_of(call)).reshape(_shape(call))]


def _take(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    table, index = operands
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    size = table.size if axis is None else table.shape[axis]
    if index.size and (index.min() < 0 or index.max() >= size):
        return None
    check_size(_shape(call), table.dtype.itemsize)
    return [np.take(table, index, axis=axis)]


def _gather_elements(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    table, index = operands
    axis = int(call.attrs.axis) % table.ndim
    rest = [n for i, n in enumerate(table.shape) if i != axis]
    if [n for i, n in enumerate(index.shape) if i != axis] != rest:
        return None
    if index.size and (index.min() < 0 or index.max() >= table.shape[axis]):
        return None
    return [np.take_along_axis(table, index, axis=axis)]


def _shape_to_tensor(call: ir.Call, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    """Extents that are known, as numbers: ONNX's importer counts negative indices with them."""
    numbers = [_integer(v) for v in getattr(call.args[0].ty, "values", None) or [None]]
    return None if None in numbers else [np.array(numbers, "int64")]


def _integer(expr: ir.Expr) -> int | None:
    value = getattr(expr, "value", expr)
    return int(value) if isinstance(value, int | tirx.IntImm) else None


_RULES: dict[str, Callable[[ir.Call, list[np.ndarray]], list[np.ndarray] | None]] = {
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(("reshape", "expand_dims", "squeeze", "flatten"), _reshape),
    **dict.fromkeys(("full", "zeros", "ones", *_LIKE), _full),
    "arange": _arange,
    "broadcast_to": _broadcast,
    "permute_dims": _permute,
    "astype": _cast,
    "concat": _concat,
    "stack": _stack,
    "split": _split,
    "strided_slice": _slice,
    "where": _where,
    "take": _take,
    "gather_elements": _gather_elements,
    "cumsum": _scan,
    "shape_to_tensor": _shape_to_tensor,
}
