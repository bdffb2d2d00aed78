"""A plan as text: what is fused, what is not, and why, in the names of the user's model."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..guards.base import REASONS
from ..planner.plan import Group, Plan, Region, Rejection
from .words import (
    LETTERS,
    accuracy_in_words,
    describe_operators,
    dtype_in_words,
    mib,
    microseconds,
    options_in_words,
    search_in_words,
    span,
)  # fmt: skip

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
    console, buffer = text_console(width, color)
    _summary(console, plan)
    if plan.groups:
        hot = " (* hot)" if any(g.hot for g in plan.groups) else ""
        _show(console, f"\nFused: one kernel each{hot}", _groups(plan.groups))
        for sentence in accuracy_in_words(plan):
            console.print(f"{sentence[0].upper()}{sentence[1:]}.", markup=False)
    if plan.regions:
        title = "\nRegions: parts of the model that several strategies serve"
        _show(console, title, _regions(plan.regions))
    if plan.ungrouped:
        _show(console, "\nKernels of their own", _ungrouped(plan))
    if plan.rejected:
        _show(console, "\nWhy not more", _refusals(plan.rejected))
    return tidy(buffer)


def _show(console: Console, title: str, table: Table) -> None:
    console.print(title, style="italic", markup=False)
    console.print(table)


def text_console(width: int | None, color: bool) -> tuple[Console, io.StringIO]:
    """A console that writes into a buffer."""
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=width, force_terminal=color, no_color=not color, highlight=False,
        soft_wrap=False,
    )  # fmt: skip
    return console, buffer


def tidy(buffer: io.StringIO) -> str:
    """What was printed, without the blanks with which rich fills lines."""
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().split("\n"))


def plain_table(columns: Sequence[str]) -> Table:
    """A table without rules whose cells wrap rather than lose text."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _summary(console: Console, plan: Plan) -> None:
    t, where = plan.totals, plan.target
    target = " ".join(part for part in (where.kind, where.arch) if part)
    device = f", as {where.device}" if where.device else ""
    console.print(
        f"{plan.model} ({dtype_in_words(plan)}, {plan.operators} operators) for {target}{device}",
        markup=False,
    )
    measured = ""
    if t.measured_us_before is not None and t.measured_us_after is not None:
        measured = f"   measured µs {t.measured_us_before:.1f} → {t.measured_us_after:.1f}"
    console.print(
        f"launches {t.launches_before} → {t.launches_after}   "
        f"MiB moved {mib(t.bytes_before)} → {mib(t.bytes_after)}   "
        f"GFLOP {t.flops_before / 1e9:.2f} → {t.flops_after / 1e9:.2f}   "
        f"predicted µs {t.predicted_us_before:.1f} → {t.predicted_us_after:.1f}{measured}",
        markup=False,
    )
    chosen = search_in_words(plan)
    console.print(f"preset {plan.preset}" + (f"; {chosen}" if chosen else ""), markup=False)


def _groups(groups: Sequence[Group]) -> Table:
    table = plain_table(("group", "operators", "nodes"))
    measured = any(g.measured_us_after is not None for g in groups)
    built = any(g.registers is not None for g in groups)
    numbers = ["launches", "MiB", "FLOP/B", "predicted µs"] + ["measured µs"] * measured
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("registers", "spilled B", "shared B") if built else ():
        table.add_column(column, justify="right")
    for g in groups:
        cells = [
            g.id.removeprefix("fused_") + (" *" if g.hot else ""), "\n".join(_content(g)),
            span(g.nodes),
            f"{g.launches_before} → {g.launches_after}",
            f"{mib(g.bytes_before)} → {mib(g.bytes_after)}",
            f"{g.intensity_before:.1f} → {g.intensity_after:.1f}",
            f"{g.predicted_us_before:.1f} → {g.predicted_us_after:.1f}",
        ]  # fmt: skip
        if measured:
            cells.append(_measured(g))
        if built:
            cells += [
                _beside(g.registers, g.estimated_registers), _known(g.spill_bytes),
                _beside(g.shared_bytes, g.estimated_shared_bytes),
            ]  # fmt: skip
        table.add_row(*map(escape, cells))
    return table


def _content(group: Group) -> list[str]:
    """Operators, then options in words, then parts, a line each."""
    lines = [describe_operators(group)]
    lines += [f"  {phrase}" for phrase in options_in_words(group.options)]
    for part in group.parts:
        lines.append(
            f"  {LETTERS.get(part.strategy, '?')} {part.strategy} {span(part.nodes)}, "
            f"{microseconds(part.predicted_us)} µs alone"
        )
    return lines


def _measured(group: Group) -> str:
    if group.measured_us_after is None:
        return ""
    before = group.measured_us_before
    return ("? → " if before is None else f"{before:.1f} → ") + f"{group.measured_us_after:.1f}"


def _known(value: int | None) -> str:
    return "" if value is None else str(value)


def _beside(value: int | None, estimate: int | None) -> str:
    """What the compiler says, and the estimate beside it."""
    if value is None or estimate is None:
        return _known(value)
    return f"{value} (est. {estimate})"


def _regions(regions: Sequence[Region]) -> Table:
    table = plain_table(("region", "kind", "groups"))
    for region in regions:
        groups = ", ".join(name.removeprefix("fused_") for name in region.groups)
        table.add_row(escape(region.name), region.kind, escape(groups))
    return table


def _ungrouped(plan: Plan) -> Table:
    table = plain_table(("operator", "reason", "count", "nodes"))
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
    table = plain_table(("reason", "meaning", "count", "examples"))
    for reason in sorted({r.reason for r in rejected}):
        found = [r for r in rejected if r.reason == reason]
        texts = list(dict.fromkeys(r.detail for r in found))[:_EXAMPLES]
        more = len(found) - len(texts)
        text = "\n".join(texts) + (f"\n… {more} more in the JSON plan" if more > 0 else "")
        table.add_row(reason, REASONS.get(reason, ""), str(len(found)), escape(text))
    return table


def _examples(nodes: Sequence[str]) -> str:
    return escape(", ".join(nodes[:_EXAMPLES]) + (", …" if len(nodes) > _EXAMPLES else ""))
