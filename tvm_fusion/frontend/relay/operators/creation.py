"""Operators that make constants, and broadcasts."""

from __future__ import annotations

import math

import numpy as np

from ....compat import ir, relax
from ...canonical.constants import to_constant
from ..arrays import DTYPES
from ..site import Site
from .registry import operator


def _dtype(site: Site, default: str = "float32") -> str:
    dtype = site.dtype("dtype", default)
    if dtype not in DTYPES:
        site.refuse(f"it makes a tensor of dtype {dtype}, which cannot be imported")
    return dtype


@operator("zeros", "ones")
def zeros_or_ones(site: Site) -> ir.Expr:
    """A tensor of zeros or ones."""
    shape = site.integers("shape", [], low=1)
    return site.made(shape, _dtype(site), int(site.node.op == "ones"))


@operator("full")
def full(site: Site, value: ir.Expr) -> ir.Expr:
    """A tensor of one number."""
    shape = site.integers("shape", [], low=1)
    return site.made(shape, _dtype(site, str(value.ty.dtype)), site.scalar(value, "value"))


@operator("zeros_like", "ones_like")
def constant_like(site: Site, like: ir.Expr) -> ir.Expr:
    """A tensor of zeros or ones, of another one's shape."""
    return site.made(site.shape(like), str(like.ty.dtype), int(site.node.op == "ones_like"))


@operator("full_like")
def full_like(site: Site, like: ir.Expr, value: ir.Expr) -> ir.Expr:
    """A tensor of one number, of another one's shape."""
    return site.made(site.shape(like), str(like.ty.dtype), site.scalar(value, "value"))


@operator("arange")
def arange(site: Site, start: ir.Expr, stop: ir.Expr, step: ir.Expr) -> ir.Expr:
    """Numbers at equal distances."""
    low, high, by = (
        site.scalar(operand, name)
        for operand, name in ((start, "start"), (stop, "stop"), (step, "step"))
    )
    count = math.ceil((high - low) / by) if by and all(map(math.isfinite, (low, high, by))) else 0
    if count < 1:
        site.damaged(f"there are no numbers from {low} to {high} by {by}")
    site.check_made([count])
    return to_constant(low + by * np.arange(count), _dtype(site))


@operator("broadcast_to")
def broadcast_to(site: Site, x: ir.Expr) -> ir.Expr:
    """A tensor repeated along axes of one element."""
    return _broadcast(site, x, tuple(site.integers("shape", low=1)))


@operator("broadcast_to_like")
def broadcast_to_like(site: Site, x: ir.Expr, like: ir.Expr) -> ir.Expr:
    """A tensor repeated to the shape of another."""
    return _broadcast(site, x, site.shape(like))


def _broadcast(site: Site, x: ir.Expr, shape: tuple[int, ...]) -> ir.Expr:
    own = site.shape(x)
    tail = shape[len(shape) - len(own) :]
    if len(own) > len(shape) or any(n not in (1, m) for n, m in zip(own, tail, strict=True)):
        site.damaged(f"{own} does not broadcast to {shape}")
    return x if own == shape else site.emit(relax.op.broadcast_to(x, list(shape)))


@operator("one_hot")
def one_hot(site: Site, indices: ir.Expr, on: ir.Expr, off: ir.Expr) -> ir.Expr:
    """A vector for each index, with one element that differs from the rest."""
    dtype = _dtype(site)
    if "int" not in str(indices.ty.dtype):
        site.damaged(f"its indices are of dtype {indices.ty.dtype}")
    values = []
    for operand, name in ((on, "on value"), (off, "off value")):
        value = site.scalar(operand, name)
        values.append(relax.prim_value(float(value) if "float" in dtype else int(value)))
    axis = site.integer("axis", -1)
    axis = axis if axis == -1 else site.axis_of(axis, site.rank(indices) + 1)
    depth = site.integer("depth", low=1, high=1 << 24)
    result = relax.op.one_hot(indices, *values, depth=depth, axis=axis)
    return site.cast(site.emit(result), dtype)
