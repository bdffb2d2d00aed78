"""Poolings: padding made explicit, and the forms that TVM 0.27 lacks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..onnx_editor import Editor
from .geometry import explicit_pads, geometry_of, require_windows

if TYPE_CHECKING:
    import onnx


#: Windows that are written out place by place are at most this large.
MAX_PLACES = 1024


def _output_sizes(
    sizes: Sequence[int],
    windows: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    ceil: bool,
) -> list[int]:
    """Return how many windows each axis has; with ``ceil`` the last may reach over the end, not start there."""
    rank, counts = len(sizes), []
    for i, (size, window, stride) in enumerate(zip(sizes, windows, strides, strict=True)):
        room = size + pads[i] + pads[i + rank] - window
        count = (-(-room // stride) if ceil else room // stride) + 1
        if ceil and (count - 1) * stride >= size + pads[i]:
            count -= 1
        counts.append(count)
    return counts


def _reach(strides: Sequence[int], ceil: bool) -> list[int]:
    """Return how far a window may reach over the end."""
    return [stride - 1 if ceil else 0 for stride in strides]


def max_pool(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """MaxPool with explicit padding; with the indices of the maxima, if they are asked for."""
    attributes = editor.attributes(node)
    pads = explicit_pads(editor, node, attributes)
    if pads is None:
        return None
    sizes, kernel, strides, dilations = geometry_of(editor, node, attributes)
    dtype = editor.dtype(node.input[0]) or np.dtype("float32")
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    known = all(size is not None for size in sizes)
    ceil = bool(attributes.get("ceil_mode", 0))
    require_windows(editor, sizes, windows, pads, over=_reach(strides, ceil), filled=True)
    indices = len(node.output) > 1 and node.output[1]
    if (
        not indices
        and dtype.kind == "f"
        and (not ceil or not known)
        and attributes.get("auto_pad", "NOTSET") == "NOTSET"
    ):
        return None
    if not known or editor.shape(node.input[0]) is None:
        editor.refuse("the sizes of its input are not known: give the model static shapes")
    counts = _output_sizes(sizes, windows, strides, pads, ceil)
    x = _padded(editor, node.input[0], sizes, counts, windows, strides, pads, _lowest(dtype))
    if not indices and dtype.kind == "f":
        return [editor.add("MaxPool", x, kernel_shape=kernel, strides=strides, dilations=dilations)]
    parts = _window_parts(editor, x, counts, kernel, strides, dilations)
    stack = editor.add("Concat", *(editor.unsqueeze(part, 0) for part in parts), axis=0)
    values = editor.reduce("ReduceMax", stack, [0], keep=False)
    if not indices:
        return [values]
    best = editor.add("ArgMax", stack, axis=0, keepdims=0)
    return [
        values,
        _positions(
            editor,
            best,
            editor.shape(node.input[0]),
            counts,
            kernel,
            strides,
            dilations,
            pads,
            attributes,
        ),
    ]


def _lowest(dtype: np.dtype) -> float | int:
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _padded(
    editor: Editor,
    x: str,
    sizes: Sequence[int],
    counts: Sequence[int],
    windows: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    number: float,
) -> str:
    """Return the values padded to at least what the windows cover."""
    rank = len(sizes)
    ends = [
        (count - 1) * stride + window - size - pads[i]
        for i, (count, stride, window, size) in enumerate(
            zip(counts, strides, windows, sizes, strict=True)
        )
    ]
    added = [max(end, 0) for end in ends]
    if any(pads[:rank]) or any(added):
        return editor.pad(x, [0, 0, *pads[:rank], 0, 0, *added], number)
    return x


def _window_parts(
    editor: Editor,
    x: str,
    counts: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[str]:
    """Return, for every place in the kernel, the elements that the windows have there."""
    if math.prod(kernel) > MAX_PLACES:
        editor.refuse(f"its windows of {math.prod(kernel)} elements are too large to write out")
    parts = []
    axes = np.arange(2, 2 + len(kernel))
    for place in itertools.product(*map(range, kernel)):
        starts = np.array([p * d for p, d in zip(place, dilations, strict=True)])
        stops = starts + (np.array(counts) - 1) * strides + 1
        parts.append(editor.add("Slice", x, starts, stops, axes, np.array(strides)))
    return parts


def _positions(
    editor: Editor,
    best: str,
    shape: Sequence[int],
    counts: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    attributes: dict[str, Any],
) -> str:
    """Return the place in the flat input of the element ``best`` (its number in the kernel) of each window."""
    rank = len(kernel)
    spatial = list(range(rank))
    order = spatial if attributes.get("storage_order", 0) else spatial[::-1]
    steps, step = [0] * rank, 1
    for i in order:
        steps[i], step = step, step * shape[2 + i]
    base = np.arange(shape[0] * shape[1]).reshape(shape[0], shape[1], *[1] * rank) * step
    for i in spatial:
        start = (np.arange(counts[i]) * strides[i] - pads[i]) * steps[i]
        base = base + start.reshape(-1, *[1] * (rank - 1 - i))
    total: str = editor.add("Add", best, np.zeros((), "int64"))
    rest, offset = total, None
    for i in reversed(spatial):  # digits of the number, last axis first
        quotient = editor.add("Div", rest, np.array(kernel[i]))
        digit = editor.add("Sub", rest, editor.add("Mul", quotient, np.array(kernel[i])))
        term = editor.add("Mul", digit, np.array(dilations[i] * steps[i]))
        offset = term if offset is None else editor.add("Add", offset, term)
        rest = quotient
    return editor.add("Add", offset, base)


def average_pool(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """AveragePool whose windows reach over the end, or are dilated or padded by ``auto_pad``."""
    attributes = editor.attributes(node)
    pads = explicit_pads(editor, node, attributes)
    if pads is None:
        return None
    sizes, kernel, strides, dilations = geometry_of(editor, node, attributes)
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    included = bool(attributes.get("count_include_pad", 0))
    ceil = bool(attributes.get("ceil_mode", 0))
    require_windows(editor, sizes, windows, pads, over=_reach(strides, ceil), filled=not included)
    simple = not ceil and all(d == 1 for d in dilations)
    if simple and attributes.get("auto_pad", "NOTSET") == "NOTSET":
        return None
    if any(size is None for size in sizes):
        editor.refuse("the sizes of its input are not known: give the model static shapes")
    if simple:
        return [
            editor.add(
                "AveragePool", node.input[0], kernel_shape=kernel, strides=strides, pads=pads,
                count_include_pad=int(included),
            )
        ]  # fmt: skip
    counts = _output_sizes(sizes, windows, strides, pads, ceil)
    total = _window_sums(editor, node.input[0], sizes, counts, kernel, strides, dilations, pads)
    dtype = editor.dtype(node.input[0]) or np.dtype("float32")
    number = np.ones(())
    for i in range(len(kernel)):
        places = np.arange(counts[i])[:, None] * strides[i] + np.arange(kernel[i]) * dilations[i]
        places = places - pads[i]
        low = -pads[i] if included else 0
        high = sizes[i] + (pads[i + len(kernel)] if included else 0)
        inside = ((places >= low) & (places < high)).sum(1)
        number = number[..., None] * inside
    return [editor.add("Div", total, number.astype(dtype))]


def _window_sums(
    editor: Editor,
    x: str,
    sizes: Sequence[int],
    counts: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
) -> str:
    """Return the sums over windows, zeros outside: a mean of padded windows times their size."""
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    padded = _padded(editor, x, sizes, counts, windows, strides, pads, 0.0)
    mean = editor.add(
        "AveragePool", padded, kernel_shape=list(kernel), strides=list(strides), dilations=list(dilations),
        count_include_pad=1,
    )  # fmt: skip
    dtype = editor.dtype(x) or np.dtype("float32")
    return editor.add("Mul", mean, np.array(math.prod(kernel), dtype))


def lp_pool(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """LpPool: the root of the sum of powers in each window."""
    attributes = editor.attributes(node)
    pads = explicit_pads(editor, node, attributes)
    if pads is None:
        return None
    sizes, kernel, strides, dilations = geometry_of(editor, node, attributes)
    if any(size is None for size in sizes):
        editor.refuse("the sizes of its input are not known: give the model static shapes")
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    ceil = bool(attributes.get("ceil_mode", 0))
    require_windows(editor, sizes, windows, pads, over=_reach(strides, ceil))
    counts = _output_sizes(sizes, windows, strides, pads, ceil)
    p, dtype = attributes.get("p", 2), editor.dtype(node.input[0]) or np.dtype("float32")
    size = editor.add("Abs", node.input[0])
    power = size if p == 1 else editor.add("Pow", size, np.array(p, dtype))
    total = _window_sums(editor, power, sizes, counts, kernel, strides, dilations, pads)
    return [total if p == 1 else editor.add("Pow", total, np.array(1 / p, dtype))]


def max_unpool(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """MaxUnpool: the values at their places in a tensor of zeros."""
    attributes = editor.attributes(node)
    x, places, target = editor.operands(node, 3)
    shape, dtype = editor.shape(x), editor.dtype(x) or np.dtype("float32")
    if shape is None or (target and editor.value(target) is None):
        editor.refuse("the shape of its result is not known: give the model static shapes")
    kernel = attributes["kernel_shape"]
    rank = len(kernel)
    strides, pads = attributes.get("strides", [1] * rank), attributes.get("pads", [0] * 2 * rank)
    own = [
        *shape[:2],
        *(
            (shape[2 + i] - 1) * strides[i] - pads[i] - pads[i + rank] + kernel[i]
            for i in range(rank)
        ),
    ]
    final = [int(n) for n in editor.value(target)] if target else own
    editor.require_room(*own)
    # The places count in the tensor that the pooling saw: the given shape, or the one it follows.
    zeros = np.zeros(math.prod(own), dtype)
    flat = editor.add(
        "ScatterElements", zeros, editor.reshape(places, [-1]), editor.reshape(x, [-1]), axis=0
    )
    y = editor.reshape(flat, own)
    if final != own:
        amounts = [0] * len(own) + [f - o for f, o in zip(final, own, strict=True)]
        y = editor.pad(y, amounts)
    return [y]
