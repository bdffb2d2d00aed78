"""A roofline plot of a plan: each group before and after, and the kernels that stay alone.

The roofline is that of Williams, Waterman and Patterson (CACM 2009): attainable FLOP/s is the lesser of
the peak rate and intensity times memory bandwidth. Both axes are logarithmic.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import types
from collections.abc import Callable, Iterable

from ..devices import DeviceSpec, device_for
from ..graph.dataflow import DataflowGraph
from ..planner.cost import operator_cost
from ..planner.plan import Group, Plan, TargetInfo
from .words import microseconds

#: Pixels of the plot, and of its margins (left, top, right, bottom).
WIDTH, HEIGHT = 940, 430
MARGIN = (66, 16, 20, 48)


@dataclasses.dataclass(frozen=True)
class Dot:
    """One kernel, or the kernels of one group together; ``kind`` is a strategy or ``alone``."""

    x: float
    y: float
    intensity: float
    flops_per_second: float
    kind: str
    title: str
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class Tick:
    """A line of the grid and its label."""

    at: float
    label: str


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The plot in pixels.

    Attributes
    ----------
    roof : tuple of (float, float)
        Corners of the roof: bandwidth line, ridge, peak line.
    ridge : float
        Intensity in FLOP/B from which the peak rate is attainable.
    pairs : tuple of (Dot, Dot)
        Each group before and after.
    alone : tuple of Dot
        Kernels of one operator.
    hidden : int
        Kernels without arithmetic, which a logarithmic axis cannot show.
    """

    roof: tuple[tuple[float, float], ...]
    ridge: float
    bandwidth: float
    peak: float
    pairs: tuple[tuple[Dot, Dot], ...]
    alone: tuple[Dot, ...]
    hidden: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    measured: bool


def device_of(target: TargetInfo) -> DeviceSpec | None:
    """The table entry that a plan's predictions used; None if the plan names no known chip."""
    attrs: dict[str, object] = {"arch": target.arch}
    cores = re.search(r"(\d+) cores", target.device or "")
    if target.kind == "llvm" and cores:
        attrs["num-cores"] = int(cores[1])
    try:
        return device_for(
            types.SimpleNamespace(
                kind=types.SimpleNamespace(name=target.kind), attrs=attrs, keys=()
            )
        )
    except ValueError:
        return None


def build_roofline(plan: Plan, graph: DataflowGraph) -> Roofline | None:
    """Place every kernel of a plan under its device's roof.

    Returns
    -------
    Roofline or None
        None if the device is unknown or no kernel computes anything.
    """
    device = device_of(plan.target)
    if device is None:
        return None
    device = dataclasses.replace(device, tf32=plan.float32_products == "tf32")
    peak, bandwidth = device.peak_flops(plan.precision), device.memory_bandwidth
    measured = any(g.measured_us_after is not None for g in plan.groups)
    pairs = [_pair(i, g) for i, g in enumerate(plan.groups) if g.flops_after and g.bytes_after]
    alone, hidden = [], len(plan.groups) - len(pairs)
    for entry in plan.ungrouped:
        operator = graph.by_name.get(entry.node)
        cost = operator_cost(graph, operator, device) if operator else None
        if cost is None or not (cost.flops and cost.nbytes and cost.microseconds):
            hidden += 1
            continue
        alone.append(
            _dot(cost.flops, cost.nbytes, cost.microseconds, "alone", f"{entry.node} ({entry.op})")
        )
    dots = [*(d for pair in pairs for d in pair), *alone]
    if not dots:
        return None
    ridge = peak / bandwidth
    xs = _decades([d.intensity for d in dots] + [ridge * 3])
    ys = _decades([d.flops_per_second for d in dots] + [peak * 1.5])
    x_of, y_of = _scale(xs, MARGIN[0], WIDTH - MARGIN[2]), _scale(ys, HEIGHT - MARGIN[3], MARGIN[1])
    start = max(xs[0], ys[0] / bandwidth)
    corners = ((start, start * bandwidth), (ridge, peak), (xs[1], peak))

    def place(dot: Dot) -> Dot:
        return dataclasses.replace(dot, x=x_of(dot.intensity), y=y_of(dot.flops_per_second))

    placed = [(place(a), place(b)) for a, b in pairs]
    ends = collections.Counter((b.x, b.y) for _, b in placed)
    return Roofline(
        roof=tuple((x_of(x), y_of(y)) for x, y in corners),
        ridge=ridge,
        bandwidth=bandwidth,
        peak=peak,
        pairs=tuple((a, _crowded(b, ends[b.x, b.y] - 1)) for a, b in placed),
        alone=tuple(place(d) for d in alone),
        hidden=hidden,
        x_ticks=tuple(Tick(x_of(v), f"{v:g}") for v in _powers(xs)),
        y_ticks=tuple(Tick(y_of(v), rate(v)) for v in _powers(ys)),
        measured=measured,
    )


def _crowded(dot: Dot, others: int) -> Dot:
    """Say in the title of a dot that it hides others: equal blocks make equal kernels."""
    if not others:
        return dot
    like = f"\n{others} other group{'s' if others > 1 else ''} at the same place"
    return dataclasses.replace(dot, title=dot.title + like)


def _pair(index: int, group: Group) -> tuple[Dot, Dot]:
    before = group.measured_us_before or group.predicted_us_before
    after = group.measured_us_after or group.predicted_us_after
    return (
        _dot(group.flops_before, group.bytes_before, before, group.strategy,
             f"{group.id} before: {group.launches_before} kernels", index),
        _dot(group.flops_after, group.bytes_after, after, group.strategy,
             f"{group.id} after: one kernel", index),
    )  # fmt: skip


def _dot(flops: int, nbytes: int, us: float, kind: str, name: str, index: int | None = None) -> Dot:
    speed = flops / (us * 1e-6)
    title = f"{name}\n{flops / nbytes:.1f} FLOP/B, {rate(speed)}FLOP/s, {microseconds(us)} µs"
    return Dot(0.0, 0.0, flops / nbytes, speed, kind, title, index)


def rate(value: float) -> str:
    """A rate with an SI prefix, as ``67 T``."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def _decades(values: Iterable[float]) -> tuple[float, float]:
    """Range that holds all values with a little room; its ends are powers of the cube root of ten."""
    logs = [math.log10(v) for v in values]
    return 10 ** (math.floor(3 * min(logs) - 0.5) / 3), 10 ** (math.ceil(3 * max(logs) + 0.3) / 3)


def _scale(ends: tuple[float, float], low: float, high: float) -> Callable[[float], float]:
    """Map from a value to pixels."""
    a, b = math.log10(ends[0]), math.log10(ends[1])
    return lambda value: round(low + (math.log10(value) - a) / (b - a) * (high - low), 1)


def _powers(ends: tuple[float, float]) -> list[float]:
    first, last = math.ceil(math.log10(ends[0]) - 1e-9), math.floor(math.log10(ends[1]) + 1e-9)
    return [10.0**power for power in range(first, last + 1)]
