"""Convolutions and poolings: padding made explicit, and the forms that TVM 0.27 lacks.

Formulas of padding are those of the ONNX operator specification.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx


def _same_padding(
    sizes: Sequence[int], windows: Sequence[int], strides: Sequence[int], *, upper: bool
) -> list[int]:
    """Return begin and end paddings that give ceil(size / stride) windows; the odd one at the end if ``upper``."""
    begins, ends = [], []
    for size, window, stride in zip(sizes, windows, strides, strict=True):
        total = max((-(-size // stride) - 1) * stride + window - size, 0)
        less, more = total // 2, total - total // 2
        begins.append(less if upper else more)
        ends.append(more if upper else less)
    return begins + ends


def _geometry(
    editor: Editor, node: onnx.NodeProto, attributes: dict[str, Any]
) -> tuple[list[int], list[int], list[int], list[int]] | None:
    """Return spatial sizes, kernel, strides and dilations of a node; None where they are not known."""
    dims = editor.dims(node.input[0])
    if dims is None or len(dims) < 3:
        return None
    rank = len(dims) - 2
    kernel = attributes.get("kernel_shape")
    if kernel is None:
        weights = editor.shape(node.input[1]) if len(node.input) > 1 else None
        if weights is None:
            return None
        kernel = weights[2:]
    strides = attributes.get("strides", [1] * rank)
    return dims[2:], list(kernel), list(strides), list(attributes.get("dilations", [1] * rank))


def _explicit_pads(
    editor: Editor, node: onnx.NodeProto, attributes: dict[str, Any]
) -> list[int] | None:
    """Return the padding that ``auto_pad`` or ``pads`` stand for; None where it is not known."""
    geometry = _geometry(editor, node, attributes)
    mode = attributes.get("auto_pad", "NOTSET")
    if geometry is None:
        return None
    sizes, kernel, strides, dilations = geometry
    if mode == "NOTSET":
        return list(attributes.get("pads", [0] * 2 * len(kernel)))
    if mode == "VALID":
        return [0] * 2 * len(kernel)
    if any(size is None for size in sizes):
        editor.refuse(f"the sizes that {mode} pads are not known: give the model static shapes")
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    return _same_padding(sizes, windows, strides, upper=mode == "SAME_UPPER")


def conv(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Conv with explicit padding."""
    attributes = editor.attributes(node)
    if attributes.get("auto_pad", "NOTSET") == "NOTSET":
        return None
    pads = _explicit_pads(editor, node, attributes)
    if pads is None:
        return None
    attributes.pop("auto_pad")
    return [editor.add("Conv", *node.input, **{**attributes, "pads": pads})]


def conv_transpose(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """ConvTranspose with explicit padding, dilated kernels written out."""
    attributes = editor.attributes(node)
    geometry = _geometry(editor, node, attributes)
    if geometry is None:
        return None
    sizes, kernel, strides, dilations = geometry
    mode, rank = attributes.pop("auto_pad", "NOTSET"), len(kernel)
    target = attributes.pop("output_shape", None)
    extra = list(attributes.get("output_padding", [0] * rank))
    dilated = any(d != 1 for d in dilations)
    if (
        mode == "NOTSET"
        and target is None
        and not dilated
        and all(e < s for e, s in zip(extra, strides, strict=True))
    ):
        return None
    if any(size is None for size in sizes):
        editor.refuse("the sizes of its input are not known: give the model static shapes")
    pads = list(attributes.get("pads", [0] * 2 * rank))
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if mode == "VALID":
        pads = [0] * 2 * rank
    if target is not None or mode.startswith("SAME"):
        target = (
            list(target)[-rank:]
            if target is not None
            else [n * s for n, s in zip(sizes, strides, strict=True)]
        )
        total = [
            s * (n - 1) + e + w - t
            for s, n, e, w, t in zip(strides, sizes, extra, windows, target, strict=True)
        ]
        less, more = [max(t, 0) // 2 for t in total], [max(t, 0) - max(t, 0) // 2 for t in total]
        pads = less + more if mode == "SAME_UPPER" else more + less
        extra = [e + max(-t, 0) for e, t in zip(extra, total, strict=True)]
    weights = _dilated(editor, node.input[1], kernel, dilations) if dilated else node.input[1]
    attributes.update(pads=pads, dilations=[1] * rank, kernel_shape=windows)
    # What is beyond the strides gets no products, only the bias.
    attributes["output_padding"] = [min(e, s - 1) for e, s in zip(extra, strides, strict=True)]
    beyond = [e - min(e, s - 1) for e, s in zip(extra, strides, strict=True)]
    y = editor.add("ConvTranspose", node.input[0], weights, **attributes)
    if any(beyond):
        y = editor.pad(y, [0] * (rank + 4) + beyond)
    if len(node.input) > 2 and node.input[2]:
        y = editor.add("Add", y, editor.reshape(node.input[2], [1, -1, *[1] * rank]))
    return [y]


def _dilated(editor: Editor, weights: str, kernel: Sequence[int], dilations: Sequence[int]) -> str:
    """Return the kernel with zeros between its elements."""
    stored = editor.value(weights)
    if stored is None:
        return _dilated_later(editor, weights, kernel, dilations)
    wide = np.zeros(
        (*stored.shape[:2], *((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))),
        stored.dtype,
    )
    wide[(slice(None), slice(None), *(slice(None, None, d) for d in dilations))] = stored
    return editor.store(wide)


def _dilated_later(
    editor: Editor, weights: str, kernel: Sequence[int], dilations: Sequence[int]
) -> str:
    """Put zeros between the elements of a kernel that is computed: an axis after each one, padded and merged."""
    shape = editor.shape(weights)
    if shape is None:
        editor.refuse("the shape of its kernel is not known: give the model static shapes")
    sizes = list(shape)
    for i, (k, d) in enumerate(zip(kernel, dilations, strict=True)):
        axis = 2 + i
        if d == 1:
            continue
        weights = editor.reshape(weights, [*sizes[: axis + 1], 1, *sizes[axis + 1 :]])
        amounts = [0] * 2 * (len(sizes) + 1)
        amounts[len(sizes) + 1 + axis + 1] = d - 1
        sizes[axis] = k * d
        weights = editor.reshape(editor.pad(weights, amounts), sizes)
        sizes[axis] = (k - 1) * d + 1
        weights = editor.slice(weights, axis, 0, sizes[axis])
    return weights


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


def max_pool(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """MaxPool with explicit padding; with the indices of the maxima, if they are asked for."""
    attributes = editor.attributes(node)
    pads = _explicit_pads(editor, node, attributes)
    if pads is None:
        return None
    sizes, kernel, strides, dilations = _geometry(editor, node, attributes)
    dtype = editor.dtype(node.input[0]) or np.dtype("float32")
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    known = all(size is not None for size in sizes)
    ceil = bool(attributes.get("ceil_mode", 0))
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
    pads = _explicit_pads(editor, node, attributes)
    if pads is None:
        return None
    sizes, kernel, strides, dilations = _geometry(editor, node, attributes)
    ceil = bool(attributes.get("ceil_mode", 0))
    simple = not ceil and all(d == 1 for d in dilations)
    if simple and attributes.get("auto_pad", "NOTSET") == "NOTSET":
        return None
    if any(size is None for size in sizes):
        editor.refuse("the sizes of its input are not known: give the model static shapes")
    included = bool(attributes.get("count_include_pad", 0))
    if simple:
        return [
            editor.add(
                "AveragePool", node.input[0], kernel_shape=kernel, strides=strides, pads=pads,
                count_include_pad=int(included),
            )
        ]  # fmt: skip
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
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
    pads = _explicit_pads(editor, node, attributes)
    if pads is None:
        return None
    sizes, kernel, strides, dilations = _geometry(editor, node, attributes)
    if any(size is None for size in sizes):
        editor.refuse("the sizes of its input are not known: give the model static shapes")
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    counts = _output_sizes(sizes, windows, strides, pads, bool(attributes.get("ceil_mode", 0)))
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


def integer_conv(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """ConvInteger: Conv of the values less their zero points, in int32."""
    x, w, x_zero, w_zero = editor.operands(node, 4)
    pads = _explicit_pads(editor, node, editor.attributes(node))
    return [_integer_conv(editor, node, x, w, x_zero, w_zero, pads)]


def _integer_conv(
    editor: Editor,
    node: onnx.NodeProto,
    x: str,
    w: str,
    x_zero: str,
    w_zero: str,
    pads: list[int] | None,
) -> str:
    attributes = editor.attributes(node)
    attributes.pop("auto_pad", None)
    if pads is None:
        editor.refuse("the sizes of its input are not known: give the model static shapes")
    rank = len(pads) // 2

    def centred(value: str, zero: str, axis_first: bool) -> str:
        wide = editor.cast(value, "int32")
        if not zero:
            return wide
        point = editor.cast(zero, "int32")
        if axis_first and (editor.shape(zero) or ()) not in ((), (1,)):
            point = editor.reshape(point, [-1, *[1] * (rank + 1)])
        return editor.add("Sub", wide, point)

    operands = centred(x, x_zero, False), centred(w, w_zero, True)
    return editor.add("Conv", *operands, **{**attributes, "pads": pads})


def quantized_conv(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """QLinearConv: an int32 convolution, scaled and rounded once."""
    from .quantization import requantized

    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = editor.operands(node, 9)
    plain = type(node)()
    plain.CopyFrom(node)
    plain.input[:] = [x, w]
    pads = _explicit_pads(editor, plain, editor.attributes(node))
    total = _integer_conv(editor, plain, x, w, x_zero, w_zero, pads)
    per_channel = [1, -1, *[1] * (len(pads) // 2)]
    if bias:
        total = editor.add("Add", total, editor.reshape(bias, per_channel))
    scale = editor.add("Mul", x_scale, w_scale)
    if (editor.shape(w_scale) or ()) not in ((), (1,)):
        scale = editor.reshape(scale, per_channel)
    return [requantized(editor, total, scale, y_scale, y_zero)]
