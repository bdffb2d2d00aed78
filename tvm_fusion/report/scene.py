"""The graph of a plan as a drawing: one card for each kernel, its operators inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..graph.dataflow import DataflowGraph, Operator, Tensor
from ..planner.plan import Group, Plan, Ungrouped
from .layout import Point, layered
from .words import LETTERS, describe_operators, mib, microseconds, options_in_words, span

#: Pixels: a character of the pills' font, height of a pill, height of a card's head, inner margin.
_CHARACTER, _PILL, _HEAD, _MARGIN = 6.7, 20.0, 22.0, 8.0

#: Longest label of an input, an output or an operator.
_LABEL = 26


@dataclasses.dataclass(frozen=True)
class Pill:
    """One operator (or one input or output of the model) in a card."""

    x: float
    y: float
    width: float
    height: float
    label: str
    title: str


@dataclasses.dataclass(frozen=True)
class Card:
    """One kernel.

    ``kind`` is a strategy, ``alone`` for a kernel of one operator, ``view`` for an operator without
    work, ``end`` for an input or output of the model. ``index`` is the group's place in the plan.
    """

    kind: str
    x: float
    y: float
    width: float
    height: float
    label: str
    title: str
    pills: tuple[Pill, ...]
    wires: tuple[str, ...]
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class Scene:
    """The drawing; ``wires`` are SVG paths between cards."""

    cards: tuple[Card, ...]
    wires: tuple[str, ...]
    width: float
    height: float


def build_scene(plan: Plan, graph: DataflowGraph) -> Scene:
    """Lay out the kernels of a plan.

    Parameters
    ----------
    plan : Plan
        The plan.
    graph : DataflowGraph
        The graph that it was made for.
    """
    owner: dict[str, str] = {n: f"g{i}" for i, g in enumerate(plan.groups) for n in g.nodes}
    alone = {u.node: u for u in plan.ungrouped}
    drafts: dict[str, Card] = {
        f"i:{tensor}": _end(tensor, graph.tensors[tensor], "input") for tensor in graph.inputs
    }
    for operator in graph.operators:
        key = owner.setdefault(operator.name, f"o:{operator.name}")
        if key.startswith("o:"):
            drafts[key] = _single(graph, operator, alone.get(operator.name))
        elif key not in drafts:
            drafts[key] = _group_card(graph, plan.groups[int(key[1:])], int(key[1:]))
    edges = [(f"i:{t}", owner[c.name]) for t in graph.inputs for c in graph.consumers[t]]
    for operator in graph.operators:
        edges += [(owner[p.name], owner[operator.name]) for p in graph.predecessors(operator)]
    for tensor in graph.outputs:
        if tensor in graph.producer:
            drafts[f"r:{tensor}"] = _end(tensor, graph.tensors[tensor], "output")
            edges.append((owner[graph.producer[tensor].name], f"r:{tensor}"))
    placed = layered({key: (card.width, card.height) for key, card in drafts.items()}, edges)
    cards = tuple(
        dataclasses.replace(card, x=placed.boxes[key][0], y=placed.boxes[key][1])
        for key, card in drafts.items()
    )
    wires = tuple(path(points) for points in placed.routes.values())
    return Scene(cards, wires, placed.width, placed.height)


def path(points: Sequence[Point]) -> str:
    """SVG path along the points of a route (see `layout.Layout`)."""
    (x, y), *rest = points
    out = [f"M{x:.0f} {y:.0f}"]
    for i, (u, v) in enumerate(rest):
        if i % 2 == 0:
            out.append(f"V{v:.0f}" if v != y else "")
        elif abs(u - x) < 1:
            out.append(f"V{v:.0f}")
            u = x
        else:
            middle = (y + v) / 2
            out.append(f"C{x:.0f} {middle:.0f} {u:.0f} {middle:.0f} {u:.0f} {v:.0f}")
        x, y = u, v
    return "".join(out)


def short(text: str, limit: int = _LABEL) -> str:
    """The end of a long name, which tells more than its beginning."""
    return text if len(text) <= limit else "…" + text[1 - limit :]


def operator_title(graph: DataflowGraph, operator: Operator) -> str:
    """Name, type, result and cost of an operator, a line each."""
    results = ", ".join(str(graph.tensors[t]) for t in operator.outputs)
    moved = operator.bytes_read + operator.bytes_written
    cost = f"{mib(moved)} MiB, {operator.flops / 1e6:.3g} MFLOP, {operator.intensity:.1f} FLOP/B"
    return f"{operator.name}\n{operator.op} → {results}" + (
        f"\nalone: {cost}" if operator.does_work else "\nno work: the same bytes, another shape"
    )


def group_title(group: Group) -> str:
    """What a group is and saves, a line each."""
    lines = [
        f"{group.id}: {describe_operators(group)}",
        *options_in_words(group.options),
        f"launches {group.launches_before} → {group.launches_after}, "
        f"MiB {mib(group.bytes_before)} → {mib(group.bytes_after)}, "
        f"FLOP/B {group.intensity_before:.1f} → {group.intensity_after:.1f}",
        f"predicted µs {microseconds(group.predicted_us_before)} → "
        f"{microseconds(group.predicted_us_after)}",
        *(
            f"part: {part.strategy} {span(part.nodes)}, {microseconds(part.predicted_us)} µs alone"
            for part in group.parts
        ),
        f"nodes: {', '.join(group.nodes)}",
    ]
    return "\n".join(lines)


def _group_card(graph: DataflowGraph, group: Group, index: int) -> Card:
    nodes = graph.sort(group.nodes)
    inside = set(nodes)
    operators = [graph.by_name[n] for n in nodes]
    edges = [(p.name, o.name) for o in operators for p in graph.predecessors(o) if p.name in inside]
    sizes = {o.name: (_text_width(o.op), _PILL) for o in operators}
    inner = layered(sizes, edges, gap=(7.0, 11.0))
    label = f"{microseconds(group.predicted_us_after)} µs"
    number = group.id.rsplit("_", 1)[-1]
    head = f"{LETTERS.get(group.strategy, '?')}{number}"
    width = max(inner.width + 2 * _MARGIN, _CHARACTER * (len(head) + len(label)) + 40)
    left = (width - inner.width) / 2
    pills = tuple(
        Pill(
            inner.boxes[o.name][0] + left, inner.boxes[o.name][1] + _HEAD, *sizes[o.name],
            o.op, f"{operator_title(graph, o)}\nin {group.id}",
        )
        for o in operators
    )  # fmt: skip
    shifted = [[(x + left, y + _HEAD) for x, y in points] for points in inner.routes.values()]
    wires = tuple(path(points) for points in shifted)
    height = _HEAD + inner.height + _MARGIN
    return Card(group.strategy, 0, 0, width, height, label, group_title(group), pills, wires, index)


def _single(graph: DataflowGraph, operator: Operator, entry: Ungrouped | None) -> Card:
    title = operator_title(graph, operator)
    if entry is not None:
        title += f"\na kernel of its own: {entry.reason}"
        title += ", memory-bound: a fusion would pay" if entry.candidate else ""
    kind = "alone" if operator.does_work else "view"
    return Card(kind, 0, 0, _text_width(operator.op), _PILL + 4, operator.op, title, (), ())


def _end(name: str, tensor: Tensor, what: str) -> Card:
    label = short(name)
    title = f"{what} {name}\n{tensor}"
    return Card("end", 0, 0, _text_width(label), _PILL + 2, label, title, (), ())


def _text_width(text: str) -> float:
    return max(34.0, _CHARACTER * len(text) + 16)
