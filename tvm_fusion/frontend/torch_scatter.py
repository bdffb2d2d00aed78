"""Converters of ATen operators that write into a copy of a tensor at computed places."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import fx

from ..compat import ir, relax
from .torch_arguments import Arguments, Converter, Importer, in_dtype, result_dtype, static_dims
from .torch_views import front_first, places_of

#: Name of the reduction in Relax and its neutral element.
_SCATTERED = {
    "sum": ("add", 0.0), "prod": ("mul", 1.0), "amax": ("max", -math.inf), "amin": ("min", math.inf),
}  # fmt: skip


def _scatter(importer: Importer, node: fx.Node) -> ir.Expr:
    """``scatter_add`` and ``scatter_reduce``; without the tensor's own values these are neutral where one comes."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    emit, op, x, axis = builder.emit, relax.op, arguments["self"], arguments["dim"]
    index, source, dtype = arguments["index"], arguments["src"], result_dtype(node)
    sizes = static_dims(arguments.fake("index"))
    kind = arguments["reduce"] if "reduce" in arguments else "sum"
    if kind not in _SCATTERED or "float" not in dtype or not sizes:
        raise NotImplementedError(f"scattering of {dtype} by {kind} is not supported")
    if sizes != static_dims(arguments.fake("src")):
        axes = list(range(len(sizes)))
        source = emit(op.strided_slice(source, axes, [0] * len(sizes), sizes))
    reduction, neutral = _SCATTERED[kind]
    if "include_self" in arguments and not arguments["include_self"]:
        start = emit(op.full(sizes, relax.const(neutral, dtype), dtype))
        x = emit(op.scatter_elements(x, index, start, axis, "update"))
    return emit(op.scatter_elements(x, index, source, axis, reduction))


def _index_put(importer: Importer, node: fx.Node) -> ir.Expr:
    """``x[i, :, j] = v`` in a copy of x: elements of the flat tensor are replaced, or added to if it accumulates.

    As in NumPy, the places' axes stand where the indexed axes were if those are neighbours, and else in front.
    """
    emit, op, arguments = importer.block_builder.emit, relax.op, Arguments(importer.env, node)
    x, indices, dtype = arguments["self"], arguments["indices"], result_dtype(node)
    fakes, sizes = arguments.fake("indices"), static_dims(arguments.fake("self"))
    if any(fake is not None and fake.dtype is torch.bool for fake in fakes):
        return _masked_put(importer, node)
    indexed = [axis for axis, index in enumerate(indices) if index is not None]
    _, moved, first, places = places_of(importer, x, sizes, indices)
    apart = indexed[-1] - indexed[0] >= len(indexed)
    order = front_first(indexed, len(sizes)) if apart else list(range(len(sizes)))
    # The flat place of each element of the indexed axes, with those of the other axes before and behind.
    shape = list(torch.broadcast_shapes(*(fake.shape for fake in fakes if fake is not None)))
    before, behind = moved[:first], moved[first + len(indexed) :]
    merged, inner = math.prod(moved[first : first + len(indexed)]), math.prod(behind)
    outer = np.arange(math.prod(before)).reshape([*before, *[1] * (len(shape) + len(behind))])
    rest = outer * (merged * inner) + np.arange(inner).reshape(behind)
    flat = emit(op.multiply(places, relax.const(inner, "int64")))
    flat = emit(op.reshape(flat, [*[1] * len(before), *shape, *[1] * len(behind)]))
    flat = emit(op.add(flat, relax.const(rest, "int64")))
    full = [*before, *shape, *behind]
    values = emit(
        op.broadcast_to(in_dtype(importer.block_builder, arguments["values"], dtype), full)
    )
    data = emit(op.reshape(emit(op.permute_dims(x, order)) if apart else x, [math.prod(sizes)]))
    count = [math.prod(full)]
    kind = "add" if arguments["accumulate"] else "update"
    put = op.scatter_elements(
        data, emit(op.reshape(flat, count)), emit(op.reshape(values, count)), 0, kind
    )
    result = emit(op.reshape(emit(put), moved))
    return emit(op.permute_dims(result, np.argsort(order).tolist())) if apart else result


def _masked_put(importer: Importer, node: fx.Node) -> ir.Expr:
    """``x[mask] = v`` for a single value v: which elements are written need not be known."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    emit, op, dtype = builder.emit, relax.op, result_dtype(node)
    indices, x, value = arguments["indices"], arguments["self"], arguments["values"]
    if len(indices) > 1 or arguments["accumulate"] or arguments.fake("values").numel() != 1:
        raise NotImplementedError(
            "an index by truth values takes as many values as are true; use torch.where, or a single value"
        )
    mask, ones = indices[0], len(static_dims(arguments.fake("self"))) - int(indices[0].ty.ndim)
    mask = emit(op.reshape(mask, [*static_dims(arguments.fake("indices")[0]), *[1] * ones]))
    value = emit(op.reshape(in_dtype(builder, value, dtype), []))
    return emit(op.where(mask, value, x))


#: Converters by the name of the ATen overload.
SCATTERS: dict[str, Converter] = {
    "index_put.default": _index_put,
    "scatter_add.default": _scatter,
    "scatter_reduce.two": _scatter,
}
