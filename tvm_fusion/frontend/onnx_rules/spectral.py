"""Fourier transforms as products with matrices of cosines and sines, in float64: long sums that cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx


def discrete_fourier(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """DFT as products with matrices of cosines and sines."""
    attributes = editor.attributes(node)
    x, length, axis = editor.operands(node, 3)
    shape = editor.shape(x)
    size, along = (editor.value(name) if name else None for name in (length, axis))
    if shape is None or (length and size is None) or (axis and along is None):
        editor.refuse("its length, axis or shape is computed at run time")
    default = 1 if editor.opset < 20 else -2
    d = int(along.item()) if along is not None else attributes.get("axis", default)
    d %= len(shape)
    inverse, onesided = attributes.get("inverse", 0), attributes.get("onesided", 0)
    whole = 2 * (shape[d] - 1) if inverse and onesided else shape[d]
    n = int(size.item()) if size is not None else whole
    narrow, dtype = editor.dtype(x) or np.dtype("float32"), np.dtype("float64")
    x = editor.cast(x, dtype)  # long sums that cancel
    if shape[d] > n and not (inverse and onesided):
        x = editor.slice(x, d, 0, n)
    used = min(shape[d], n)
    editor.require_room(n, used)
    # A real spectrum in full from its first half: X[n - k] is the conjugate of X[k].
    angle = 2 * np.pi * np.outer(np.arange(n), np.arange(used)) / n * (1 if inverse else -1)
    cosine, sine = np.cos(angle), np.sin(angle)
    if onesided and not inverse:
        cosine, sine = cosine[: n // 2 + 1], sine[: n // 2 + 1]
    if inverse:
        cosine, sine = cosine / n, sine / n
    # [..., d, ..., 2] -> [..., 2, d]
    order = [*(i for i in range(len(shape) - 1) if i != d), len(shape) - 1, d]
    value = editor.add("Transpose", x, perm=order)
    if inverse and onesided:
        return [editor.cast(_real_inverse(editor, value, shape, order, n), narrow)]
    parts = [editor.slice(value, -2, i, i + 1) for i in range(shape[-1])]

    def product(part: str, matrix: np.ndarray) -> str:
        return editor.add("MatMul", part, np.ascontiguousarray(matrix.T.astype(dtype)))

    real, imaginary = product(parts[0], cosine), product(parts[0], sine)
    if len(parts) == 2:
        real = editor.add("Sub", real, product(parts[1], sine))
        imaginary = editor.add("Add", imaginary, product(parts[1], cosine))
    both = editor.add("Concat", real, imaginary, axis=-2)
    y = editor.add("Transpose", both, perm=np.argsort(order).tolist())
    return [editor.cast(y, narrow)]


def _real_inverse(
    editor: Editor, value: str, shape: tuple[int, ...], order: list[int], n: int
) -> str:
    """Return the real signal of a half spectrum [..., 2, bins] in float64."""
    bins = min(shape[order[-1]], n // 2 + 1)
    angle = 2 * np.pi * np.outer(np.arange(n), np.arange(bins)) / n
    weight = np.full(bins, 2.0)
    weight[0] = 1.0
    if n % 2 == 0 and bins == n // 2 + 1:
        weight[-1] = 1.0
    value = editor.slice(value, -1, 0, bins)
    real, imaginary = (editor.slice(value, -2, i, i + 1) for i in (0, 1))
    cosine, sine = ((weight * f(angle) / n).T for f in (np.cos, np.sin))
    y = editor.add(
        "Sub", editor.add("MatMul", real, np.ascontiguousarray(cosine)),
        editor.add("MatMul", imaginary, np.ascontiguousarray(sine)),
    )  # fmt: skip
    return editor.add("Transpose", y, perm=np.argsort(order).tolist())


def short_time_fourier(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """STFT: frames of the signal, each times the window, transformed."""
    signal, step, window, length = editor.operands(node, 4)
    shape, by = editor.shape(signal), editor.value(step)
    size = editor.value(length) if length else None
    if size is None and window and not length:
        size = np.array((editor.shape(window) or (0,))[0])
    if shape is None or by is None or size is None or not size.item():
        editor.refuse("its step, length or shape is computed at run time")
    n, own = int(size.item()), editor.dtype(signal) or np.dtype("float32")
    if int(by.item()) < 1 or not 0 < n <= shape[1]:
        editor.refuse("its step or length does not fit its signal")
    frames = (shape[1] - n) // int(by.item()) + 1
    editor.require_room(n, max(n, frames))
    index = np.arange(frames)[:, None] * int(by.item()) + np.arange(n)
    value = editor.add("Gather", editor.cast(signal, "float64"), index, axis=1)
    if len(shape) == 2:  # [batch, frames, n], without an axis of parts
        value = editor.reshape(value, [shape[0], frames, n, 1])
    if window:
        wide = editor.reshape(editor.cast(window, "float64"), [-1, 1])
        value = editor.add("Mul", value, wide)
    half = editor.attributes(node).get("onesided", 1)
    angle = -2 * np.pi * np.outer(np.arange(n // 2 + 1 if half else n), np.arange(n)) / n
    cosine, sine = np.cos(angle), np.sin(angle)
    real = editor.slice(value, 3, 0, 1)
    parts = [editor.add("MatMul", cosine, real), editor.add("MatMul", sine, real)]
    if len(shape) == 3 and shape[2] == 2:
        imaginary = editor.slice(value, 3, 1, 2)
        parts[0] = editor.add("Sub", parts[0], editor.add("MatMul", sine, imaginary))
        parts[1] = editor.add("Add", parts[1], editor.add("MatMul", cosine, imaginary))
    return [editor.cast(editor.add("Concat", *parts, axis=3), own)]
