"""Relay operators that the graph has in another form: what a product, a bias or a reshape is there.

A rule gets the builder, the call, its operands and its attributes; it returns the results, or None
where the operator stays as it is. Each mirrors what importing the module into Relax and cleaning it
up would leave, so that one model has one plan in both dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import counterparts, expansions
from .compat import relay
from .nodes import Node, Structure, Value
from .operators import NAME_OF, VIEWS, is_binary
from .slice_lookups import slice_lookup

Rule = Callable[[Any, Any, list[Structure], dict[str, Any]], Structure | None]


def _dense(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure:
    """The weight of ``nn.dense`` is stored transposed."""
    data, weight = args
    second = _transposed(builder, call, weight, call.args[1])
    helper = second[1]
    apart = helper and relay.nn.matmul(call.args[0], helper.root, None, attrs["out_dtype"])
    return _product(builder, call, [data, second[0]], apart, [helper], attrs)


def _matmul(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure:
    """``nn.matmul`` and ``nn.batch_matmul`` transpose their operands as they read them."""
    flags = [bool(attrs.get("transpose_a")), bool(attrs.get("transpose_b"))]
    operands, roots, helpers = [], [], []
    for i, (value, flag) in enumerate(zip(args, flags, strict=True)):
        found = _transposed(builder, call, value, call.args[i]) if flag else (value, None)
        operands.append(found[0])
        helpers.append(found[1])
        roots.append(_root(found, call.args[i]))
        flags[i] = flag and found[1] is None
    apart = None
    if any(helpers):
        types = {"out_dtype": attrs["out_dtype"], "transpose_a": flags[0], "transpose_b": flags[1]}
        batched = call.op.name == "nn.batch_matmul"
        apart = (relay.nn.batch_matmul if batched else relay.nn.matmul)(*roots, **types)
    return _product(builder, call, operands, apart, helpers, attrs)


def _product(
    builder: Any,
    call: Any,
    operands: list[Value],
    apart: Any,
    helpers: Sequence[Node | None],
    attrs: dict[str, Any],
) -> Structure:
    made = [helper for helper in helpers if helper is not None]
    kept = {"out_dtype": attrs["out_dtype"] or None}
    return builder.emit("matmul", kept, operands, call, apart=apart, helpers=made)


def _root(found: tuple[Value, Node | None], otherwise: Any) -> Any:
    return found[1].root if found[1] is not None else otherwise


def _transposed(builder: Any, call: Any, value: Value, expr: Any) -> tuple[Value, Node | None]:
    """The transposition of a value's last two axes, and its operator if it needs one."""
    shape = (*value.shape[:-2], value.shape[-1], value.shape[-2])
    if value.is_constant:
        return Value(shape, value.dtype, is_constant=True), None
    rank = len(shape)
    axes = (*range(rank - 2), rank - 1, rank - 2)
    source = value.node
    if source is not None and source.op == "permute_dims":
        inner = [a % rank for a in source.attrs["axes"]]
        if tuple(inner[a] for a in axes) == tuple(range(rank)):
            return source.inputs[0], None
    result = Value(shape, value.dtype)
    root = relay.transpose(expr, axes)
    builder.emit("permute_dims", {"axes": axes}, [value], root, result, origin=call)
    return result, result.node


def _bias_add(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """An addition along one axis."""
    data, bias = args
    rank = len(data.shape)
    axis = int(attrs["axis"]) % rank
    if bias.is_constant and axis != rank - 1:
        shape = (bias.shape[0], *[1] * (rank - 1 - axis))
        array = None if bias.array is None else bias.array.reshape(shape)
        bias = Value(shape, bias.dtype, is_constant=True, data=array)
    return builder.emit("add", {}, [data, bias], call)


def _reshape(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    """Every view is a reshape; one that changes nothing is none, and of two in a row the last counts."""
    (data,) = args[:1]
    result = builder.structure_of(call.checked_type)
    if data.same_type(result):
        return data
    if not result.is_static:
        return None
    source = data.node
    if source is not None and source.op == "reshape":
        data = source.inputs[0]
        if data.same_type(result):
            return data
    return builder.emit("reshape", {"arg1": result.shape}, [data], call)


def _layout(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    """Another order of plain axes is a transposition."""
    source, wanted = str(attrs["src_layout"]), str(attrs["dst_layout"])
    if not (source.isalpha() and source.isupper()) or sorted(source) != sorted(wanted):
        return None
    return _transpose(builder, call, args, {"axes": tuple(map(source.index, wanted))})


def _take(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    if attrs["axis"] is None and args[0].is_static and len(args[0].shape) > 1:
        return counterparts.flat_lookup(builder, call, args, attrs)
    return slice_lookup(builder, call, args, attrs)


def _transpose(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure:
    """Two transpositions in a row are one, or none."""
    (data,) = args
    rank = len(data.shape)
    axes = [a % rank for a in attrs["axes"]]
    if axes == list(range(rank)):
        return data
    source = data.node
    if source is not None and source.op == "permute_dims":
        inner = [a % rank for a in source.attrs["axes"]]
        data, axes = source.inputs[0], [inner[a] for a in axes]
        if axes == list(range(rank)):
            return data
    return builder.emit("permute_dims", {"axes": tuple(axes)}, [data], call)


def _first(builder: Any, call: Any, args: list[Structure], attrs: dict[str, Any]) -> Structure:
    """The operator gives its operand back."""
    return args[0]


def _same(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    """Nothing is done where the type stays."""
    result = builder.structure_of(call.checked_type)
    return args[0] if isinstance(result, Value) and args[0].same_type(result) else None


def _filled(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    """A tensor of one number is constant, whatever it is made like."""
    result = builder.structure_of(call.checked_type)
    number = args[-1].array if call.op.name == "full" else int("ones" in call.op.name)
    if not result.is_static or number is None or np.size(number) != 1:
        return None
    result.is_constant = True
    dtype = result.dtype.replace("bfloat16", "float32")
    result.data = np.broadcast_to(np.asarray(number).astype(dtype).reshape(()), result.shape)
    return result


def _dropout(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure:
    """In inference dropout does nothing; its mask, which nobody reads, is all ones."""
    mask = builder.structure_of(call.checked_type)[1]
    mask.is_constant = True
    return (args[0], mask)


def _concatenate(
    builder: Any, call: Any, args: list[Structure], attrs: dict[str, Any]
) -> Structure | None:
    fields = args[0]
    return fields[0] if isinstance(fields, tuple) and len(fields) == 1 else None


def _split(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    result = builder.structure_of(call.checked_type)
    return (args[0],) if isinstance(result, tuple) and len(result) == 1 else None


def _slice(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    """A slice that keeps the shape keeps every element, unless it runs backwards."""
    strides = attrs.get("strides") or ()
    forward = all(isinstance(s, int) and s > 0 for s in strides)
    return _same(builder, call, args, attrs) if forward else None


def _pad(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    if not any(attrs["pad_width"]):
        return args[0]
    number = (
        args[1].array.item() if args[1].is_scalar_constant and args[1].array is not None else None
    )
    kept = {**attrs, "pad_value": number}
    return builder.emit("pad", kept, [args[0]], call)


def _convolution(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """A padding by zeros in front belongs to the convolution."""
    data, weight = args
    kept = {k: v for k, v in attrs.items() if k not in ("channels", "kernel_size")}
    layout = str(kept.get("data_layout"))
    kept["out_layout"] = kept.get("out_layout") or layout
    weight, kept["kernel_layout"] = _kernel(weight, str(kept["kernel_layout"]), layout)
    while data.node is not None and data.node.op == "pad":
        added = _spatial_zeros(data.node.attrs, layout)
        if added is None or len(added) != len(kept["padding"]):
            break
        kept["padding"] = tuple(a + int(b) for a, b in zip(added, kept["padding"], strict=True))
        data = data.node.inputs[0]
    return builder.emit(NAME_OF[call.op.name], kept, [data, weight], call)


def _kernel(weight: Value, given: str, layout: str) -> tuple[Value, str]:
    """A constant kernel in the order of axes that belongs to the data's: OIHW to NCHW, OHWI to NHWC."""
    space = "".join(letter for letter in layout if letter not in "NC")
    wanted = f"O{space}I" if layout == f"N{space}C" and len(space) == 2 else f"OI{space}"
    if not weight.is_constant or given == wanted or sorted(given) != sorted(wanted):
        return weight, given
    shape = tuple(weight.shape[given.index(letter)] for letter in wanted)
    return Value(shape, weight.dtype, is_constant=True), wanted


def _spatial_zeros(attrs: dict[str, Any], layout: str) -> list[int] | None:
    """What a padding adds (all befores, then all afters), or None where it is not zeros around H and W."""
    width = attrs["pad_width"]
    if attrs.get("pad_mode") != "constant" or attrs.get("pad_value") != 0:
        return None
    if len(width) != 2 * len(layout) or min(width) < 0:
        return None
    pairs = {letter: width[2 * i : 2 * i + 2] for i, letter in enumerate(layout)}
    if any(pairs["N"]) or any(pairs["C"]):
        return None
    spatial = [pair for letter, pair in pairs.items() if letter not in "NC"]
    return [pair[0] for pair in spatial] + [pair[1] for pair in spatial]


def _power(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    """Powers of small constant exponents are products, roots and quotients."""
    base, exponent = args
    result = builder.structure_of(call.checked_type)
    number = _splat(exponent)
    if number is None or "float" not in base.dtype or base.shape != result.shape:
        return None
    unary = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}.get(number)
    if unary:
        return builder.emit(unary, {}, [base], call)
    if number == -1:
        return builder.emit("divide", {}, [exponent, base], call)
    if number not in (3, 4):
        return None
    square = Value(base.shape, base.dtype)
    root = relay.multiply(call.args[0], call.args[0])
    builder.emit("square", {}, [base], root, square, origin=call)
    if square.is_constant:
        return None
    second = square if number == 4 else base
    apart = relay.multiply(root, root if number == 4 else call.args[0])
    op = "square" if number == 4 else "multiply"
    inputs = [square] if number == 4 else [square, second]
    return builder.emit(op, {}, inputs, call, apart=apart, helpers=[square.node])


def _elementwise(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """Adding nothing, multiplying by one, and broadcasting what would be broadcast anyway are nothing."""
    op = NAME_OF[call.op.name]
    result = builder.structure_of(call.checked_type)
    left, right = (_narrow(args, i, result) for i in range(2))
    if op in ("add", "subtract") and _splat(right) == 0 and left.same_type(result):
        return left
    if op in ("multiply", "divide") and _splat(right) == 1 and left.same_type(result):
        return left
    neutral = {"add": 0, "multiply": 1}.get(op)
    if neutral is not None and _splat(left) == neutral and right.same_type(result):
        return right
    left, right = _compact(left, right), _compact(right, left)
    return builder.emit(op, {}, [left, right], call)


def _compact(value: Value, other: Value) -> Value:
    """A constant without what it repeats along axes whose extent the other operand gives."""
    array = value.array if value.is_constant and value.shape else None
    if array is None or not other.is_static:
        return value
    for axis, extent in enumerate(value.shape):
        place = axis - len(value.shape) + len(other.shape)
        if extent <= 1 or place < 0 or other.shape[place] != extent:
            continue
        first = array[(slice(None),) * axis + (slice(0, 1),)]
        if bool(np.all(array == first)):
            array = first
    if array.size == 1 and len(other.shape) >= array.ndim:
        array = array.reshape(())  # a number is part of the operator, and no tensor that is read
    if array.shape == value.shape:
        return value
    return Value(array.shape, value.dtype, is_constant=True, data=array)


def _narrow(args: list[Value], i: int, result: Value) -> Value:
    """An operand without the ``broadcast_to`` that the operator makes needless."""
    value, other = args[i], args[1 - i]
    while value.node is not None and value.node.op == "broadcast_to":
        source = value.node.inputs[0]
        if not source.is_static or not other.is_static:
            return value
        if np.broadcast_shapes(source.shape, other.shape) != result.shape:
            return value
        value = source
    return value


def _splat(value: Value) -> float | None:
    """The number that every element of a constant is."""
    if not value.is_constant or value.array is None or value.array.size == 0:
        return None
    first = value.array.flat[0]
    return float(first) if bool(np.all(value.array == first)) else None


#: Rule of each operator that has one.
RULES: dict[str, Rule] = {
    **{name: _elementwise for name, op in NAME_OF.items() if is_binary(op) and op != "power"},
    **dict.fromkeys(("nn.conv1d", "nn.conv2d", "nn.conv3d"), _convolution),
    **dict.fromkeys(VIEWS, _reshape),
    **dict.fromkeys(("broadcast_to", "cast", "cast_like"), _same),
    **dict.fromkeys(("copy", "annotation.checkpoint"), _first),
    "concatenate": _concatenate,
    "nn.batch_matmul": _matmul,
    "nn.bias_add": _bias_add,
    "nn.dense": _dense,
    "nn.dropout": _dropout,
    "nn.matmul": _matmul,
    "nn.pad": _pad,
    "power": _power,
    "split": _split,
    "strided_slice": _slice,
    "take": _take,
    "transpose": _transpose,
    "layout_transform": _layout,
    "slice_like": counterparts.slice_like,
    "broadcast_to_like": counterparts.broadcast_to_like,
    **dict.fromkeys(("nn.global_avg_pool2d", "nn.global_max_pool2d"), expansions.whole_map),
    **{f"nn.adaptive_avg_pool{rank}d": expansions.whole_map for rank in (1, 2, 3)},
    **{f"nn.adaptive_max_pool{rank}d": counterparts.adaptive_max_pool for rank in (1, 2, 3)},
    **dict.fromkeys(("nn.depth_to_space", "nn.space_to_depth"), counterparts.sub_pixel),
    **dict.fromkeys(("all", "any"), counterparts.truth),
    **dict.fromkeys(("log2", "log10"), expansions.logarithm),
    **dict.fromkeys(("argmax", "argmin"), expansions.position),
    "nn.lrn": expansions.local_response_norm,
    **dict.fromkeys(("full", "ones", "ones_like", "zeros", "zeros_like"), _filled),
    "nn.batch_norm": expansions.batch_norm,
    "nn.l2_normalize": expansions.l2_normalize,
    "mean": expansions.mean,
    "round": expansions.away_from_zero,
    "stack": expansions.stack,
    "variance": expansions.variance,
}
