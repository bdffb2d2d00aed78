"""Resizing."""

from __future__ import annotations

from collections.abc import Sequence

from ....compat import ir, relax
from ..site import Site
from .registry import operator

_METHODS = ("nearest_neighbor", "linear", "cubic")
_COORDINATES = (
    "half_pixel",
    "align_corners",
    "asymmetric",
    "pytorch_half_pixel",
    "tf_half_pixel_for_nn",
)
_ROUNDING = ("round", "floor", "ceil", "round_prefer_floor", "round_prefer_ceil")

#: Names that TVM 0.8 and older scripts use.
_OLD_METHODS = {"bilinear": "linear", "bicubic": "cubic", "nearest": "nearest_neighbor"}


def _resize(
    site: Site,
    x: ir.Expr,
    size: list[int],
    layout: str,
    method: str,
    coordinates: str,
    rounding: str,
) -> ir.Expr:
    result = relax.op.image.resize2d(
        x, tuple(size), layout=layout, method=method, coordinate_transformation_mode=coordinates,
        rounding_method=rounding, cubic_alpha=site.number("cubic_alpha", -0.5),
        cubic_exclude=site.integer("cubic_exclude", 0), extrapolation_value=site.number("extrapolation_value", 0.0),
    )  # fmt: skip
    return site.emit(result)


@operator("image.resize2d")
def resize2d(site: Site, x: ir.Expr) -> ir.Expr:
    """A map resized to given sizes."""
    layout = site.text("layout", "NCHW", "NHWC", default="NCHW")
    site.rank(x, 4)
    size = site.integers("size", count=2, low=1, high=1 << 20)
    if any(site.attr("roi", [])):
        site.refuse("it resizes a region: cut it out first")
    method = site.text("method", *_METHODS, *_OLD_METHODS, default="linear")
    coordinates = site.text("coordinate_transformation_mode", *_COORDINATES, default="half_pixel")
    rounding = site.text("rounding_method", *_ROUNDING, default=_default_rounding(coordinates))
    if method in ("nearest_neighbor", "nearest"):
        sizes = [site.shape(x)[layout.index(letter)] for letter in "HW"]
        rounding = _rounding(site, sizes, size, coordinates, rounding)
    x = site.cast(x, site.dtype("out_dtype", str(x.ty.dtype)))
    return _resize(site, x, size, layout, _OLD_METHODS.get(method, method), coordinates, rounding)


def _rounding(
    site: Site, sizes: Sequence[int], wanted: Sequence[int], coordinates: str, rounding: str
) -> str:
    """Return today's name for what Relay computes."""
    if coordinates == "asymmetric" and rounding != "floor":
        # An axis that grows by a whole factor was divided by it, whatever the rounding (topi.image.resize of 0.16).
        whole = {m % n == 0 for n, m in zip(sizes, wanted, strict=True) if n != m}
        if len(whole) > 1:
            site.refuse(
                f"it rounds by {rounding!r} on the one axis that does not grow by a whole factor"
            )
        rounding = "floor" if whole == {True} else rounding
    # Relay's "round" takes halves away from zero, TVM's now takes the even one.
    return "round_prefer_ceil" if rounding == "round" else rounding


def _default_rounding(coordinates: str) -> str:
    """What TVM takes when no rounding is named (topi.image.resize)."""
    return "round_prefer_ceil" if coordinates == "align_corners" else "floor"


@operator("nn.upsampling")
def upsampling(site: Site, x: ir.Expr) -> ir.Expr:
    """A map enlarged by factors."""
    layout = site.text("layout", "NCHW", "NHWC", default="NCHW")
    site.rank(x, 4)
    sizes = [site.shape(x)[layout.index(letter)] for letter in "HW"]
    factors = [site.number("scale_h"), site.number("scale_w")]
    if not all(0 < factor <= 1 << 12 for factor in factors):
        site.damaged(f"it enlarges by {factors}")
    size = [max(round(n * factor), 1) for n, factor in zip(sizes, factors, strict=True)]
    method = site.text("method", *_METHODS, *_OLD_METHODS, default="nearest_neighbor")
    coordinates = "align_corners" if site.flag("align_corners") else "asymmetric"
    return _resize(
        site,
        x,
        size,
        layout,
        _OLD_METHODS.get(method, method),
        coordinates,
        _default_rounding(coordinates),
    )
