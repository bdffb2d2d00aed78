"""Layered drawing of an acyclic graph: boxes in rows, edges from one row down to the next.

The usual four steps (Sugiyama, Tagawa and Toda, IEEE Trans. SMC 1981): rows by longest path, a
waypoint in every row that an edge passes, order within rows by barycentres, coordinates. Deterministic; no
dependency, so that the HTML report needs no drawing program.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

Point = tuple[float, float]

#: Width of the lane that an edge takes where it passes a row.
_LANE = 4.0

#: Edges longer than this many rows get no waypoints once there are more waypoints than boxes would
#: bear.
_LONG = 12


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything lies, in pixels from the top left.

    Attributes
    ----------
    boxes : mapping of str to (x, y)
        Top left corner of each box.
    routes : mapping of (str, str) to tuple of Point
        For each edge its points from the bottom of its first box to the top of its second; the
        edge is straight from an even point to the next one and bends between.
    width, height : float
        Size of the whole.
    """

    boxes: Mapping[str, Point]
    routes: Mapping[tuple[str, str], tuple[Point, ...]]
    width: float
    height: float


def layered(
    sizes: Mapping[str, tuple[float, float]],
    edges: Iterable[tuple[str, str]],
    *,
    gap: tuple[float, float] = (28.0, 28.0),
    sweeps: int = 8,
) -> Layout:
    """Lay out an acyclic graph from top to bottom.

    Parameters
    ----------
    sizes : mapping of str to (width, height)
        The boxes in pixels. Their order decides ties.
    edges : iterable of (str, str)
        From producer to consumer; repeats and self-loops are dropped.
    gap : (float, float)
        Least distance of boxes in a row, and of rows.
    sweeps : int
        Passes that reduce crossings.

    Raises
    ------
    ValueError
        If the edges close a cycle.
    """
    pairs = [e for e in dict.fromkeys(edges) if e[0] != e[1]]
    if not sizes:
        return Layout({}, {}, 0.0, 0.0)
    net = _Net(sizes, pairs)
    rows = _ordered(net, sweeps)
    centre = _coordinates(net, rows, gap[0])
    return _placed(net, rows, centre, sizes, pairs, gap[1])


class _Net:
    """Boxes and waypoints with their rows and the edges between neighbouring rows."""

    def __init__(
        self, sizes: Mapping[str, tuple[float, float]], pairs: Sequence[tuple[str, str]]
    ) -> None:
        self.row = _ranks(list(sizes), pairs)
        self.width = {name: size[0] for name, size in sizes.items()}
        self.above: dict[object, list[object]] = {name: [] for name in sizes}
        self.below: dict[object, list[object]] = {name: [] for name in sizes}
        self.waypoints: dict[tuple[str, str], list[object]] = {}
        spans = {(a, b): self.row[b] - self.row[a] for a, b in pairs}
        crowded = sum(spans.values()) > 6 * len(sizes) + 200
        for (a, b), length in spans.items():
            if crowded and length > _LONG:
                continue  # drawn straight, behind the boxes
            self.waypoints[a, b] = [(a, b, i) for i in range(1, length)]
            for i, point in enumerate(self.waypoints[a, b], start=1):
                self.row[point] = self.row[a] + i
                self.width[point] = _LANE
            chain = [a, *self.waypoints[a, b], b]
            for upper, lower in itertools.pairwise(chain):
                self.below.setdefault(upper, []).append(lower)
                self.above.setdefault(lower, []).append(upper)

    def is_waypoint(self, item: object) -> bool:
        return isinstance(item, tuple)


def _ranks(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> dict[object, int]:
    """Row of each box: below all its producers, and as low as shortens more edges than it lengthens."""
    after: dict[str, list[str]] = {name: [] for name in names}
    before: dict[str, list[str]] = {name: [] for name in names}
    for a, b in pairs:
        after[a].append(b)
        before[b].append(a)
    waiting = {name: len(before[name]) for name in names}
    order = [name for name in names if not waiting[name]]
    for name in order:
        for follower in after[name]:
            waiting[follower] -= 1
            if not waiting[follower]:
                order.append(follower)
    if len(order) < len(names):
        raise ValueError("the edges close a cycle")
    row: dict[object, int] = {}
    for name in order:
        row[name] = max((row[p] + 1 for p in before[name]), default=0)
    for name in reversed(order):
        if after[name] and len(before[name]) < len(after[name]):
            row[name] = max(row[name], min(row[f] for f in after[name]) - 1)
    return row


def _ordered(net: _Net, sweeps: int) -> list[list[object]]:
    """Rows in an order with few crossings: the best of several barycentre sweeps."""
    rows: list[list[object]] = [[] for _ in range(max(net.row.values()) + 1)]
    for item in _depth_first(net):
        rows[net.row[item]].append(item)
    best, fewest = [list(row) for row in rows], _crossings(net, rows)
    for sweep in range(sweeps):
        if fewest == 0:
            break
        down = sweep % 2 == 0
        for row in rows[1:] if down else rows[-2::-1]:
            neighbours = net.above if down else net.below
            fixed = rows[net.row[row[0]] + (-1 if down else 1)]
            place = {item: i for i, item in enumerate(fixed)}
            own = {item: i for i, item in enumerate(row)}
            keys = {
                item: _mean([place[n] for n in neighbours.get(item, ())], own[item]) for item in row
            }
            row.sort(key=keys.__getitem__)
        count = _crossings(net, rows)
        if count < fewest:
            best, fewest = [list(row) for row in rows], count
    return best


def _depth_first(net: _Net) -> list[object]:
    """Every item, a branch at a time: branches start out side by side."""
    seen: dict[object, None] = {}
    stack = [item for item in reversed(list(net.row)) if not net.above.get(item)]
    while stack:
        item = stack.pop()
        if item not in seen:
            seen[item] = None
            stack += [n for n in reversed(net.below.get(item, [])) if n not in seen]
    return list(seen)


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _crossings(net: _Net, rows: Sequence[Sequence[object]]) -> int:
    total = 0
    for upper, lower in itertools.pairwise(rows):
        place = {item: i for i, item in enumerate(lower)}
        seen: list[int] = []
        for item in upper:
            ends = sorted(place[n] for n in net.below.get(item, ()))
            total += sum(len(seen) - bisect.bisect_right(seen, end) for end in ends)
            for end in ends:
                bisect.insort(seen, end)
    return total


def _coordinates(net: _Net, rows: Sequence[Sequence[object]], gap: float) -> dict[object, float]:
    """Centres: every item as near to the mean of its neighbours as the order of its row allows."""
    centre: dict[object, float] = {}
    for row in rows:
        x = 0.0
        for item in row:
            centre[item] = x + net.width[item] / 2
            x += net.width[item] + gap
    # Ends with a pass downwards: there a chain stands exactly below its first box.
    passes = [(net.above, rows), (net.below, rows[::-1])] * 4 + [(net.above, rows)]
    for near, ordered in passes:
        for row in ordered:
            _settle(net, row, near, centre, gap)
    left = min(centre[i] - net.width[i] / 2 for i in net.row)
    return {item: x - left for item, x in centre.items()}


def _settle(
    net: _Net,
    row: Sequence[object],
    near: Mapping[object, Sequence[object]],
    centre: dict[object, float],
    gap: float,
) -> None:
    """Least squares towards the wished places with least distances: pool adjacent violators."""
    offset, offsets = 0.0, []
    for i, item in enumerate(row):
        if i:
            points = net.is_waypoint(item) and net.is_waypoint(row[i - 1])
            offset += (net.width[item] + net.width[row[i - 1]]) / 2 + (gap / 3 if points else gap)
        offsets.append(offset)
    blocks: list[list[float]] = []  # weighted sum, weight, number of items
    for item, shift in zip(row, offsets, strict=True):
        neighbours = near.get(item, ())
        wish = _mean([centre[n] for n in neighbours], centre[item]) - shift
        # Below a fork all branches count alike, which keeps them around it; further on a long edge
        # stays straight.
        passing = net.is_waypoint(item) and all(net.is_waypoint(n) for n in neighbours)
        weight = 8.0 if passing else 1.0
        blocks.append([wish * weight, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    settled = [block[0] / block[1] for block in blocks for _ in range(int(block[2]))]
    for item, shift, value in zip(row, offsets, settled, strict=True):
        centre[item] = value + shift


def _placed(
    net: _Net,
    rows: Sequence[Sequence[object]],
    centre: Mapping[object, float],
    sizes: Mapping[str, tuple[float, float]],
    pairs: Sequence[tuple[str, str]],
    gap: float,
) -> Layout:
    top, tops, bottoms = 0.0, [], []
    for row in rows:
        height = max((sizes[i][1] for i in row if not net.is_waypoint(i)), default=0.0)
        tops.append(top)
        bottoms.append(top + height)
        top += height + gap
    boxes, lower_edge = {}, {}
    for name, (width, height) in sizes.items():
        r = net.row[name]
        y = (tops[r] + bottoms[r] - height) / 2
        boxes[name], lower_edge[name] = (centre[name] - width / 2, y), y + height
    routes = {}
    for a, b in pairs:
        points = [(centre[a], lower_edge[a]), (centre[a], bottoms[net.row[a]])]
        for waypoint in net.waypoints.get((a, b), ()):
            r = net.row[waypoint]
            points += [(centre[waypoint], tops[r]), (centre[waypoint], bottoms[r])]
        points += [(centre[b], tops[net.row[b]]), (centre[b], boxes[b][1])]
        routes[a, b] = tuple(points)
    width = max(centre[i] + net.width[i] / 2 for i in net.row)
    return Layout(boxes, routes, width, bottoms[-1])
