"""Operators that move elements: gathering, scattering, splitting, one-hot rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx

#: Types that TVM's sorting takes.
_SORTED = {"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"}


def run_time_sizes(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """Refuse an operator whose result has a size that depends on its values."""
    editor.refuse("the size of its result depends on the values of its input")


def compress(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """Compress by a stored condition: a Gather."""
    condition = editor.value(node.input[1])
    if condition is None:
        return run_time_sizes(editor, node)
    axis = editor.attributes(node).get("axis")
    index = np.flatnonzero(condition)
    if axis is None:
        return [editor.add("Gather", editor.reshape(node.input[0], [-1]), index, axis=0)]
    return [editor.add("Gather", node.input[0], index, axis=axis)]


def one_hot(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """OneHot: comparisons with 0, 1, 2, ...; indices outside give rows of the off value."""
    indices, depth, values = node.input
    count, dims = editor.value(depth), editor.dims(indices)
    if count is None or dims is None:
        editor.refuse("its depth is computed at run time")
    number = int(count.item())
    editor.require_room(number)
    rank = len(dims) + 1
    axis = editor.attributes(node).get("axis", -1) % rank
    whole = editor.cast(indices, "int64")
    negative = editor.add("Less", whole, np.array(0))
    whole = editor.add("Where", negative, editor.add("Add", whole, np.array(number)), whole)
    whole = editor.unsqueeze(whole, axis)
    places = np.arange(number).reshape(-1, *[1] * (rank - 1 - axis))
    hot = editor.add("Equal", whole, places)
    off, on = (editor.add("Gather", values, np.array(i), axis=0) for i in (0, 1))
    return [editor.add("Where", hot, on, off)]


def split(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Split with empty parts, which TVM refuses: they are stored. Sizes for another number of parts are an error."""
    attributes = editor.attributes(node)
    x, given = editor.operands(node, 2)
    shape, sizes = editor.shape(x), attributes.get("split")
    if given:
        stored = editor.value(given)
        sizes = None if stored is None else stored.tolist()
    parts = len(sizes) if sizes else attributes.get("num_outputs", len(node.output))
    if parts != len(node.output):
        raise ValueError(f"it has {len(node.output)} results, and sizes or num_outputs for {parts}")
    if not sizes or all(sizes) or shape is None:
        return None
    axis = attributes.get("axis", 0) % len(shape)
    dtype, parts, start = editor.dtype(x) or np.dtype("float32"), [], 0
    for size in sizes:
        if size:
            parts.append(editor.slice(x, axis, start, start + size))
        else:
            parts.append(editor.store(np.zeros((*shape[:axis], 0, *shape[axis + 1 :]), dtype)))
        start += size
    return parts


def reshape(editor: Editor, node: onnx.NodeProto) -> None:
    """Refuse a Reshape of elements to none, which ``allowzero`` can ask for."""
    shape, target = editor.shape(node.input[0]), editor.operands(node, 2)[1]
    sizes = editor.value(target) if target else None
    if sizes is None or shape is None or not editor.attributes(node).get("allowzero", 0):
        return
    if 0 in sizes and 0 not in shape:
        editor.refuse(
            f"it makes a tensor without elements, of shape {sizes.tolist()}, of {math.prod(shape)} elements"
        )


def unsqueeze(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Unsqueeze by one axis that is stored without a list around it."""
    axes = editor.value(node.input[1]) if len(node.input) > 1 else None
    if axes is None or axes.ndim:
        return None
    return [editor.unsqueeze(node.input[0], int(axes))]


def pad(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Pad by less than nothing that repeats elements: what is cut off comes first, as in onnxruntime."""
    attributes, rank = editor.attributes(node), len(editor.dims(node.input[0]) or ())
    x, given, number, along = editor.operands(node, 4)
    amounts = editor.value(given) if given else np.array(attributes.get("pads", ()), "int64")
    axes = editor.value(along) if along else np.arange(rank)
    if amounts is None or axes is None or attributes.get("mode", "constant") == "constant":
        return None
    if not rank or not (amounts < 0).any() or len(amounts) != 2 * len(axes):
        return None
    begins, ends = amounts.reshape(2, -1)
    for axis, begin, end in zip(axes, begins, ends, strict=True):
        if begin < 0 or end < 0:
            x = editor.slice(x, int(axis), max(-int(begin), 0), min(int(end), 0) or 2**62)
    kept = np.maximum(amounts, 0)
    if editor.opset < 11:
        return [editor.add("Pad", x, **{**attributes, "pads": kept.tolist()})]
    return [editor.add("Pad", x, kept, *([number, along] if along else []), **attributes)]


def slice_attributes(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Slice of opset 9 and before, whose places are attributes."""
    attributes = editor.attributes(node)
    if "starts" not in attributes:
        return None
    starts, ends = attributes["starts"], attributes["ends"]
    axes = attributes.get("axes", range(len(starts)))
    places = [np.array(list(values), "int64") for values in (starts, ends, axes)]
    return [editor.add("Slice", node.input[0], *places)]


def scatter(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """Scatter is the old name of ScatterElements."""
    return [editor.add("ScatterElements", *node.input, **editor.attributes(node))]


def scatter_nd(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """ScatterND as a ScatterElements of the flat data."""
    data, indices, updates = node.input
    shape, at = editor.shape(data), editor.shape(indices)
    if shape is None or at is None:
        editor.refuse("the shapes of its operands are not known: give the model static shapes")
    depth = at[-1]
    inner = math.prod(shape[depth:])
    places = _flat_places(editor, indices, shape, depth)
    flat = editor.reshape(places, [-1, 1])
    # Each place stands for a slice of ``inner`` elements.
    flat = editor.add("Add", editor.add("Mul", flat, np.array(inner)), np.arange(inner)[None])
    reduction = editor.attributes(node).get("reduction", "none")
    settings = {} if reduction == "none" else {"reduction": reduction}
    y = editor.add(
        "ScatterElements", editor.reshape(data, [-1]), editor.reshape(flat, [-1]),
        editor.reshape(updates, [-1]), axis=0, **settings,
    )  # fmt: skip
    return [editor.reshape(y, shape)]


def _flat_places(editor: Editor, indices: str, shape: tuple[int, ...], depth: int) -> str:
    """Return the number of the slice that each index tuple names; negative indices count from the end."""
    extents = np.array(shape[:depth], "int64")
    steps = np.array([math.prod(shape[i + 1 : depth]) for i in range(depth)], "int64")
    whole = editor.cast(indices, "int64")
    negative = editor.add("Less", whole, np.array(0))
    whole = editor.add("Where", negative, editor.add("Add", whole, extents), whole)
    return editor.reduce("ReduceSum", editor.add("Mul", whole, steps), [-1], keep=False)


def reverse_sequence(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """ReverseSequence: step t of a sequence of length n comes from n - 1 - t, later ones stay."""
    attributes = editor.attributes(node)
    x, lengths = node.input
    shape = editor.shape(x)
    if shape is None:
        editor.refuse("the shape of its input is not known: give the model static shapes")
    time, batch = attributes.get("time_axis", 0), attributes.get("batch_axis", 1)
    steps = np.arange(shape[time]).reshape(-1, 1) if time < batch else np.arange(shape[time])
    column = editor.reshape(lengths, [1, -1] if time < batch else [-1, 1])
    mirrored = editor.add("Sub", editor.add("Sub", column, np.array(1)), steps)
    inside = editor.add("Greater", column, steps)
    index = editor.add("Where", inside, mirrored, steps)
    index = editor.reshape(index, [*([shape[0], shape[1]]), *[1] * (len(shape) - 2)])
    index = editor.add("Expand", index, np.array(shape))
    return [editor.add("GatherElements", x, index, axis=time)]


def tensor_scatter(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """TensorScatter: at each position of the cache the update's element that belongs there, or the old one."""
    attributes = editor.attributes(node)
    past, update, starts = editor.operands(node, 3)
    shape, new = editor.shape(past), editor.shape(update)
    if shape is None or new is None:
        editor.refuse("the shapes of its operands are not known: give the model static shapes")
    axis = attributes.get("axis", -2) % len(shape)
    positions = np.arange(shape[axis])[None]
    start = (
        editor.reshape(editor.cast(starts, "int64"), [-1, 1])
        if starts
        else np.zeros((1, 1), "int64")
    )
    place = editor.add("Sub", positions, start)
    if attributes.get("mode", "linear") == "circular":
        place = editor.add("Mod", place, np.array(shape[axis]))
    first = editor.add("Greater", place, np.array(-1))
    inside = editor.add("And", first, editor.add("Less", place, np.array(new[axis])))
    place = editor.add("Where", inside, place, np.array(0))
    aligned = [1] * len(shape)
    aligned[0], aligned[axis] = -1, shape[axis]
    index = editor.add("Expand", editor.reshape(place, aligned), np.array(shape))
    moved = editor.add("GatherElements", update, index, axis=axis)
    return [editor.add("Where", editor.reshape(inside, aligned), moved, past)]


def cumulative_sum(editor: Editor, node: onnx.NodeProto) -> None:
    """Refuse CumSum along an axis that is not there, which onnx's checker and TVM let pass."""
    shape, along = editor.shape(node.input[0]), editor.value(node.input[1])
    if shape is not None and along is not None:
        _require_axis(editor, len(shape), int(along.item()))


def _require_axis(editor: Editor, rank: int, axis: int) -> None:
    if not -rank <= axis < rank:
        editor.refuse(f"a value of {rank} axes has no axis {axis}")


def cumulative_product(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """CumProd by doubling: after step k each element is the product of 2^k neighbours."""
    attributes = editor.attributes(node)
    x, axis = node.input
    shape, along = editor.shape(x), editor.value(axis)
    if shape is None or along is None:
        editor.refuse("its axis or the shape of its input is not known")
    _require_axis(editor, len(shape), int(along.item()))
    editor.require_room(*shape)
    d = int(along.item()) % len(shape)
    size, dtype = shape[d], editor.dtype(x) or np.dtype("float32")
    backward = bool(attributes.get("reverse", 0))

    def moved(value: str, by: int) -> str:
        ones = np.ones((*shape[:d], by, *shape[d + 1 :]), dtype)
        if backward:
            return editor.add("Concat", editor.slice(value, d, by, size), ones, axis=d)
        return editor.add("Concat", ones, editor.slice(value, d, 0, size - by), axis=d)

    value = moved(x, 1) if attributes.get("exclusive", 0) and size > 1 else x
    if attributes.get("exclusive", 0) and size == 1:
        return [editor.store(np.ones(shape, dtype))]
    step = 1
    while step < size:
        value = editor.add("Mul", value, moved(value, step))
        step *= 2
    return [value if value != x else editor.add("Identity", x)]


def space_to_depth(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """SpaceToDepth in CRD mode: depth first, then the place in the block."""
    attributes = editor.attributes(node)
    if attributes.get("mode", "DCR") == "DCR":
        return None
    shape, b = editor.shape(node.input[0]), attributes["blocksize"]
    if shape is None:
        editor.refuse("the shape of its input is not known: give the model static shapes")
    n, c, h, w = shape
    blocks = editor.reshape(node.input[0], [n, c, h // b, b, w // b, b])
    blocks = editor.add("Transpose", blocks, perm=[0, 1, 3, 5, 2, 4])
    return [editor.reshape(blocks, [n, c * b * b, h // b, w // b])]


def roi_align(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """RoiAlign by half pixels of scaled regions, which TVM moves before it scales. Maxima are refused.

    TVM takes maxima of other values.
    """
    attributes = editor.attributes(node)
    if attributes.get("mode", "avg") != "avg":
        editor.refuse("the mode 'max' is not supported")
    scale = attributes.get("spatial_scale", 1.0)
    default = "half_pixel" if editor.opset >= 16 else "output_half_pixel"
    if scale == 1 or attributes.get("coordinate_transformation_mode", default) != "half_pixel":
        return None
    x, regions, batch = node.input
    number = np.array(scale, editor.dtype(regions) or "float32")
    scaled = editor.add("Mul", regions, number)
    return [editor.add("RoiAlign", x, scaled, batch, **{**attributes, "spatial_scale": 1.0})]


def grid_sample(editor: Editor, node: onnx.NodeProto) -> None:
    """Refuse reflection at the centres of single elements, which TVM divides by."""
    attributes, dims = editor.attributes(node), editor.dims(node.input[0]) or ()
    reflected = attributes.get("padding_mode", "zeros") == "reflection"
    if reflected and attributes.get("align_corners", 0) and 1 in dims[2:]:
        editor.refuse("it reflects an axis of one element at that element")


def top_k(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """TopK of opset 10, whose number is an operand: TVM reads an attribute. Types that it cannot sort are refused."""
    dtype = editor.dtype(node.input[0])
    if dtype is not None and dtype.name not in _SORTED:
        editor.refuse(f"{dtype.name} values cannot be sorted")
    if editor.opset != 10:
        return None
    count = editor.value(node.input[1])
    if count is None:
        editor.refuse("its number of values is computed at run time")
    axis = editor.attributes(node).get("axis", -1)
    return editor.add_many("TopK", 2, node.input[0], k=int(count.item()), axis=axis)


def eye_like(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """EyeLike of a known shape is a constant."""
    import onnx.helper

    attributes, shape = editor.attributes(node), editor.shape(node.input[0])
    if shape is None:
        return None
    editor.require_room(*shape)
    code = attributes.get("dtype", 0)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(code) if code else editor.dtype(node.input[0])
    return [editor.store(np.eye(*shape, k=attributes.get("k", 0), dtype=dtype))]


def column_to_image(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """Col2Im: blocks added at their places, as a ScatterElements into zeros."""
    attributes = editor.attributes(node)
    x, image, block = node.input
    shape, sizes, kernel = editor.shape(x), editor.value(image), editor.value(block)
    if shape is None or sizes is None or kernel is None:
        editor.refuse("its shapes are computed at run time")
    rank = len(sizes)
    dilations, strides = (attributes.get(k, [1] * rank) for k in ("dilations", "strides"))
    pads = attributes.get("pads", [0] * 2 * rank)
    full = [int(n) + pads[i] + pads[i + rank] for i, n in enumerate(sizes)]
    windows = [(int(k) - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    counts = [(f - w) // s + 1 for f, w, s in zip(full, windows, strides, strict=True)]
    editor.require_room(*kernel, *counts)
    place = np.zeros((1,) * 2 * rank, "int64")
    for i in range(rank):
        at = np.arange(int(kernel[i]))[:, None] * dilations[i] + np.arange(counts[i]) * strides[i]
        view = [1] * 2 * rank
        view[i], view[rank + i] = at.shape
        place = place + at.reshape(view) * math.prod(full[i + 1 :])
    rows = shape[0] * (shape[1] // int(np.prod(kernel)))
    dtype = editor.dtype(x) or np.dtype("float32")
    flat = editor.reshape(x, [rows, place.size])
    index = np.broadcast_to(place.reshape(1, -1), (rows, place.size))
    editor.require_room(rows, *full)
    zeros = np.zeros((rows, math.prod(full)), dtype)
    y = editor.add("ScatterElements", zeros, index, flat, axis=1, reduction="add")
    y = editor.reshape(y, [shape[0], rows // shape[0], *full])
    for i, size in enumerate(sizes):
        y = editor.slice(y, 2 + i, pads[i], pads[i] + int(size))
    return [y]
