"""A tuning run for a terminal and for a log: the table of its kernels, and its state in a line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..tuning.overview import KernelView, Overview
from .words import change, microseconds

#: Columns of a number at least.
_NARROWEST = 6


def time_text(value: float | None) -> str:
    """A time in microseconds; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else microseconds(value)


def gain_text(before: float | None, after: float | None) -> str:
    """The change between two times; empty where one is not known."""
    known = before is not None and after is not None
    return change(before, after) if known and math.isfinite(before) and math.isfinite(after) else ""


def clock(seconds: float) -> str:
    """A duration as ``3:07`` or ``1:02:03``; a dash where it is not known."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def operators_text(operators: Sequence[str], most: int = 6) -> str:
    """Operator types in order, the middle ones of a long list replaced by their number."""
    shown = list(operators)
    if len(shown) > most:
        shown = [*shown[: most - 3], f"… {len(shown) - most + 1} more …", *shown[-2:]]
    return " + ".join(shown)


def plan_line(state: Overview) -> str:
    """The plan of the moment in a line."""
    if not state.launches:
        return "no plan yet"
    groups = f"{state.groups} group{'s' * (state.groups != 1)}"
    times = f"{time_text(state.model_us)} µs"
    if math.isfinite(state.unfused_us):
        gain = gain_text(state.unfused_us, state.model_us)
        times += f" (unfused {time_text(state.unfused_us)}{', ' if gain else ''}{gain})"
    return (
        f"plan of the moment: {groups}, launches {state.unfused_launches} → {state.launches}, "
        f"sum of its kernels {times}"
    )


def progress_line(state: Overview) -> str:
    """The run in one line of a log."""
    left = f", {clock(state.seconds_left)} left" if math.isfinite(state.seconds_left) else ""
    kernels = f"{len(state.kernels)} kernel{'s' * (len(state.kernels) != 1)}"
    return (
        f"{clock(state.seconds)} {state.trials} of {state.budget} trials, {kernels}{left}; "
        f"{plan_line(state)}"
    )


def progress_table(state: Overview, rows: int, note: str = "") -> Group:
    """The run as a table.

    Parameters
    ----------
    state : Overview
        What is known.
    rows : int
        Kernels to show at most.
    note : str
        What else to say.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("kernel", no_wrap=True, overflow="ellipsis", ratio=1)
    for column in ("calls", "trials", "best µs", "untuned µs", "unfused µs", "gain"):
        # The name of a kernel gives way, the numbers do not.
        width = max(_NARROWEST, len(column))
        table.add_column(column, justify="right", no_wrap=True, min_width=width)
    shown = state.kernels[: max(1, rows)]
    for view in shown:
        table.add_row(*map(escape, _cells(view)))
    hidden = state.kernels[len(shown) :]
    lines: list[object] = [table]
    if hidden:
        trials = sum(view.trials for view in hidden)
        lines.append(Text(f"… {len(hidden)} more kernels, {trials} trials", style="dim"))
    lines.append(Text(plan_line(state)))
    lines.append(
        Text(
            f"{state.trials} of {state.budget} trials, {clock(state.seconds)} gone, "
            f"{clock(state.seconds_left)} left",
            style="dim",
        )
    )
    if state.disk_problem:
        lines.append(Text(f"trials are kept in memory only: {state.disk_problem}", style="red"))
    if note:
        lines.append(Text(note, style="yellow"))
    return Group(*lines)


def _cells(view: KernelView) -> list[str]:
    name = operators_text(view.operators)
    name = f"{view.strategy}: {name}" if view.strategy else name
    return [
        f"{name} ({view.problem})" if view.problem else name,
        str(view.calls) if view.calls else "–",
        str(view.trials),
        time_text(view.best_us),
        time_text(view.untuned_us),
        time_text(view.unfused_us),
        gain_text(view.reference_us, view.best_us),
    ]
