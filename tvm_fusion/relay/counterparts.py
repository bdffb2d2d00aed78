"""Relay operators that importing a module into Relax writes as others: pools, slices, layouts, tests of truth.

Each rule is one of `rules.RULES`, and mirrors the converter of the same name in `frontend.relay.operators`.
"""

from __future__ import annotations

from typing import Any

from ..graph.dataflow import SLICE
from .compat import relay
from .expansions import Expansion, whole_map
from .nodes import Structure, Value


def adaptive_max_pool(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """A pooling by equal windows, where the map is divided into such."""
    found = whole_map(builder, call, args, attrs)
    (data,) = args
    layout = str(attrs["layout"])
    if found is not None or len(layout) != len(data.shape) or not data.is_static:
        return found
    sizes = [n for n, letter in zip(data.shape, layout, strict=True) if letter not in "NC"]
    wanted = list(attrs.get("output_size") or sizes)
    wanted = wanted * len(sizes) if len(wanted) == 1 else wanted
    if len(wanted) != len(sizes) or any(n % m for n, m in zip(sizes, wanted, strict=True)):
        return None
    rank = len(sizes)
    window = tuple(n // m for n, m in zip(sizes, wanted, strict=True))
    kinds = {
        "pool_size": window, "strides": window, "padding": (0,) * 2 * rank, "dilation": (1,) * rank,
        "ceil_mode": False, "layout": layout, "out_layout": layout,
    }  # fmt: skip
    return builder.emit(f"max_pool{rank}d", kinds, [data], call)


def slice_like(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """The first elements of each axis; the tensor that says how many is not read."""
    data, result = args[0], builder.structure_of(call.checked_type)
    if data.same_type(result) or not (data.is_static and result.is_static):
        return data if data.same_type(result) else None
    pairs = zip(data.shape, result.shape, strict=True)
    axes = tuple(axis for axis, (own, kept) in enumerate(pairs) if own != kept)
    begin, end = [0] * len(axes), [result.shape[axis] for axis in axes]
    root = relay.strided_slice(call.args[0], begin, end, [1] * len(axes), axes=list(axes))
    part = {SLICE: (axes, tuple(begin), tuple(end))}
    return builder.emit("strided_slice", part, [data], root, result, origin=call)


def broadcast_to_like(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """A broadcast; the tensor that gives the shape is not read."""
    data, result = args[0], builder.structure_of(call.checked_type)
    if data.same_type(result) or not result.is_static:
        return data if data.same_type(result) else None
    root = relay.broadcast_to(call.args[0], result.shape)
    return builder.emit("broadcast_to", {}, [data], root, result, origin=call)


def sub_pixel(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """Channels moved into space or back, in blocks: reshapes and a transposition."""
    (data,) = args
    block = int(attrs["block_size"])
    if not data.is_static or str(attrs["layout"]) != "NCHW":
        return None
    n, c, h, w = data.shape
    if call.op.name == "nn.space_to_depth":
        apart, axes = (n, c, h // block, block, w // block, block), (0, 3, 5, 1, 2, 4)
    elif str(attrs["mode"]) == "DCR":
        apart, axes = (n, block, block, c // block**2, h, w), (0, 3, 4, 1, 5, 2)
    else:
        apart, axes = (n, c // block**2, block, block, h, w), (0, 1, 4, 2, 5, 3)
    chain = Expansion(builder, call)
    view = relay.reshape(call.args[0], apart)
    blocks = chain.step("reshape", [data], view, apart, {"arg1": apart})
    moved = relay.transpose(view, axes)
    order = tuple(apart[axis] for axis in axes)
    blocks = chain.step("permute_dims", [blocks], moved, order, {"axes": axes})
    shape = builder.structure_of(call.checked_type).shape
    return chain.last("reshape", [blocks], relay.reshape(moved, shape), {"arg1": shape})


def truth(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    """Whether all, or any, elements hold: the least, or largest, of them as integers."""
    (data,) = args
    if data.dtype != "bool" or not data.is_static:
        return None
    result = builder.structure_of(call.checked_type)
    op, make = ("min", relay.min) if call.op.name == "all" else ("max", relay.max)
    axes = tuple(range(len(data.shape))) if attrs["axis"] is None else tuple(attrs["axis"])
    keep = bool(attrs["keepdims"])
    chain = Expansion(builder, call)
    wide = relay.cast(call.args[0], "int32")
    numbers = chain.step("astype", [data], wide, data.shape, {"dtype": "int32"}, "int32")
    reduced = make(wide, list(axes), keep)
    number = chain.step(
        op, [numbers], reduced, result.shape, {"axis": axes, "keepdims": keep}, "int32"
    )
    return chain.last("astype", [number], relay.cast(reduced, "bool"), {"dtype": "bool"})


def flat_lookup(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure:
    """A lookup without an axis is one along the axis of the tensor's one row."""
    data, index = args
    chain, shape = Expansion(builder, call), (data.size,)
    row = relay.reshape(call.args[0], shape)
    flat = chain.step("reshape", [data], row, shape, {"arg1": shape})
    found = relay.take(row, call.args[1], axis=0, mode=attrs["mode"])
    return chain.last("take", [flat, index], found, {**attrs, "axis": 0})
