"""Resize and Upsample in every mode of the specification, one axis after the other.

TVM resizes the last two axes of an image by the ratio of the sizes. Its form stays where that is
what ONNX asks for; elsewhere an axis becomes a Gather (nearest) or a product with a constant matrix
of weights. The weights follow the specification's reference implementation (``op_resize.py`` of the
onnx package).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx

#: Scales are stored as float32: sizes that are closer than this to a whole number are whole.
_WHOLE = 1e-4

#: How opset 10 and those before round, by the name that it has here.
_OUTWARDS = "ceil where the axis shrinks, floor elsewhere"


@dataclass(frozen=True)
class _Axis:
    """How an axis changes: its index, sizes, the scale that maps coordinates, and its region of interest."""

    index: int
    before: int
    after: int
    scale: float
    roi: tuple[float, float]


def resize(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Replace a Resize that TVM would compute otherwise.

    Sizes in the first two axes, scales without a whole size, antialiasing, a region of interest,
    and modes that TVM does not have.
    """
    attributes = editor.attributes(node)
    if editor.opset < 11:  # Resize-10 has the operands of Upsample
        return upsample(editor, node)
    x, roi, scales, sizes = editor.operands(node, 4)
    shape = editor.shape(x)
    if shape is None:
        return None
    given = [editor.value(name) if name else None for name in (roi, scales, sizes)]
    if any(name and value is None for name, value in zip((scales, sizes), given[1:], strict=True)):
        editor.refuse("its scales or sizes are computed at run time")
    if (
        roi
        and given[0] is None
        and attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    ):
        editor.refuse("its region of interest is computed at run time")
    axes = _axes(editor, attributes, shape, *given)
    return _resized(editor, x, axes, attributes, len(shape))


def upsample(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Replace an Upsample, or the Resize of opset 10: nearest and linear by scales, without half pixels.

    These opsets do not say which element is the nearest. Their conformance test (onnx 1.5) and onnxruntime take the
    next one where an axis shrinks and the one before where it grows, of places in float32.
    """
    attributes = editor.attributes(node)
    x, scales = editor.operands(node, 2)
    shape = editor.shape(x)
    values = editor.value(scales) if scales else np.array(attributes.get("scales", ()), "float32")
    if shape is None:
        return None
    if values is None or len(values) != len(shape):
        editor.refuse("its scales are computed at run time")
    if attributes.get("mode", "nearest") not in ("nearest", "linear"):
        editor.refuse(f"the mode {attributes['mode']!r} is unknown")
    whole = all(float(scale).is_integer() for scale in values)
    settings = {
        "mode": attributes.get("mode", "nearest"), "nearest_mode": "floor" if whole else _OUTWARDS,
        "coordinate_transformation_mode": "asymmetric",
    }  # fmt: skip
    return _resized(editor, x, _axes(editor, {}, shape, None, values, None), settings, len(shape))


def _axes(
    editor: Editor,
    attributes: dict[str, Any],
    shape: tuple[int, ...],
    roi: np.ndarray | None,
    scales: np.ndarray | None,
    sizes: np.ndarray | None,
) -> list[_Axis]:
    axes = [axis % len(shape) for axis in attributes.get("axes", range(len(shape)))]
    before = [shape[axis] for axis in axes]
    if sizes is not None and sizes.size:
        after = [int(n) for n in sizes]
        ratios = [n / m for n, m in zip(after, before, strict=True)]
        policy = attributes.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            scale = min(ratios) if policy == "not_larger" else max(ratios)
            ratios = [scale] * len(axes)
            after = [int(scale * n + 0.5) for n in before]
    elif scales is not None and scales.size:
        ratios = [float(s) for s in scales]
        # float32, as the scales are stored: 3 * 0.33333334 is one
        after = [int(np.float32(s) * np.float32(n)) for s, n in zip(scales, before, strict=True)]
    else:
        editor.refuse("it has neither scales nor sizes")
    regions = (
        np.tile([[0.0], [1.0]], len(axes)) if roi is None or not roi.size else roi.reshape(2, -1)
    )
    return [
        _Axis(*values, (float(start), float(end)))
        for *values, start, end in zip(axes, before, after, ratios, *regions, strict=True)
    ]


def _resized(
    editor: Editor, x: str, axes: list[_Axis], attributes: dict[str, Any], rank: int
) -> list[str]:
    cropped = attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    changed = [
        axis
        for axis in axes
        if axis.before != axis.after
        or abs(axis.scale - 1) > 1e-9
        or (cropped and axis.roi != (0.0, 1.0))
    ]
    for axis in changed:
        editor.require_room(axis.before, axis.after)
        if not axis.before or not axis.after or axis.scale <= 0:
            editor.refuse("it resizes to or from nothing")
    if attributes.get("coordinate_transformation_mode") in ("align_corners", "tf_crop_and_resize"):
        _refuse_open_ends(editor, changed)
    if rank == 4 and changed and {axis.index for axis in changed} <= {2, 3}:
        plain = _as_image(editor, x, axes, attributes)
        if plain is not None:
            return [plain]
    if attributes.get("mode", "nearest") == "nearest":
        return [_nearest(editor, x, changed, attributes)]
    return [_weighted(editor, x, changed, attributes, rank)]


def _refuse_open_ends(editor: Editor, axes: list[_Axis]) -> None:
    """Refuse sizes that are not whole where the last element's place depends on them.

    The specification's reference takes the product of size and scale, onnxruntime its whole part.
    """
    for axis in axes:
        size = axis.before * axis.scale
        if abs(size - axis.after) > _WHOLE * max(axis.after, 1):
            editor.refuse(
                f"it scales {axis.before} by {axis.scale:g} to {size:g}, of which runtimes take different parts; "
                "export it with sizes"
            )


def _as_image(editor: Editor, x: str, axes: list[_Axis], attributes: dict[str, Any]) -> str | None:
    """Return TVM's own form of the resizing, where it has one that means the same."""
    mode = attributes.get("mode", "nearest")
    transform = attributes.get("coordinate_transformation_mode", "half_pixel")
    whole = all(abs(a.before * a.scale - a.after) <= _WHOLE * max(a.after, 1) for a in axes)
    if attributes.get("antialias", 0) or attributes.get("exclude_outside", 0):
        return None
    spatial = {a.index: a for a in axes}
    # A float32 quotient can be just below a whole number: only whole factors are safe.
    factors = all(a.after % a.before == 0 for a in axes)
    fits = {
        "nearest": whole
        and factors
        and (transform, attributes.get("nearest_mode"))
        in (
            ("asymmetric", "floor"),
            ("half_pixel", "round_prefer_floor"),
            ("half_pixel", None),
        ),
        "linear": (transform == "half_pixel" and whole)
        or (
            transform == "pytorch_half_pixel"
            and whole
            and all(a.after > 1 for a in axes if a.index > 1)
        )
        or (transform == "asymmetric" and whole)
        or (
            transform == "align_corners" and whole and all(a.after > 1 for a in axes if a.index > 1)
        ),
        "cubic": transform == "half_pixel" and whole,
    }.get(mode, False)
    if not fits:
        return None
    sizes = [spatial[i].after if i in spatial else editor.shape(x)[i] for i in range(4)]
    settings = {"mode": mode, "coordinate_transformation_mode": transform}
    for name in ("nearest_mode", "cubic_coeff_a"):
        if name in attributes:
            settings[name] = attributes[name]
    return editor.add("Resize", x, "", "", np.array(sizes, "int64"), **settings)


def _coordinates(axis: _Axis, transform: str, dtype: str = "float64") -> np.ndarray:
    """Return where the elements of the resized axis lie in the original one."""
    y = np.arange(axis.after, dtype=dtype)  # numpy's rules keep its type from here on
    width = axis.scale * axis.before
    if transform == "align_corners":
        return y * 0 if width == 1 else y * (axis.before - 1) / (width - 1)
    if transform == "asymmetric":
        return y / axis.scale
    if transform == "tf_crop_and_resize":
        start, end = axis.roi
        last = axis.before - 1
        if width == 1:
            return y * 0 + (start + end) * last / 2
        return y * (end - start) * last / (width - 1) + start * last
    if transform == "pytorch_half_pixel" and axis.after == 1:
        return y * 0
    if transform == "tf_half_pixel_for_nn":  # of opset 11 alone
        return (y + 0.5) / axis.scale
    half = (y + 0.5) / axis.scale - 0.5
    if transform == "half_pixel_symmetric":
        half = half + axis.before / 2 * (1 - axis.after / width)
    return half


def _outside(axis: _Axis, attributes: dict[str, Any]) -> np.ndarray:
    """Return which elements get the extrapolation value."""
    transform = attributes.get("coordinate_transformation_mode", "half_pixel")
    if transform != "tf_crop_and_resize":
        return np.zeros(axis.after, bool)
    where = _coordinates(axis, transform)
    return (where < 0) | (where > axis.before - 1)


def _extrapolated(
    editor: Editor,
    value: str,
    axis: _Axis,
    attributes: dict[str, Any],
    after: int,
    dtype: np.dtype,
) -> str:
    """Put the extrapolation value where the coordinates lie outside; ``after`` axes follow this one."""
    outside = _outside(axis, attributes)
    if not outside.any():
        return value
    number = np.array(attributes.get("extrapolation_value", 0.0), dtype)
    return editor.add("Where", outside.reshape(-1, *[1] * after), number, value)


def _nearest(editor: Editor, x: str, axes: list[_Axis], attributes: dict[str, Any]) -> str:
    rounding = attributes.get("nearest_mode", "round_prefer_floor")
    transform = attributes.get("coordinate_transformation_mode", "half_pixel")
    value, rank = x, len(editor.shape(x))
    dtype = editor.dtype(x) or np.dtype("float32")
    for axis in axes:
        # The specification's reference takes places in float64, and sizes too, which need not agree with those that
        # onnx infers in float32.
        inferred_only = int(axis.scale * axis.before) != axis.after
        narrow = rounding == _OUTWARDS or inferred_only
        where = _coordinates(axis, transform, "float32" if narrow else "float64")
        index = {
            "round_prefer_floor": lambda w: np.ceil(w - 0.5),
            "round_prefer_ceil": lambda w: np.floor(w + 0.5),
            "floor": np.floor,
            "ceil": np.ceil,
            _OUTWARDS: np.ceil if axis.scale < 1 else np.floor,
        }[rounding](where)
        index = np.clip(index, 0, axis.before - 1).astype("int64")
        value = editor.add("Gather", value, index, axis=axis.index)
        value = _extrapolated(editor, value, axis, attributes, rank - 1 - axis.index, dtype)
    return value if axes else editor.add("Identity", value)


def _weighted(
    editor: Editor, x: str, axes: list[_Axis], attributes: dict[str, Any], rank: int
) -> str:
    dtype = editor.dtype(x) or np.dtype("float32")
    whole_numbers = dtype.kind in "iu"
    wide = np.dtype("float32") if whole_numbers else dtype
    value = editor.cast(x, wide) if whole_numbers else x
    for axis in axes:
        matrix = _weights(axis, attributes).astype(wide)
        if axis.index == rank - 1:
            value = editor.add("MatMul", value, np.ascontiguousarray(matrix.T))
        elif axis.index == rank - 2:
            value = editor.add("MatMul", matrix, value)
        else:
            order = [*(i for i in range(rank) if i != axis.index), axis.index]
            value = editor.add("Transpose", value, perm=order)
            value = editor.add("MatMul", value, np.ascontiguousarray(matrix.T))
            value = editor.add("Transpose", value, perm=np.argsort(order).tolist())
        value = _extrapolated(editor, value, axis, attributes, rank - 1 - axis.index, wide)
    if whole_numbers:  # saturating, as the reference casts
        bounds = np.iinfo(dtype)
        low, high = np.array(bounds.min, "float32"), np.array(bounds.max, "float32")
        value = editor.cast(editor.add("Min", editor.add("Max", value, low), high), dtype)
    return value if axes else editor.add("Identity", value)


def _weights(axis: _Axis, attributes: dict[str, Any]) -> np.ndarray:
    """Return the matrix [after, before] whose product with the axis resizes it."""
    transform = attributes.get("coordinate_transformation_mode", "half_pixel")
    where = _coordinates(axis, transform)
    cubic = attributes.get("mode") == "cubic"
    scale = min(axis.scale, 1.0) if attributes.get("antialias", 0) else 1.0
    reach = 2 if cubic else 1
    first = int(np.floor(-reach / scale)) + 1
    left = np.ceil(where).astype(int) - 1  # the element before, also where a coordinate is whole
    offsets = np.arange(first, 2 - first)
    distance = np.abs(scale * (offsets[None] - (where - left)[:, None]))
    if cubic:
        a = attributes.get("cubic_coeff_a", -0.75)
        inner = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        outer = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        weights = np.where(distance <= 1, inner, np.where(distance < 2, outer, 0.0))
    else:
        weights = np.clip(1 - distance, 0, 1)
    if attributes.get("antialias", 0):
        weights /= weights.sum(1, keepdims=True)
    index = left[:, None] + offsets[None]
    if attributes.get("exclude_outside", 0):
        weights = np.where((index < 0) | (index >= axis.before), 0.0, weights)
        weights /= weights.sum(1, keepdims=True)
    matrix = np.zeros((axis.after, axis.before))
    rows = np.broadcast_to(np.arange(axis.after)[:, None], index.shape)
    np.add.at(matrix, (rows, np.clip(index, 0, axis.before - 1)), weights)
    return matrix
