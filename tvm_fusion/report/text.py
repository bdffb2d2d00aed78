"""A plan as text: what is fused, what is not, and why, in the names of the user's model."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ..guards.base import REASONS
from ..planner.plan import Group, Plan, Rejection

#: Examples shown for one reason; the JSON plan has all of them.
_EXAMPLES = 3


def render_plan(plan: Plan, width: int | None = None, color: bool = False) -> str:
    """Return a plan as tables.

    Parameters
    ----------
    plan : Plan
        The plan.
    width : int, optional
        Columns to fill; the terminal's when absent.
    color : bool
        Whether to use terminal colours.
    """
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=width,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        soft_wrap=False,
    )
    _summary(console, plan)
    if plan.groups:
        console.print(_groups(plan.groups))
    if plan.ungrouped:
        console.print(_ungrouped(plan))
    if plan.rejected:
        console.print(_refusals(plan.rejected))
    return buffer.getvalue().rstrip()


def _summary(console: Console, plan: Plan) -> None:
    t, where = plan.totals, plan.target
    target = " ".join(part for part in (where.kind, where.arch) if part)
    console.print(
        f"{plan.model} ({plan.dtype}, {plan.operators} operators) for {target}, as {where.device}",
        markup=False,
    )
    console.print(
        f"launches {t.launches_before} → {t.launches_after}   "
        f"MiB moved {_mib(t.bytes_before)} → {_mib(t.bytes_after)}   "
        f"GFLOP {t.flops_before / 1e9:.2f} → {t.flops_after / 1e9:.2f}   "
        f"predicted µs {t.predicted_us_before:.1f} → {t.predicted_us_after:.1f}\n",
        markup=False,
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _groups(groups: Sequence[Group]) -> Table:
    table = Table(title="Fused: one kernel each", title_justify="left", box=None, pad_edge=False)
    for column in ("group", "operators", "nodes"):
        table.add_column(column, overflow="fold")
    for column in ("launches", "MiB", "FLOP/B", "predicted µs"):
        table.add_column(column, justify="right", no_wrap=True)
    built = any(g.registers is not None for g in groups)
    if built:
        table.add_column("registers", justify="right")
        table.add_column("spilled B", justify="right")
    for g in groups:
        cells = [
            g.id.removeprefix("fused_"), describe_operators(g), _span(g.nodes),
            f"{g.launches_before} → {g.launches_after}",
            f"{_mib(g.bytes_before)} → {_mib(g.bytes_after)}",
            f"{g.intensity_before:.1f} → {g.intensity_after:.1f}",
            f"{g.predicted_us_before:.1f} → {g.predicted_us_after:.1f}",
        ]  # fmt: skip
        if built:
            cells += [_known(g.registers), _known(g.spill_bytes)]
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    return table


def _known(value: int | None) -> str:
    return "" if value is None else str(value)


def describe_operators(group: Group) -> str:
    """Operator types in order; equal branches once, with their number."""
    if group.members < 2:
        return " + ".join(group.operators)
    op_of = dict(zip(group.nodes, group.operators, strict=True))
    branches = [" + ".join(op_of[n] for n in branch) for branch in group.branches]
    parts = [f"{len(list(same))} × ({text})" for text, same in itertools.groupby(branches)]
    inside = {n for branch in group.branches for n in branch}
    rest = [op for n, op in zip(group.nodes, group.operators, strict=True) if n not in inside]
    joined = [
        f"{n} × {op}" if n > 1 else op
        for op, n in ((op, len(list(same))) for op, same in itertools.groupby(rest))
    ]
    return (
        " | ".join(parts)
        + "".join(f" + {text}" for text in joined)
        + f" ({group.options.get('form', '')})"
    )


def _span(nodes: Sequence[str]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} … {nodes[-1]}"


def _ungrouped(plan: Plan) -> Table:
    table = Table(title="\nKernels of their own", title_justify="left", box=None, pad_edge=False)
    for column in ("operator", "reason", "count", "nodes"):
        table.add_column(column, overflow="fold")
    keys = {(u.op, u.reason, u.candidate) for u in plan.ungrouped}
    for op, reason, candidate in sorted(keys):
        nodes = [
            u.node
            for u in plan.ungrouped
            if (u.op, u.reason, u.candidate) == (op, reason, candidate)
        ]
        mark = " (memory-bound: a fusion would pay)" if candidate else ""
        table.add_row(op, f"{reason}{mark}", str(len(nodes)), _examples(nodes))
    return table


def _refusals(rejected: Sequence[Rejection]) -> Table:
    table = Table(title="\nWhy not more", title_justify="left", box=None, pad_edge=False)
    for column in ("reason", "meaning", "count", "examples"):
        table.add_column(column, overflow="fold")
    for reason in sorted({r.reason for r in rejected}):
        found = [r for r in rejected if r.reason == reason]
        texts = list(dict.fromkeys(r.detail for r in found))[:_EXAMPLES]
        more = len(found) - len(texts)
        text = "\n".join(texts) + (f"\n… {more} more in the JSON plan" if more > 0 else "")
        table.add_row(reason, REASONS.get(reason, ""), str(len(found)), text.replace("[", r"\["))
    return table


def _examples(nodes: Sequence[str]) -> str:
    text = ", ".join(nodes[:_EXAMPLES]) + (", …" if len(nodes) > _EXAMPLES else "")
    return text.replace("[", r"\[")
