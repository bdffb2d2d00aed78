"""Write lookups of constant, neighbouring places as slices, as `frontend.canonical.SliceLookups` does."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph.dataflow import SLICE
from .compat import relay
from .expansions import Expansion
from .nodes import Structure, Value


def slice_lookup(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """take(x, 1) -> reshape(x[1:2]), take(x, [2, 3, 4]) -> x[2:5]; indices must lie within the axis."""
    data, index = args
    result = builder.structure_of(call.checked_type)
    array = index.array if index.is_constant else None
    if array is None or data.is_constant or not data.is_static or not result.is_static:
        return None
    if attrs["axis"] is None or array.ndim > 1 or array.size == 0:
        return None
    axis, places = int(attrs["axis"]) % len(data.shape), array.reshape(-1).astype("int64")
    begin, end = int(places[0]), int(places[-1]) + 1
    wanted = np.arange(begin, begin + len(places))
    if begin < 0 or end > data.shape[axis] or (places != wanted).any():
        return None
    expr = relay.strided_slice(call.args[0], [begin], [end], axes=[axis])
    part = {SLICE: ((axis,), (begin,), (end,))}
    if array.ndim == 1:
        return builder.emit("strided_slice", part, [data], call)
    shape = (*data.shape[:axis], 1, *data.shape[axis + 1 :])
    chain = Expansion(builder, call)
    cut = chain.step("strided_slice", [data], expr, shape, part)
    view = relay.reshape(expr, result.shape)
    return chain.last("reshape", [cut], view, {"arg1": result.shape})
