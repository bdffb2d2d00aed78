"""Converters of ATen operators that choose, move or join elements, where TVM 0.27's differ.

TVM takes an index from the end for one from the start, and reads outside of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import fx

from ..compat import ir, relax
from .torch_arguments import (
    Arguments,
    Converter,
    Importer,
    in_dtype,
    result_dtype,
    static_dims,
)


def _as_strided(importer: Importer, node: fx.Node) -> ir.Expr:
    """Elements of a contiguous tensor by the offsets that sizes and strides name."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    fake = arguments.fake("self")
    if not fake.is_contiguous() or fake.storage_offset() != 0:
        raise NotImplementedError("as_strided of a tensor that is a view itself")
    size, stride = arguments["size"], arguments["stride"]
    static_dims(fake)
    offsets = np.full(size, arguments["storage_offset"] or 0, "int64")
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        along = [1] * len(size)
        along[axis] = extent
        offsets = offsets + (np.arange(extent) * step).reshape(along)
    flat = builder.emit(relax.op.reshape(arguments["self"], [fake.numel()]))
    if offsets.size == fake.numel() and (offsets.ravel() == np.arange(fake.numel())).all():
        return builder.emit(relax.op.reshape(flat, size))
    taken = builder.emit(relax.op.take(flat, relax.const(offsets.ravel()), axis=0))
    return builder.emit(relax.op.reshape(taken, size))


def _unfold(importer: Importer, node: fx.Node) -> ir.Expr:
    """Windows of ``size`` elements, ``step`` apart, along an axis; the elements of a window become the last axis."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    sizes = static_dims(arguments.fake("self"))
    axis, size, step = arguments["dimension"], arguments["size"], arguments["step"]
    if not sizes:
        return builder.emit(relax.op.reshape(arguments["self"], [size]))
    axis %= len(sizes)
    starts = np.arange(0, sizes[axis] - size + 1, step)
    places = relax.const(starts[:, None] + np.arange(size)[None, :])
    windows = builder.emit(relax.op.take(arguments["self"], places, axis=axis))
    order = [*range(axis + 1), *range(axis + 2, len(sizes) + 1), axis + 1]
    return builder.emit(relax.op.permute_dims(windows, order))


def _select(importer: Importer, node: fx.Node) -> ir.Expr:
    """One element along an axis, counted from the end where the index is negative: a slice whose axis goes."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    index = arguments["index"]
    if not isinstance(index, int):
        raise NotImplementedError("its index is computed; give the model static shapes")
    axis = arguments["dim"] % len(arguments.fake("self").shape)
    if index < 0:
        index += static_dims(arguments.fake("self"))[axis]
    part = relax.op.strided_slice(arguments["self"], axes=[axis], begin=[index], end=[index + 1])
    return builder.emit(relax.op.squeeze(builder.emit(part), [axis]))


def places_of(
    importer: Importer, value: ir.Expr, sizes: list[int], indices: Sequence[ir.Expr | None]
) -> tuple[ir.Expr, list[int], int, ir.Expr]:
    """What ``x[i, :, j]`` names, along one axis: neighbouring indexed axes become one, others are brought to the front.

    Parameters
    ----------
    importer : Importer
        Where operators are emitted.
    value : Expr
        The tensor x.
    sizes : list of int
        Its sizes.
    indices : sequence of Expr or None
        One for each of its first axes; None takes the whole axis.

    Returns
    -------
    value, sizes, first, places : Expr, list of int, int, Expr
        The tensor and its sizes with the indexed axes brought together, which of them is the first, and the int64
        places (from the start, of the indices' common shape) in the axis that these would make as one.
    """
    emit, op, builder = importer.block_builder.emit, relax.op, importer.block_builder
    indexed = [axis for axis, index in enumerate(indices) if index is not None]
    first = indexed[0]
    if indexed != list(range(first, first + len(indexed))):
        order = front_first(indexed, len(sizes))
        value = emit(op.permute_dims(value, order))
        sizes, first = [sizes[axis] for axis in order], 0
    places = None
    for axis, source in enumerate(indexed, first):
        size = relax.const(sizes[axis], "int64")
        index = in_dtype(builder, indices[source], "int64")
        negative = emit(op.less(index, relax.const(0, "int64")))
        index = emit(op.where(negative, emit(op.add(index, size)), index))
        if places is not None:
            index = emit(op.add(emit(op.multiply(places, size)), index))
        places = index
    return value, sizes, first, places


def front_first(axes: Sequence[int], rank: int) -> list[int]:
    """Return the order that brings some axes to the front."""
    return [*axes, *(axis for axis in range(rank) if axis not in axes)]


def _index(importer: Importer, node: fx.Node) -> ir.Expr:
    """``x[i, :, j]``: one ``take`` along the indexed axes made one, by places counted from the start.

    As in NumPy, the places' axes stand where the indexed axes were if those are neighbours, and else in front.
    """
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    sizes, indices = static_dims(arguments.fake("self")), arguments["indices"]
    if any(fake is not None and fake.dtype is torch.bool for fake in arguments.fake("indices")):
        raise NotImplementedError("an index by truth values has as many results as are true")
    value, sizes, first, places = places_of(importer, arguments["self"], sizes, indices)
    count = sum(index is not None for index in indices)
    if count > 1:
        merged = math.prod(sizes[first : first + count])
        value = builder.emit(
            relax.op.reshape(value, [*sizes[:first], merged, *sizes[first + count :]])
        )
    return builder.emit(relax.op.take(value, places, axis=first))


def _concatenate(importer: Importer, node: fx.Node) -> ir.Expr:
    """``cat`` in the promoted type; empty parts, which ATen lets have any rank (an empty cache), are left out."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    dtype = result_dtype(node)
    parts = [
        in_dtype(builder, part, dtype)
        for part, fake in zip(arguments["tensors"], arguments.fake("tensors"), strict=True)
        if 0 not in fake.shape
    ]
    if not parts:
        return builder.emit(relax.op.zeros(static_dims(node.meta["val"]), dtype))
    if len(parts) == 1:
        return parts[0]
    return builder.emit(relax.op.concat(parts, axis=arguments["dim"]))


#: Converters by the name of the ATen overload.
VIEWS: dict[str, Converter] = {
    "as_strided.default": _as_strided,
    "cat.default": _concatenate,
    "index.Tensor": _index,
    "select.int": _select,
    "unfold.default": _unfold,
}
