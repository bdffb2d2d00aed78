"""Operators that take elements out: slices, gathers, sorting."""

from __future__ import annotations

from ....compat import ir, relax
from ..site import Site
from .registry import operator

#: What stands for "to the end" in strided_slice.
_FAR = 1 << 62


@operator("strided_slice")
def strided_slice(site: Site, x: ir.Expr) -> ir.Expr:
    """Every n-th element between two positions of each axis."""
    shape = site.shape(x)
    begin = site.integers("begin", [], low=-_FAR * 2, high=_FAR * 2)
    end = site.integers("end", [], low=-_FAR * 2, high=_FAR * 2)
    strides = site.integers("strides", [], low=-(1 << 31), high=1 << 31)
    axes = site.integers("axes", None)
    axes = list(range(len(begin))) if axes is None else [site.axis_of(a, len(shape)) for a in axes]
    by_size = site.text("slice_mode", "end", "size", default="end") == "size"
    if len(begin) != len(axes) or len(axes) > len(shape) or len(set(axes)) != len(axes):
        site.damaged(f"it has {len(begin)} positions for {len(axes)} of {len(shape)} axes")
    if by_size:
        strides = []
    end = [*end, *[_FAR] * (len(axes) - len(end))]
    if len(strides) > len(axes) or len(end) > len(axes) or 0 in strides:
        site.damaged(f"it has the ends {end} and strides {strides} for {len(axes)} axes")
    strides = [*strides, *[1] * (len(axes) - len(strides))]
    first, last = [], []
    for axis, start, stop, step in zip(axes, begin, end, strides, strict=True):
        size = shape[axis]
        if by_size:
            stop = size if stop < 0 else (start + size if start < 0 else start) + stop
        lower, upper, _ = slice(start, None if stop == _FAR and step < 0 else stop, step).indices(
            size
        )
        if not range(lower, upper, step):
            site.refuse("it takes nothing, which makes an empty tensor")
        first.append(lower)
        # TVM counts a negative end from the back: one before the first needs a number below -size.
        last.append(upper if upper >= 0 else -size - 1)
    if all(
        (a, b, s) == (0, shape[i], 1) for i, a, b, s in zip(axes, first, last, strides, strict=True)
    ):
        return x
    return site.emit(relax.op.strided_slice(x, axes, first, last, strides))


@operator("slice_like")
def slice_like(site: Site, x: ir.Expr, like: ir.Expr) -> ir.Expr:
    """The first elements of each axis, as many as another tensor has."""
    own, other = site.shape(x), site.shape(like)
    named = site.integers("axes", None)
    if named:
        axes = [site.axis_of(axis, len(own)) for axis in named]
    else:
        axes = list(range(min(len(own), len(other))))
    if any(axis >= len(other) or other[axis] > own[axis] for axis in axes):
        site.damaged(f"{own} has not the elements of {other}")
    cut = [axis for axis in sorted(set(axes)) if other[axis] < own[axis]]
    if not cut:
        return x
    ends = [other[axis] for axis in cut]
    return site.emit(relax.op.strided_slice(x, cut, [0] * len(cut), ends, [1] * len(cut)))


def _check_indices(site: Site, indices: ir.Expr) -> None:
    if "int" not in str(indices.ty.dtype):
        site.damaged(f"its indices are of dtype {indices.ty.dtype}")


@operator("take")
def take(site: Site, x: ir.Expr, indices: ir.Expr) -> ir.Expr:
    """Elements, rows or slices by their index; an index outside is clipped, wrapped, or not allowed."""
    _check_indices(site, indices)
    mode = site.text("mode", "clip", "wrap", "fast", default="clip")
    if site.integer("batch_dims", 0):
        site.refuse("it has batch dimensions: use gather_nd")
    axis = site.integer("axis", None)
    if axis is None:
        x, axis = site.reshape(x, [_count(site, x)]), 0
    axis = site.axis_of(axis, site.rank(x))
    return site.emit(relax.op.take(x, indices, axis, mode=mode))


def _count(site: Site, x: ir.Expr) -> int:
    count = 1
    for extent in site.shape(x):
        count *= extent
    return count


@operator("gather")
def gather(site: Site, x: ir.Expr, indices: ir.Expr) -> ir.Expr:
    """Elements by their index on one axis, all other indices being equal."""
    _check_indices(site, indices)
    axis = site.axis("axis", site.rank(x))
    own, other = site.shape(x), site.shape(indices)
    if len(own) != len(other) or any(
        m > n for i, (n, m) in enumerate(zip(own, other, strict=True)) if i != axis
    ):
        site.damaged(f"indices of shape {other} do not fit {own}")
    return site.emit(relax.op.gather_elements(x, indices, axis))


@operator("gather_nd")
def gather_nd(site: Site, x: ir.Expr, indices: ir.Expr) -> ir.Expr:
    """Elements or slices by tuples of indices, which stand in the first axis."""
    _check_indices(site, indices)
    batch, rank = site.integer("batch_dims", 0, low=0, high=8), site.rank(x)
    if site.rank(indices) < 1 or not 1 <= site.shape(indices)[0] <= rank - batch:
        site.damaged(f"tuples of {site.shape(indices)[:1]} indices do not fit {rank} dimensions")
    if batch:
        site.refuse("it has batch dimensions, which have no counterpart")
    # Relax has the tuples in the last axis, and of int64.
    last = site.permute(indices, [*range(1, site.rank(indices)), 0])
    return site.emit(relax.op.gather_nd(x, site.cast(last, "int64")))


@operator("topk")
def topk(site: Site, x: ir.Expr) -> ir.Expr | tuple[ir.Expr, ir.Expr]:
    """The largest or smallest elements of an axis, their positions, or both."""
    axis = site.axis("axis", site.rank(x), -1)
    count = site.integer("k", 1, high=site.shape(x)[axis])
    count = site.shape(x)[axis] if count < 1 else count
    kind = site.text("ret_type", "both", "values", "indices", default="both")
    result = relax.op.topk(
        x,
        count,
        axis,
        ret_type=kind,
        largest=not site.flag("is_ascend"),
        dtype=_position_dtype(site),
    )
    result = site.emit(result)
    if kind != "both":
        return result
    return site.emit(relax.TupleGetItem(result, 0)), site.emit(relax.TupleGetItem(result, 1))


def _position_dtype(site: Site) -> str:
    dtype = site.dtype("dtype", "int32")
    if dtype in ("int32", "int64"):
        return dtype
    if "int" in dtype or "float" in dtype:
        site.refuse(f"it gives positions as {dtype}: take int32 and cast them")
    return site.text("dtype", "int32", "int64")


@operator("argsort")
def argsort(site: Site, x: ir.Expr) -> ir.Expr:
    """The order that would sort an axis."""
    axis = site.axis("axis", site.rank(x), -1)
    descending = not site.flag("is_ascend", True)
    return site.emit(relax.op.argsort(x, axis, descending, dtype=_position_dtype(site)))


@operator("sort")
def sort(site: Site, x: ir.Expr) -> ir.Expr:
    """The elements of an axis in order."""
    axis = site.axis("axis", site.rank(x), -1)
    return site.emit(relax.op.sort(x, axis, not site.flag("is_ascend", True)))
