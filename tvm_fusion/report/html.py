"""A plan as one self-contained HTML page: no network, no external script, style or font."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from .._version import __version__
from ..compat import tvm
from ..config import STRATEGIES
from ..errors import PlanError
from ..graph.dataflow import DataflowGraph
from ..guards.base import REASONS
from ..planner.plan import Group, Plan, Rejection
from ..transform.fuse import graph_of
from . import words
from .roofline import build_roofline, rate
from .scene import build_scene

#: Refusals shown of one reason; the JSON plan has all of them.
MAX_REFUSALS = 150

_TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclasses.dataclass(frozen=True)
class Sums:
    """Counts of one strategy, before and after."""

    letter: str
    name: str
    meaning: str
    groups: int
    operators: int
    launches: tuple[int, int]
    nbytes: tuple[int, int]
    flops: tuple[int, int]
    predicted: tuple[float, float]
    measured: tuple[float, float] | None = None

    @property
    def intensity(self) -> tuple[float, float]:
        """FLOP per byte, before and after."""
        return tuple(f / b if b else 0.0 for f, b in zip(self.flops, self.nbytes, strict=True))

    @property
    def saved(self) -> float:
        """Predicted microseconds, without the noise of sums of rounded numbers."""
        return round(self.predicted[0] - self.predicted[1], 2) + 0.0


def render_html(plan: Plan, model: tvm.IRModule | DataflowGraph) -> str:
    """Return a plan as an HTML page.

    Parameters
    ----------
    plan : Plan
        The plan.
    model : tvm.IRModule or DataflowGraph
        The model that it was made for.

    Returns
    -------
    str
        A page that works from a file, on paper and without scripts: totals, sums by strategy, the
        graph coloured by strategy, every group before and after, a roofline plot, and what is not
        fused and why. Names of the model are escaped.

    Raises
    ------
    PlanError
        If the plan was made for another model.
    """
    graph = model if isinstance(model, DataflowGraph) else graph_of(model, plan.float32_products)
    _check(plan, graph)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters.update(
        mib=words.mib, us=words.microseconds, options=words.options_in_words,
        operators=words.describe_operators, span=words.span, numbers=words.numbers_in_words,
        rate=rate, dtype=words.dtype_in_words,
    )  # fmt: skip
    return environment.get_template("plan.html.j2").render(_context(plan, graph))


def _check(plan: Plan, graph: DataflowGraph) -> None:
    for group in plan.groups:
        for node, op in zip(group.nodes, group.operators, strict=True):
            if node not in graph.by_name or graph.by_name[node].op != op:
                raise PlanError(
                    f"the plan's {group.id} names {node!r} ({op}), which the model lacks; plan this model again"
                )


def _context(plan: Plan, graph: DataflowGraph) -> dict[str, Any]:
    target = " ".join(part for part in (plan.target.kind, plan.target.arch) if part)
    groups = plan.groups
    return {
        "plan": plan,
        "version": __version__,
        "target": target,
        "letters": words.LETTERS,
        "tiles": _tiles(plan),
        "sums": _sums(plan),
        "change": words.change,
        "scene": build_scene(plan, graph),
        "roofline": build_roofline(plan, graph),
        "measured": any(g.measured_us_after is not None for g in groups),
        "built": any(g.registers is not None for g in groups),
        "estimated": any(g.estimated_registers is not None for g in groups),
        "search": words.search_in_words(plan),
        "accuracy": words.accuracy_in_words(plan),
        "best": max(range(len(groups)), key=lambda i: _saving(groups[i]), default=None),
        "alone": _alone(plan),
        "refusals": _refusals(plan.rejected),
        "max_refusals": MAX_REFUSALS,
    }


def _saving(group: Group) -> float:
    return group.predicted_us_before - group.predicted_us_after


def _tiles(plan: Plan) -> list[dict[str, Any]]:
    """The totals in large figures: label, before, after, and what share is left."""
    t = plan.totals
    rows: list[tuple[str, str, float, float, str, str]] = [
        ("kernel launches", "", t.launches_before, t.launches_after,
         f"{t.launches_before:,}", f"{t.launches_after:,}"),
        ("memory traffic", "MiB", t.bytes_before, t.bytes_after,
         words.mib(t.bytes_before), words.mib(t.bytes_after)),
        ("predicted time", "µs", t.predicted_us_before, t.predicted_us_after,
         words.microseconds(t.predicted_us_before), words.microseconds(t.predicted_us_after)),
    ]  # fmt: skip
    if t.measured_us_before is not None and t.measured_us_after is not None:
        rows.append(
            ("measured time", "µs", t.measured_us_before, t.measured_us_after,
             words.microseconds(t.measured_us_before), words.microseconds(t.measured_us_after))
        )  # fmt: skip
    if t.bytes_before and t.bytes_after:
        intensity = (t.flops_before / t.bytes_before, t.flops_after / t.bytes_after)
        rows.append(("intensity", "FLOP/B", *intensity, *(f"{value:.1f}" for value in intensity)))
    return [
        {
            "label": label,
            "unit": unit,
            "before": before_text,
            "after": after_text,
            "change": words.change(before, after),
            "bars": tuple(round(100 * value / (max(before, after) or 1), 1) for value in (before, after)),
        }
        for label, unit, before, after, before_text, after_text in rows
    ]  # fmt: skip


def _sums(plan: Plan) -> list[Sums]:
    """One row for each strategy that the plan uses, one for the rest, one for the whole model."""
    rows = [
        _sum(words.LETTERS[name], name, words.STRATEGY_MEANING[name], found)
        for name in STRATEGIES
        if (found := [g for g in plan.groups if g.strategy == name])
    ]
    t = plan.totals
    whole = Sums(
        "", "whole model", "", len(plan.groups), plan.operators, (t.launches_before, t.launches_after),
        (t.bytes_before, t.bytes_after), (t.flops_before, t.flops_after),
        (t.predicted_us_before, t.predicted_us_after),
        None if t.measured_us_before is None or t.measured_us_after is None
        else (t.measured_us_before, t.measured_us_after),
    )  # fmt: skip
    pairs = ("launches", "nbytes", "flops", "predicted")
    left = {
        field: tuple(
            getattr(whole, field)[side] - sum(getattr(row, field)[side] for row in rows)
            for side in (0, 1)
        )
        for field in pairs
    }
    rest = Sums(
        "", "not fused", "kernels of one operator", 0, len(plan.ungrouped), **left
    )  # fmt: skip
    return [*rows, *([rest] if plan.ungrouped else []), whole]


def _sum(letter: str, name: str, meaning: str, groups: Sequence[Group]) -> Sums:
    def total(field: str) -> tuple[Any, Any]:
        return tuple(
            sum(getattr(g, f"{field}_{side}") for g in groups) for side in ("before", "after")
        )

    measured = all(
        g.measured_us_before is not None and g.measured_us_after is not None for g in groups
    )
    return Sums(
        letter, name, meaning, len(groups), sum(len(g.nodes) for g in groups), total("launches"),
        total("bytes"), total("flops"), total("predicted_us"),
        total("measured_us") if measured else None,
    )  # fmt: skip


def _alone(plan: Plan) -> list[dict[str, Any]]:
    """Kernels of their own by operator type and reason, the most frequent first."""
    found: dict[tuple[str, str, bool], list[str]] = {}
    for entry in plan.ungrouped:
        found.setdefault((entry.op, entry.reason, entry.candidate), []).append(entry.node)
    rows = [
        {"op": op, "reason": reason, "meaning": REASONS.get(reason, ""), "candidate": candidate, "nodes": nodes}
        for (op, reason, candidate), nodes in found.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (-len(row["nodes"]), row["op"], row["reason"]))


def _refusals(rejected: Iterable[Rejection]) -> list[dict[str, Any]]:
    """Refusals by reason, the most frequent first."""
    found: dict[str, list[Rejection]] = {}
    for entry in rejected:
        found.setdefault(entry.reason, []).append(entry)
    return [
        {"reason": reason, "meaning": REASONS.get(reason, ""), "count": len(entries),
         "outcomes": sorted({e.outcome for e in entries}), "entries": entries[:MAX_REFUSALS]}
        for reason, entries in sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    ]  # fmt: skip
