"""Presets by model family, and hot and cold operators.

They shape which proposals are made, break ties and order the tuning; they never override the
optimum of the predicted or measured times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from .cost import operator_cost

#: FLOPs from which on a convolutional network counts as large: ResNet-50 needs 8e9 for one image of
#: 224 x 224, MobileNetV2 6e8.
_LARGE_FLOPS = 3e9

#: Share of the unfused time that the hot operators make up together.
_HOT_SHARE = 0.8

#: Strategies from the most to the least preferred where two groups save the same.
TIE_ORDER: Mapping[str, tuple[str, ...]] = {
    "small-cnn": ("vertical", "cross", "horizontal", "compound"),
    "large-cnn": ("vertical", "cross", "horizontal", "compound"),
    "transformer": ("horizontal", "vertical", "cross", "compound"),
}


def family_of(graph: DataflowGraph) -> str:
    """Tell the family of a model by its operators.

    Returns
    -------
    str
        ``"transformer"`` where matrix products make up most of the FLOPs of all anchors,
        ``"large-cnn"`` from 3 GFLOP on, else ``"small-cnn"``.
    """
    flops: dict[str, int] = {"conv": 0, "matmul": 0}
    for operator in graph.operators:
        if operator.pattern == "anchor":
            flops["matmul" if operator.op == "matmul" else "conv"] += operator.flops
    if flops["matmul"] > flops["conv"]:
        return "transformer"
    return "large-cnn" if flops["conv"] >= _LARGE_FLOPS else "small-cnn"


@dataclasses.dataclass(frozen=True)
class Heat:
    """Which operators are hot.

    Attributes
    ----------
    hot : frozenset of str
        The operators of longest predicted time that together take 80 % of the unfused model's.
    """

    hot: frozenset[str]

    def is_hot(self, names: tuple[str, ...]) -> bool:
        """Whether a group holds a hot operator."""
        return any(name in self.hot for name in names)

    def preference(self, preset: str, strategy: str, names: tuple[str, ...]) -> int:
        """Rank of a strategy on a tie: hot operators vertical first, cold ones horizontal first."""
        order = TIE_ORDER[preset]
        first = "vertical" if self.is_hot(names) else "horizontal"
        return -1 if strategy == first else order.index(strategy)


def heat_of(graph: DataflowGraph, device: DeviceSpec) -> Heat:
    """Divide the operators of a model into hot and cold ones by predicted time."""
    times = {o.name: operator_cost(graph, o, device).microseconds for o in graph.operators}
    ranked = sorted(times, key=lambda name: (-times[name], graph.index[name]))
    rest, hot = _HOT_SHARE * sum(times.values()), []
    for name in ranked:
        if rest <= 0:
            break
        hot.append(name)
        rest -= times[name]
    return Heat(frozenset(hot))
