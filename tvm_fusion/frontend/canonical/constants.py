"""Relax constants as numpy arrays and back, exact and without needless copies."""

from __future__ import annotations

import numpy as np

from ...compat import ir, relax, tvm
from ...errors import InvalidModelError

#: Bytes that folding may create in one constant. Weights that a file stores are bounded by the
#: file; a constant that is *computed* (ConstantOfShape, Expand, Tile) is bounded by nothing else.
MAX_FOLDED_BYTES = 4 << 30

_TILE = 256


def is_constant(expr: ir.Expr) -> bool:
    """Return whether ``expr`` is a tensor constant (scalars included)."""
    return isinstance(expr, ir.GenericConst) and isinstance(expr.ty, relax.TensorType)


def to_numpy(const: ir.GenericConst) -> np.ndarray:
    """Return the value of ``const``; a read-only view of TVM's own memory where numpy has the dtype."""
    tensor = const.value
    if str(tensor.dtype).startswith(("bfloat", "float8", "float4")):
        array = tensor.numpy()  # numpy reads no DLPack of these dtypes
    else:
        array = np.from_dlpack(tensor)
    array.flags.writeable = False
    return array


def to_constant(
    array: np.ndarray, dtype: str | None = None, *, saturate: bool = False
) -> ir.GenericConst:
    """Return a Relax constant that holds ``array``, cast to ``dtype`` if given (see ``cast``).

    Raises
    ------
    InvalidModelError
        If the constant would take more than ``MAX_FOLDED_BYTES``.
    """
    dtype = dtype or str(array.dtype)
    check_size(array.shape, np_dtype(dtype).itemsize)
    if dtype.startswith(("bfloat", "float8", "float4")):
        return relax.const(tvm.runtime.tensor(cast(array, dtype, saturate=saturate)))
    tensor = tvm.runtime.empty(array.shape, dtype)
    # One pass into TVM's aligned memory; relax.const(numpy) would copy twice.
    if array.size:
        _copy(np.from_dlpack(tensor), cast(array, dtype, saturate=saturate))
    return relax.const(tensor)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy; a large transposed matrix tile by tile, which stays in the cache and takes half the time."""
    if source.ndim != 2 or source.flags.c_contiguous or source.size < 1 << 20:
        target[...] = source
        return
    for row in range(0, source.shape[0], _TILE):
        for column in range(0, source.shape[1], _TILE):
            tile = np.s_[row : row + _TILE, column : column + _TILE]
            target[tile] = source[tile]


def check_size(shape: tuple[int, ...], itemsize: int) -> None:
    """Raise InvalidModelError when a constant of this shape is over ``MAX_FOLDED_BYTES``."""
    size = itemsize
    for dim in shape:
        size *= int(dim)  # Python integers: a mutated file can ask for more than 2**63 bytes
    if size > MAX_FOLDED_BYTES:
        raise InvalidModelError(
            f"the model computes a constant of shape {tuple(int(d) for d in shape)}, which takes {size} bytes "
            f"(limit {MAX_FOLDED_BYTES}); store it as an initializer or correct its shape"
        )


def np_dtype(dtype: str) -> np.dtype:
    """Return the numpy dtype of a TVM dtype name, bfloat16 and float8 included."""
    if dtype.startswith(("bfloat", "float8", "float4")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(dtype)


def cast(array: np.ndarray, dtype: str, *, saturate: bool = False) -> np.ndarray:
    """Cast to a TVM dtype, rounding once.

    With ``saturate``, finite floats out of range become the largest finite value instead of
    infinity: attention masks come as -1e9 or -3.4e38, and as float16 infinities they would turn
    softmax into NaN. A single number that is not 0 stays so, as the smallest of its sign: an epsilon
    keeps quotients and logarithms finite.
    """
    target = np_dtype(dtype)
    if array.dtype == target:
        return array
    if saturate and array.size and is_float(dtype) and is_float(str(array.dtype)):
        limit = _finite_max(dtype)
        low, high = float(array.min()), float(array.max())
        if not (low >= -limit and high <= limit):  # NaN comes here too
            array = np.where(np.isfinite(array), np.clip(array, -limit, limit), array)
    with np.errstate(over="ignore", under="ignore"):
        result = array.astype(target)
        if saturate and result.size == 1 and not result.any() and array.any():
            return np.nextafter(result, np.sign(array).astype(target))
        return result


def is_float(dtype: str) -> bool:
    """Return whether ``dtype`` is a floating type (bfloat16 and float8 included)."""
    return dtype.startswith(("float", "bfloat"))


def widen(array: np.ndarray) -> np.ndarray:
    """Return ``array`` in float64 when it is floating, else unchanged: folding computes in float64."""
    return array.astype(np.float64) if is_float(str(array.dtype)) else array


def _finite_max(dtype: str) -> float:
    if dtype.startswith(("bfloat", "float8", "float4")):
        import ml_dtypes

        return float(ml_dtypes.finfo(np_dtype(dtype)).max)
    return float(np.finfo(dtype).max)
