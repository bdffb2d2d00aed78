"""Sizes, kernels and paddings of convolutions and poolings.

Formulas are those of the ONNX operator specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx


def same_padding(
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


def geometry_of(
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


def padding_mode(editor: Editor, attributes: dict[str, Any]) -> str:
    """Return ``auto_pad``; other texts than the specification's are refused."""
    mode = attributes.get("auto_pad", "NOTSET") or "NOTSET"
    if mode not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        editor.refuse(f"its auto_pad {mode!r} is none of NOTSET, VALID, SAME_UPPER and SAME_LOWER")
    return mode


def explicit_pads(
    editor: Editor, node: onnx.NodeProto, attributes: dict[str, Any]
) -> list[int] | None:
    """Return the padding that ``auto_pad`` or ``pads`` stand for; None where it is not known."""
    geometry = geometry_of(editor, node, attributes)
    mode = padding_mode(editor, attributes)
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
    return same_padding(sizes, windows, strides, upper=mode == "SAME_UPPER")


def require_windows(
    editor: Editor,
    sizes: Sequence[int | None],
    windows: Sequence[int],
    pads: Sequence[int],
    *,
    over: Sequence[int] | None = None,
    filled: bool = False,
) -> None:
    """Refuse windows that do not fit into the padded input.

    Parameters
    ----------
    over : sequence of int, optional
        How many elements the only window of an axis may reach over the end (``ceil_mode``).
    filled : bool
        Refuse padding as wide as the windows, too: some would hold nothing else.
    """
    rank = len(windows)
    over = over or [0] * rank
    for i, (size, window) in enumerate(zip(sizes, windows, strict=True)):
        around = pads[i] + pads[i + rank]
        if size is not None and size + around + over[i] < window:
            editor.refuse(
                f"its windows of {window} elements do not fit into axis {2 + i} of {size} elements, "
                f"padded by {around}"
            )
        if filled and max(pads[i], pads[i + rank]) >= window:
            editor.refuse(
                f"its padding of axis {2 + i} is as wide as its windows of {window} elements"
            )
