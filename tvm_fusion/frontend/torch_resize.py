"""ATen's resizing operators.

TVM's resize2d computes the same where the coordinates agree; elsewhere (a scale factor that was not recomputed from
the sizes, antialiasing, nearest neighbours of a non-integer ratio) the interpolation is written as products with the
matrices that PyTorch's definition gives, or as a choice of rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import fx

from ..compat import BlockBuilder, ir, relax
from .torch_arguments import Arguments, static_dims

#: PyTorch's cubic coefficient, and the one of its antialiased form.
_CUBIC, _CUBIC_ANTIALIASED = -0.75, -0.5


def _image(arguments: Arguments) -> str:
    return "input" if "input" in arguments else "self"


def _sizes(arguments: Arguments) -> tuple[list[int], list[int], list[float | None]]:
    """Sizes before and after, and the scale factors that were given, for the spatial axes."""
    before = static_dims(arguments.fake(_image(arguments)))[2:]
    after = arguments["output_size"]
    if "scale_factors" not in arguments:
        factors = [arguments["scales_h"], arguments["scales_w"]]
        return before, [int(size) for size in after], factors
    if after is not None:
        return before, [int(size) for size in after], [None] * len(before)
    scales = [float(factor) for factor in arguments["scale_factors"]]
    sizes = [math.floor(size * scale) for size, scale in zip(before, scales, strict=True)]
    return before, sizes, list(scales)


def _step(before: int, after: int, factor: float | None) -> float:
    """Distance of two neighbouring outputs, in inputs: from the scale factor where it was given."""
    return 1.0 / factor if factor else before / after


def nearest_indices(before: int, after: int, factor: float | None) -> np.ndarray:
    """Return the input that each output of ``upsample_nearest`` takes: floor of its place, in float32 as ATen does."""
    step = np.float32(_step(before, after, factor))
    places = np.floor(np.arange(after, dtype="float32") * step).astype("int64")
    return np.minimum(places, before - 1)


def _linear(distance: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, 1.0 - np.abs(distance))


def _cubic(a: float) -> Callable[[np.ndarray], np.ndarray]:
    """Keys' kernel (Cubic convolution interpolation for digital image processing, 1981, equation 4 with free a)."""

    def kernel(distance: np.ndarray) -> np.ndarray:
        x = np.abs(distance)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * a
        return np.where(x < 1, near, np.where(x < 2, far, 0.0))

    return kernel


def interpolation_matrix(
    before: int,
    after: int,
    factor: float | None,
    *,
    cubic: bool,
    align_corners: bool,
    antialias: bool,
) -> np.ndarray:
    """Return the weights ``[after, before]`` of each input in each output, as ATen defines them.

    Without antialiasing, a neighbour outside the image counts as the edge; with it the kernel is widened by the step
    and its weights inside the image are normalised.
    """
    if align_corners and antialias:
        # ATen takes the step from the corners and the centres as without them.
        step = (before - 1) / (after - 1) if after > 1 else 0.0
        centres = (np.arange(after) + 0.5) * step - 0.5
    elif align_corners:
        step = (before - 1) / (after - 1) if after > 1 else 0.0
        centres = np.arange(after) * step
    else:
        step = _step(before, after, factor)
        centres = (np.arange(after) + 0.5) * step - 0.5
    kernel = _cubic(_CUBIC_ANTIALIASED if antialias else _CUBIC) if cubic else _linear
    matrix = np.zeros((after, before))
    if antialias:
        width = max(step, 1.0)
        reach = (2 if cubic else 1) * width
        for row, centre in enumerate(centres):
            first = max(int(centre - reach + 1.0), 0)
            last = min(int(centre + reach + 1.0), before)
            columns = np.arange(first, last)
            weights = kernel((columns - centre) / width)
            matrix[row, first:last] = weights / weights.sum()
        return matrix
    if not cubic:
        centres = np.maximum(centres, 0.0)
    for row, centre in enumerate(centres):
        base = math.floor(centre)
        for column in range(base - 1, base + 3) if cubic else range(base, base + 2):
            matrix[row, min(max(column, 0), before - 1)] += kernel(np.array(centre - column))
    return matrix


def _along(builder: BlockBuilder, value: ir.Expr, axis: int, matrix: np.ndarray) -> ir.Expr:
    """Multiply a matrix along an axis of ``[N, C, H, W]``; nothing for the identity."""
    if matrix.shape[0] == matrix.shape[1] and np.array_equal(matrix, np.eye(len(matrix))):
        return value
    dtype = str(value.ty.dtype)
    if axis == 3:
        return builder.emit(relax.op.matmul(value, relax.const(matrix.T.copy(), dtype)))
    return builder.emit(relax.op.matmul(relax.const(matrix, dtype), value))


def _nearest(importer: Any, node: fx.Node) -> ir.Expr:
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    value = arguments[_image(arguments)]
    before, after, factors = _sizes(arguments)
    if len(before) == 2 and all(new % old == 0 for old, new in zip(before, after, strict=True)):
        resize = relax.op.image.resize2d(
            value, tuple(after), layout="NCHW", method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric", rounding_method="floor",
        )  # fmt: skip
        return builder.emit(resize)
    for axis, sizes in enumerate(zip(before, after, factors, strict=True), start=2):
        indices = nearest_indices(*sizes)
        if len(indices) != sizes[0] or (indices != np.arange(len(indices))).any():
            value = builder.emit(relax.op.take(value, relax.const(indices), axis=axis))
    return value


def _interpolation(*, cubic: bool, antialias: bool) -> Callable[[Any, fx.Node], ir.Expr]:
    def convert(importer: Any, node: fx.Node) -> ir.Expr:
        builder, arguments = importer.block_builder, Arguments(importer.env, node)
        value, align_corners = arguments[_image(arguments)], bool(arguments["align_corners"])
        before, after, factors = _sizes(arguments)
        if not antialias and _agrees(before, after, factors, align_corners):
            resize = relax.op.image.resize2d(
                value, tuple(after), layout="NCHW", method="cubic" if cubic else "linear",
                coordinate_transformation_mode="align_corners" if align_corners else "half_pixel",
                cubic_alpha=_CUBIC,
            )  # fmt: skip
            return builder.emit(resize)
        for axis, sizes in enumerate(zip(before, after, factors, strict=True), start=2):
            matrix = interpolation_matrix(
                *sizes, cubic=cubic, align_corners=align_corners, antialias=antialias
            )
            value = _along(builder, value, axis, matrix)
        return value

    return convert


def _agrees(
    before: Sequence[int],
    after: Sequence[int],
    factors: Sequence[float | None],
    align_corners: bool,
) -> bool:
    """Whether the sizes alone give the steps: TVM's resize2d knows no other."""
    if align_corners:
        return True
    return all(
        factor is None or abs(old * factor - new) < 1e-9
        for old, new, factor in zip(before, after, factors, strict=True)
    )


#: Converters by the name of the ATen overload.
RESIZES: dict[str, Callable[[Any, fx.Node], ir.Expr]] = {
    **{f"upsample_nearest{n}d.vec": _nearest for n in (1, 2, 3)},
    "upsample_bilinear2d.vec": _interpolation(cubic=False, antialias=False),
    "upsample_bicubic2d.vec": _interpolation(cubic=True, antialias=False),
    "_upsample_bilinear2d_aa.default": _interpolation(cubic=False, antialias=True),
    "_upsample_bilinear2d_aa.vec": _interpolation(cubic=False, antialias=True),
    "_upsample_bicubic2d_aa.default": _interpolation(cubic=True, antialias=True),
    "_upsample_bicubic2d_aa.vec": _interpolation(cubic=True, antialias=True),
}
