"""Explanations as text, readable without knowing this package."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from ..planner.explanation import (
    Alternative,
    GroupFacts,
    ModelExplanation,
    Neighbour,
    NodeExplanation,
    OperatorExplanation,
    OperatorFacts,
)  # fmt: skip
from .text import plain_table, text_console, tidy
from .words import mib, microseconds, numbers_in_words, options_in_words

#: Names of a long list that are shown.
_NAMES = 8


def render_explanation(
    explanation: NodeExplanation | ModelExplanation,
    *,
    model: str = "the model",
    width: int | None = None,
    color: bool = False,
) -> str:
    """Return an explanation as text.

    Parameters
    ----------
    explanation : NodeExplanation or ModelExplanation
        What ``tvm_fusion.explain`` returns.
    model : str
        Name of the model.
    width : int, optional
        Columns to fill; the terminal's when absent.
    color : bool
        Whether to use terminal colours.
    """
    console, buffer = text_console(width, color)
    if isinstance(explanation, NodeExplanation):
        _node(console, explanation, model)
    else:
        _model(console, explanation, model)
    return tidy(buffer)


def _say(console: Console, text: str, indent: int = 0, style: str = "") -> None:
    console.print(Padding(escape(text), (0, 0, 0, indent)), style=style)


def _node(console: Console, explanation: NodeExplanation, model: str) -> None:
    count = len(explanation.operators)
    if count > 1:
        _say(console, f"{explanation.node} of {model} is {count} operators.\n")
    told: dict[object, str] = {}
    for item in explanation.operators:
        name, group = item.facts.name, item.group.id if item.group else ""
        _facts(console, item.facts)
        if not item.facts.does_work:
            continue
        if group in told:
            _say(console, f"In {group}, as {told[group]}.", 2)
        else:
            _membership(console, item.group, name)
        others = (group, tuple((a.strategy, a.reason, a.detail) for a in item.alternatives))
        if group not in told or others not in told:
            _alternatives(console, item)
        elif item.alternatives:
            _say(console, f"Other groups: as {told[others]}.", 2)
        if item.neighbours:
            _say(console, "\nNeighbours outside its group", 2, "italic")
            console.print(Padding(_neighbours(item.neighbours), (0, 0, 0, 2)))
        console.print()
        if group:
            told.setdefault(group, name)
            told.setdefault(others, name)


def _facts(console: Console, facts: OperatorFacts) -> None:
    _say(console, f"{facts.name}: {facts.op}", style="bold")
    source = [name for name in facts.source_names if name != facts.name]
    if source:
        _say(console, f"from {', '.join(source)}", 2)
    _say(console, f"{', '.join(facts.inputs) or 'nothing'} → {', '.join(facts.outputs)}", 2)
    if not facts.does_work:
        _say(console, "a view: the same bytes with another shape, no kernel\n", 2)
        return
    bound = "; memory-bound (under 10 FLOP/B): a fusion pays" if facts.candidate else ""
    moved = facts.bytes_read + facts.bytes_written
    _say(
        console,
        f"alone: {mib(moved)} MiB, {facts.flops / 1e6:.3g} MFLOP, {facts.intensity:.1f} FLOP/B{bound}",
        2,
    )


def _membership(console: Console, group: GroupFacts | None, name: str) -> None:
    if group is None:
        _say(console, "In no group: a kernel of its own.", 2)
        return
    partners = [n for n in group.operators if n != name]
    _say(console, f"In {group.id} with {names(partners)}", 2)
    words = "; ".join([group.strategy, *options_in_words(group.options)])
    _say(console, words, 4)
    _say(
        console,
        f"predicted µs {microseconds(group.predicted_us_before)} → "
        f"{microseconds(group.predicted_us_after)}, saves {microseconds(group.saving_us)}",
        4,
    )


def _alternatives(console: Console, item: OperatorExplanation) -> None:
    if not item.alternatives:
        what = "larger or other group" if item.group else "group"
        _say(console, f"\nNo {what} with it was proposed.", 2)
        return
    count = f"{len(item.alternatives)} of {item.considered} weighed"
    columns = ("strategy", "with", "verdict", "why", "predicted µs")
    _say(console, f"\nOther groups it could have joined ({count})", 2, "italic")
    table = plain_table(columns)
    table.columns[-1].no_wrap = True
    for entry in item.alternatives:
        table.add_row(*map(escape, _alternative(entry)))
    console.print(Padding(table, (0, 0, 0, 2)))


def _alternative(entry: Alternative) -> tuple[str, ...]:
    before, after = entry.predicted_us_before, entry.predicted_us_after
    times = "" if before is None or after is None else (
        f"{microseconds(before)} → {microseconds(after)}"
    )  # fmt: skip
    why = [entry.detail, f"({numbers_in_words(entry.numbers)})" if entry.numbers else ""]
    if entry.reason == "overlaps_better" and entry.overlaps:
        why[1] = f"(taken: {names(entry.overlaps)})"
    verdict = f"{entry.reason}\n{entry.outcome}"
    return entry.strategy, names(entry.partners), verdict, "\n".join(filter(None, why)), times


def _neighbours(found: Sequence[Neighbour]) -> Table:
    columns = ("neighbour", "role", "verdict", "why")
    table = plain_table(columns)
    for entry in found:
        where = f"{entry.name} ({entry.op})" + (f"\nin {entry.group}" if entry.group else "")
        verdict = f"{entry.reason}\n{entry.outcome}"
        table.add_row(*map(escape, (where, entry.role, verdict, entry.detail)))
    return table


def names(found: Sequence[str]) -> str:
    """Names with a comma, a long list cut."""
    text = ", ".join(found[:_NAMES])
    return text + (f", … {len(found) - _NAMES} more" if len(found) > _NAMES else "")


def _model(console: Console, explanation: ModelExplanation, model: str) -> None:
    groups = ", ".join(f"{n} {name}" for name, n in sorted(explanation.groups.items())) or "none"
    _say(
        console,
        f"{model}: {explanation.operators} operators; {explanation.considered} groups weighed, "
        f"{explanation.accepted} allowed, {sum(explanation.groups.values())} taken ({groups}); "
        f"{len(explanation.ungrouped)} operators are kernels of their own.",
    )
    missed = [u for u in explanation.ungrouped if u.candidate]
    if missed:
        shown = names([f"{u.node} ({u.reason})" for u in missed])
        _say(console, f"Memory-bound and alone, where a fusion would pay: {shown}")
    if explanation.reasons:
        columns = ("reason", "outcome", "count", "meaning", "examples")
        _say(console, "\nWhat stopped the rest", style="italic")
        table = plain_table(columns)
        for entry in explanation.reasons:
            examples = "\n".join(dict.fromkeys(e.detail for e in entry.examples))
            cells = (entry.reason, entry.outcome, str(entry.count), entry.meaning, examples)
            table.add_row(*map(escape, cells))
        console.print(table)
    _say(console, "\nOne node: tvm-fusion explain MODEL --node NAME")
