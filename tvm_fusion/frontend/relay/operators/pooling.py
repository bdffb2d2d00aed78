"""Poolings with windows, adaptive ones, and those of whole maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....compat import ir, relax
from ..site import Site
from .reduction import mean_of
from .registry import operator

_SPACE = {1: "W", 2: "HW", 3: "DHW"}

_LIMIT = 1 << 20


def _padding(site: Site, rank: int) -> list[int]:
    pads = site.integers("padding", [0], low=0, high=_LIMIT)
    if len(pads) == 1:
        return pads * (2 * rank)
    if len(pads) == rank:
        return pads * 2
    if len(pads) != 2 * rank:
        site.damaged(f"padding has {len(pads)} numbers instead of {rank} or {2 * rank}")
    return pads


def _layout(site: Site, data: ir.Expr, rank: int) -> tuple[ir.Expr, str, str]:
    """Return the data in a layout that Relax pools, that layout, and the one of the module."""
    space = _SPACE[rank]
    given = site.text("layout", default=f"NC{space}")
    if rank == 2 and given == "NHWC":
        site.rank(data, 4)
        return data, given, given
    return site.relayout(data, given, f"NC{space}"), f"NC{space}", given


def _back(site: Site, result: ir.Expr, layout: str, given: str) -> ir.Expr:
    return site.relayout(result, layout, site.text("out_layout") or given)


def _check_mean(site: Site, data: ir.Expr) -> None:
    """Refuse means of integers in windows: TVM divides by an int64, and stores what the type says is narrower."""
    if "float" not in str(data.ty.dtype):
        site.refuse(f"it takes means of {data.ty.dtype}: cast it first")


def _window(site: Site, rank: int) -> dict[str, Any]:
    return {
        "pool_size": site.integers("pool_size", count=rank, low=1, high=_LIMIT),
        "strides": site.integers("strides", [1] * rank, count=rank, low=1, high=_LIMIT),
        "padding": _padding(site, rank),
        "dilation": site.integers("dilation", [1] * rank, count=rank, low=1, high=_LIMIT),
        "ceil_mode": site.flag("ceil_mode"),
    }


def _check_window(site: Site, sizes: Sequence[int], window: dict[str, Any]) -> None:
    rank = len(sizes)
    for axis, size in enumerate(sizes):
        before, after = window["padding"][axis], window["padding"][axis + rank]
        reach = (window["pool_size"][axis] - 1) * window["dilation"][axis] + 1
        if reach > size + before + after:
            site.damaged(
                f"its window of {reach} is larger than the padded map of {size + before + after}"
            )
        if max(before, after) >= reach:
            site.damaged(
                f"its padding of {max(before, after)} is not smaller than its window of {reach}"
            )
        stride = window["strides"][axis]
        last = -(-(size + before + after - reach) // stride) * stride
        if window["ceil_mode"] and last >= size + before:
            site.refuse(
                "its ceil_mode begins a window behind the map, which TVM no longer computes: set it to false there"
            )


def _pool(site: Site, data: ir.Expr, function: Any, **extra: Any) -> ir.Expr:
    rank = int(site.node.op[-2])
    data, layout, given = _layout(site, data, rank)
    window = _window(site, rank)
    _check_window(
        site, [n for n, c in zip(site.shape(data), layout, strict=True) if c not in "NC"], window
    )
    return _back(site, site.emit(function(data, **window, **extra, layout=layout)), layout, given)


@operator("nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d")
def max_pool(site: Site, data: ir.Expr) -> ir.Expr:
    """The maximum of each window."""
    functions = (relax.op.nn.max_pool1d, relax.op.nn.max_pool2d, relax.op.nn.max_pool3d)
    return _pool(site, data, functions[int(site.node.op[-2]) - 1])


@operator("nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d")
def avg_pool(site: Site, data: ir.Expr) -> ir.Expr:
    """The mean of each window, the padding counted or not."""
    _check_mean(site, data)
    functions = (relax.op.nn.avg_pool1d, relax.op.nn.avg_pool2d, relax.op.nn.avg_pool3d)
    counted = site.flag("count_include_pad")
    function = functions[int(site.node.op[-2]) - 1]
    return _pool(site, data, function, count_include_pad=counted)


@operator("nn.global_avg_pool2d")
def global_avg_pool(site: Site, data: ir.Expr) -> ir.Expr:
    """The mean of each channel, as a mean over axes: the form that ONNX import gives it."""
    data, layout, given = _layout(site, data, 2)
    axes = [layout.index("H"), layout.index("W")]
    return _back(site, mean_of(site, data, axes, True), layout, given)


@operator("nn.global_max_pool2d")
def global_max_pool(site: Site, data: ir.Expr) -> ir.Expr:
    """The maximum of each channel."""
    data, layout, given = _layout(site, data, 2)
    axes = [layout.index("H"), layout.index("W")]
    return _back(site, site.emit(relax.op.max(data, axes, keepdims=True)), layout, given)


def _adaptive_sizes(site: Site, sizes: Sequence[int]) -> list[int]:
    wanted = site.integers("output_size", [], low=1, high=_LIMIT)
    if not wanted:
        return list(sizes)
    if len(wanted) == 1:
        return wanted * len(sizes)
    if len(wanted) != len(sizes):
        site.damaged(f"output_size has {len(wanted)} numbers instead of {len(sizes)}")
    return wanted


@operator("nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d", "nn.adaptive_avg_pool3d")
def adaptive_avg_pool(site: Site, data: ir.Expr) -> ir.Expr:
    """The mean of windows that divide a map into so many parts."""
    rank = int(site.node.op[-2])
    data, layout, given = _layout(site, data, rank)
    places = [i for i, letter in enumerate(layout) if letter not in "NC"]
    wanted = _adaptive_sizes(site, [site.shape(data)[i] for i in places])
    if wanted == [1] * rank:
        return _back(site, mean_of(site, data, places, True), layout, given)
    _check_mean(site, data)
    functions = (
        relax.op.nn.adaptive_avg_pool1d, relax.op.nn.adaptive_avg_pool2d, relax.op.nn.adaptive_avg_pool3d,
    )  # fmt: skip
    result = functions[rank - 1](data, tuple(wanted), layout=layout)
    return _back(site, site.emit(result), layout, given)


@operator("nn.adaptive_max_pool1d", "nn.adaptive_max_pool2d", "nn.adaptive_max_pool3d")
def adaptive_max_pool(site: Site, data: ir.Expr) -> ir.Expr:
    """The maximum of windows that divide a map; of equal ones, since Relax has no other."""
    rank = int(site.node.op[-2])
    data, layout, given = _layout(site, data, rank)
    places = [i for i, letter in enumerate(layout) if letter not in "NC"]
    sizes = [site.shape(data)[i] for i in places]
    wanted = _adaptive_sizes(site, sizes)
    if wanted == [1] * rank:
        return _back(site, site.emit(relax.op.max(data, places, keepdims=True)), layout, given)
    if any(n % m for n, m in zip(sizes, wanted, strict=True)):
        site.refuse(
            f"{sizes} is not divided into {wanted} equal windows, and TVM has no other: resize first"
        )
    window = [n // m for n, m in zip(sizes, wanted, strict=True)]
    functions = (relax.op.nn.max_pool1d, relax.op.nn.max_pool2d, relax.op.nn.max_pool3d)
    result = functions[rank - 1](data, pool_size=window, strides=window, layout=layout)
    return _back(site, site.emit(result), layout, given)
