"""Reductions over axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....compat import ir, relax
from ..site import Site
from .registry import operator

_FUNCTIONS: dict[str, Callable[..., ir.Expr]] = {
    "sum": relax.op.sum, "max": relax.op.max, "min": relax.op.min, "prod": relax.op.prod,
}  # fmt: skip


def _axes(site: Site, rank: int) -> list[int]:
    """Return the axes that are reduced: those named, or with ``exclude`` the others."""
    named = site.integers("axis", None)
    if not named:
        return list(range(rank))
    axes = {site.axis_of(axis, rank) for axis in named}
    return [i for i in range(rank) if (i in axes) != site.flag("exclude")]


def _check_numbers(site: Site, x: ir.Expr) -> None:
    dtype = str(x.ty.dtype)
    if dtype == "bool" or (site.node.op == "variance" and "float" not in dtype):
        site.refuse(f"its operand is of dtype {dtype}: cast it first")


def mean_of(site: Site, x: ir.Expr, axes: Sequence[int], keepdims: bool) -> ir.Expr:
    """Return the mean over some axes; of integers their sum divided, towards zero.

    TVM's own mean of integers divides by an int64, and is wider than its type says.
    """
    dtype = str(x.ty.dtype)
    if "float" in dtype:
        return site.emit(relax.op.mean(x, list(axes), keepdims=keepdims))
    count = math.prod(site.shape(x)[axis] for axis in axes)
    if count > np.iinfo(dtype).max:
        site.refuse(f"it takes a mean of {count} numbers of {dtype}: cast them first")
    total = site.emit(relax.op.sum(x, list(axes), keepdims=keepdims))
    return site.emit(relax.op.divide(total, site.number_like(count, x)))


@operator("sum", "mean", "max", "min", "prod")
def reduction(site: Site, x: ir.Expr) -> ir.Expr:
    """A sum, mean, maximum, minimum or product."""
    _check_numbers(site, x)
    axes = _axes(site, site.rank(x))
    if not axes:
        return x
    if site.node.op == "mean":
        return mean_of(site, x, axes, site.flag("keepdims"))
    return site.emit(_FUNCTIONS[site.node.op](x, axes, keepdims=site.flag("keepdims")))


@operator("variance")
def variance(site: Site, x: ir.Expr, mean: ir.Expr) -> ir.Expr:
    """The mean of the squared distances from a mean that is given, with its axes kept."""
    _check_numbers(site, x)
    shape, axes = site.shape(x), _axes(site, site.rank(x))
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    mean = site.reshape(mean, kept)
    distance = site.emit(relax.op.subtract(x, mean))
    square = site.emit(relax.op.multiply(distance, distance))
    result = site.emit(relax.op.mean(square, axes, keepdims=site.flag("keepdims")))
    count = math.prod(shape[i] for i in axes)
    if site.flag("unbiased"):
        if count < 2:
            site.damaged("an unbiased variance of one number does not exist")
        result = site.emit(relax.op.multiply(result, site.number_like(count / (count - 1), x)))
    return result


@operator("argmax", "argmin")
def arg_reduction(site: Site, x: ir.Expr) -> ir.Expr:
    """Where the largest or smallest element stands, as int32."""
    _check_numbers(site, x)
    if site.flag("select_last_index"):
        site.refuse("it takes the last of equal elements, which TVM does not")
    rank = site.rank(x)
    axes = _axes(site, rank)
    if len(axes) != 1 and len(axes) != rank:
        site.refuse(f"it reduces {len(axes)} of {rank} axes: reduce one, or all")
    axis = axes[0] if len(axes) == 1 else None
    function = relax.op.argmax if site.node.op == "argmax" else relax.op.argmin
    result = site.emit(function(x, axis, keepdims=site.flag("keepdims")))
    return site.cast(result, _result_dtype(site))


def _result_dtype(site: Site) -> str:
    declared: Any = site.node.type
    return declared.dtype if hasattr(declared, "dtype") else "int32"


@operator("all", "any")
def truth(site: Site, x: ir.Expr) -> ir.Expr:
    """Whether all, or any, elements hold: the least, or largest, of them as integers."""
    axes = _axes(site, site.rank(x))
    function = relax.op.min if site.node.op == "all" else relax.op.max
    number = site.cast(site.cast(x, "bool"), "int32")
    return site.cast(site.emit(function(number, axes, keepdims=site.flag("keepdims"))), "bool")
