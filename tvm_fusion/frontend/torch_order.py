"""Converters of ATen operators that order the elements of an axis, or keep the extreme of those so far.

Sorting takes NaN for infinity, which is where PyTorch has it (above all numbers) unless there are infinities too, and
bfloat16 for float32: TVM orders neither.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from ..compat import ir, relax
from .torch_arguments import Arguments, Converter, Importer, static_dims


def _keys(importer: Importer, x: ir.Expr) -> ir.Expr:
    """What TVM can sort, in the order of ``x``."""
    emit, op, dtype = importer.block_builder.emit, relax.op, str(x.ty.dtype)
    if "float" not in dtype:
        return x
    if dtype == "bfloat16":
        x, dtype = emit(op.astype(x, "float32")), "float32"
    return emit(op.where(emit(op.isnan(x)), relax.const(np.inf, dtype), x))


def _sort(importer: Importer, node: fx.Node) -> tuple[ir.Expr, ir.Expr]:
    """``sort``; TVM's is stable."""
    emit, arguments = importer.block_builder.emit, Arguments(importer.env, node)
    x, axis, down = arguments["self"], arguments["dim"], bool(arguments["descending"])
    places = emit(relax.op.argsort(_keys(importer, x), axis, down, "int64"))
    return emit(relax.op.gather_elements(x, places, axis)), places


def _top_k(importer: Importer, node: fx.Node) -> tuple[ir.Expr, ir.Expr]:
    """``topk``, sorted whether it has to be or not."""
    emit, arguments = importer.block_builder.emit, Arguments(importer.env, node)
    x, axis, k = arguments["self"], arguments["dim"], arguments["k"]
    if int(x.ty.ndim) == 0:
        return x, relax.const(0, "int64")
    keys, down = _keys(importer, x), bool(arguments["largest"])
    places = emit(relax.op.topk(keys, k, axis, "indices", largest=down, dtype="int64"))
    return emit(relax.op.gather_elements(x, places, axis)), places


def _kth_value(importer: Importer, node: fx.Node) -> tuple[ir.Expr, ir.Expr]:
    """``kthvalue``: the k-th smallest along an axis and its place."""
    emit, arguments = importer.block_builder.emit, Arguments(importer.env, node)
    x, axis = arguments["self"], arguments["dim"]
    if int(x.ty.ndim) == 0:
        return x, relax.const(0, "int64")
    sorted_places = emit(relax.op.argsort(_keys(importer, x), axis, False, "int64"))
    k = relax.const(np.array([arguments["k"] - 1]), "int64")
    place = emit(relax.op.take(sorted_places, k, axis=axis))
    value = emit(relax.op.gather_elements(x, place, axis))
    if arguments["keepdim"]:
        return value, place
    return tuple(emit(relax.op.squeeze(item, [axis])) for item in (value, place))


def _median(importer: Importer, node: fx.Node) -> Any:
    """``median``: the lower of the two in the middle, NaN where there is one."""
    emit, arguments = importer.block_builder.emit, Arguments(importer.env, node)
    op, x = relax.op, arguments["self"]
    flat = "dim" not in arguments
    if int(x.ty.ndim) == 0:
        return x if flat else (x, relax.const(0, "int64"))
    x = emit(op.reshape(x, (-1,))) if flat else x
    axis = 0 if flat else arguments["dim"]
    keys = _keys(importer, x)
    middle = relax.const(np.array([(int(x.ty.shape[axis]) - 1) // 2]), "int64")
    place = emit(op.take(emit(op.argsort(keys, axis, False, "int64")), middle, axis=axis))
    if "float" in str(x.ty.dtype):
        # The place of the largest is that of the first NaN.
        first = emit(op.argmax(x, axis, keepdims=True))
        extreme = emit(op.gather_elements(x, first, axis))
        place = emit(op.where(emit(op.isnan(extreme)), first, place))
    value = emit(op.gather_elements(x, place, axis))
    if not flat and arguments["keepdim"]:
        return value, place
    value, place = (emit(op.squeeze(item, [axis])) for item in (value, place))
    return value if flat else (value, place)


def _extreme_so_far(is_largest: bool) -> Converter:
    """``cummax`` and ``cummin``: the last place of the extreme of the elements up to each, NaN being more extreme.

    By doubling: after step s each element knows the extreme of the 2**s elements that end with it.
    """

    def convert(importer: Importer, node: fx.Node) -> tuple[ir.Expr, ir.Expr]:
        emit, arguments, op = importer.block_builder.emit, Arguments(importer.env, node), relax.op
        x, sizes = arguments["self"], static_dims(arguments.fake("self"))
        if not sizes:
            return x, relax.const(0, "int64")
        axis = arguments["dim"] % len(sizes)
        count, dtype = sizes[axis], str(x.ty.dtype)
        shape = [count if i == axis else 1 for i in range(len(sizes))]
        numbers = relax.const(np.arange(count, dtype="int64").reshape(shape), "int64")
        value, place = x, emit(op.broadcast_to(numbers, sizes))
        compare = op.greater if is_largest else op.less
        step = 1
        while step < count:
            first = emit(op.strided_slice(value, [axis], [0], [step]))
            first_place = emit(op.strided_slice(place, [axis], [0], [step]))
            old, old_place, new, new_place = (
                emit(op.strided_slice(v, [axis], [begin], [end]))
                for begin, end in ((0, count - step), (step, count))
                for v in (value, place)
            )
            # The later one wins among equals, as PyTorch has it.
            earlier = emit(compare(old, new))
            if "float" in dtype:
                seen, now = emit(op.isnan(old)), emit(op.isnan(new))
                earlier = emit(op.logical_or(earlier, seen))
                earlier = emit(op.logical_and(earlier, emit(op.logical_not(now))))
            value = emit(op.where(earlier, old, new))
            place = emit(op.where(earlier, old_place, new_place))
            value = emit(op.concat([first, value], axis))
            place = emit(op.concat([first_place, place], axis))
            step *= 2
        return value, place

    return convert


#: Converters by the name of the ATen overload.
ORDER: dict[str, Converter] = {
    "sort.default": _sort,
    "sort.stable": _sort,
    "topk.default": _top_k,
    "kthvalue.default": _kth_value,
    "median.dim": _median,
    "median.default": _median,
    "cummax.default": _extreme_so_far(is_largest=True),
    "cummin.default": _extreme_so_far(is_largest=False),
}
