"""Convolutions: padding made explicit, and the forms that TVM 0.27 lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..onnx_editor import Editor
from .geometry import explicit_pads, geometry_of, padding_mode, require_windows

if TYPE_CHECKING:
    import onnx


def conv(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Conv with explicit padding."""
    attributes = editor.attributes(node)
    pads = explicit_pads(editor, node, attributes)
    if pads is None:
        return None
    _require_windows(editor, node, pads)
    if attributes.get("auto_pad", "NOTSET") == "NOTSET":
        return None
    attributes.pop("auto_pad")
    return [editor.add("Conv", *node.input, **{**attributes, "pads": pads})]


def _require_windows(editor: Editor, node: onnx.NodeProto, pads: list[int]) -> None:
    geometry = geometry_of(editor, node, editor.attributes(node))
    if geometry is not None:
        sizes, kernel, _, dilations = geometry
        windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        require_windows(editor, sizes, windows, pads)


def conv_transpose(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """ConvTranspose with explicit padding, dilated kernels written out."""
    attributes = editor.attributes(node)
    geometry = geometry_of(editor, node, attributes)
    if geometry is None:
        return None
    sizes, kernel, strides, dilations = geometry
    mode, rank = padding_mode(editor, attributes), len(kernel)
    attributes.pop("auto_pad", None)
    stored = editor.value(node.input[1])
    if stored is not None and not np.isfinite(stored).all():
        editor.refuse(
            "its kernel holds NaN or infinities, which TVM multiplies by zeros between the elements"
        )
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
        if (
            mode.startswith("SAME")
            and min(total) < 0
            and "output_shape" not in editor.attributes(node)
        ):
            editor.refuse(
                f"its windows of {windows} elements are smaller than its strides of {strides}, which runtimes pad "
                f"differently for {mode}: export it with pads and output_padding"
            )
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
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    editor.require_room(*stored.shape[:2], *reach)
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


def integer_conv(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """ConvInteger: Conv of the values less their zero points, in int32."""
    x, w, x_zero, w_zero = editor.operands(node, 4)
    pads = explicit_pads(editor, node, editor.attributes(node))
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
    _require_windows(editor, node, pads)
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
    pads = explicit_pads(editor, plain, editor.attributes(node))
    total = _integer_conv(editor, plain, x, w, x_zero, w_zero, pads)
    per_channel = [1, -1, *[1] * (len(pads) // 2)]
    if bias:
        total = editor.add("Add", total, editor.reshape(bias, per_channel))
    scale = editor.add("Mul", x_scale, w_scale)
    if (editor.shape(w_scale) or ()) not in ((), (1,)):
        scale = editor.reshape(scale, per_channel)
    return [requantized(editor, total, scale, y_scale, y_zero)]
