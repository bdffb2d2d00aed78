"""What the page about tuning shows, from the trials and a model's summary."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..tuning.summary import ChainNote, KernelNote, RowNote, Summary
from ..tuning.trials import Trial, TrialSet
from . import words
from .curves import Curve, build_curve, decision_text
from .tuning_text import gain_text, operators_text, time_text

#: Kernels with a plot; the table has all.
MAX_CURVES = 24

#: Examples shown of each verdict.
MAX_EXAMPLES = 5

#: What each verdict means.
VERDICTS: dict[str, str] = {
    "rejected": "the template cannot make this kernel so",
    "spills": "registers would spill to memory: never run",
    "shared_memory": "more shared memory than a block has: never run",
    "compiler": "the compiler refused the code",
    "wrong": "the result differed from the reference: its time does not count",
    "crashed": "the kernel ended its process",
    "timeout": "it was not done in time",
    "error": "it could not be loaded or launched",
}

#: Names of the depths.
_DEPTHS = {1: "1, unfused", 2: "2", 3: "3–4", 5: "5 and more"}


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """One kernel in the table; times in microseconds, infinite where there is none."""

    digest: str
    name: str
    strategy: str
    depth: int
    calls: int
    trials: int
    right: int
    best: Trial | None
    untuned_us: float
    unfused_us: float
    floor_us: float
    curve: Curve | None

    @property
    def best_us(self) -> float:
        """Best time."""
        return self.best.microseconds if self.best else math.inf

    @property
    def cells(self) -> list[str]:
        """Its numbers as texts: calls to gain."""
        reference = self.unfused_us if self.strategy else self.untuned_us
        return [
            str(self.calls) if self.calls else "–", f"{self.right} of {self.trials}",
            time_text(self.best_us), time_text(self.untuned_us), time_text(self.unfused_us),
            gain_text(reference, self.best_us),
        ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DepthRow:
    """One depth of a chain."""

    depth: str
    kernels: int
    mib: str
    traffic: str
    registers: str
    spilled: str
    us: str
    change: str
    chosen: bool
    fastest: bool


@dataclasses.dataclass(frozen=True)
class DepthTable:
    """A chain at several depths."""

    name: str
    nodes: str
    count: int
    rows: tuple[DepthRow, ...]


@dataclasses.dataclass(frozen=True)
class Rejected:
    """Candidates of one verdict."""

    verdict: str
    meaning: str
    count: int
    share: str
    examples: tuple[tuple[str, str, str], ...]


@dataclasses.dataclass(frozen=True)
class ModelPage:
    """One model, or the kernels of a folder of which no model is known."""

    title: str
    facts: tuple[str, ...]
    state: str
    tiles: tuple[dict[str, Any], ...]
    kernels: tuple[KernelRow, ...]
    curves: tuple[KernelRow, ...]
    chains: tuple[DepthTable, ...]
    rejected: tuple[Rejected, ...]
    trials: int
    summary: Summary | None

    @property
    def slower(self) -> tuple[Any, ...]:
        """Groups that were measured slower than their parts."""
        return self.summary.slower if self.summary else ()


def model_page(summary: Summary | None, trials: TrialSet, title: str, dtype: str) -> ModelPage:
    """Put together what is known of one model.

    Parameters
    ----------
    summary : Summary or None
        Its last run; None to show every kernel that has trials.
    trials : TrialSet
        Trials of its folder.
    title, dtype : str
        Name and types where there is no summary.
    """
    device = summary.device if summary else None
    notes = summary.kernels if summary else tuple(map(_unknown, trials.kernels()))
    named = {trial.kernel: trial.operators for trial in trials}
    own = {note.kernel: trials.trials(note.kernel, device) for note in notes}
    best = {note.kernel: trials.best(note.kernel, device) for note in notes}
    rows = [_kernel_row(note, own[note.kernel], best, named) for note in notes]
    rows.sort(
        key=lambda row: (
            not row.calls,
            -row.calls * row.best_us if row.calls else -row.trials,
            row.digest,
        )
    )
    tried = [trial for found in own.values() for trial in found]
    devices = sorted({(t.device, t.driver) for t in tried})
    facts = [summary.target, summary.dtype] if summary else [dtype]
    facts += [f"{name}, driver {driver}" if driver else name for name, driver in devices if name]
    return ModelPage(
        title=summary.model if summary else title,
        facts=tuple(facts),
        state=_state(summary, len(tried)),
        tiles=tuple(_tiles(summary)) if summary else (),
        kernels=tuple(rows),
        curves=tuple(row for row in rows if row.curve is not None)[:MAX_CURVES],
        chains=_chains(summary, best) if summary else (),
        rejected=tuple(_rejected(tried)),
        trials=len(tried),
        summary=summary,
    )  # fmt: skip


def _unknown(kernel: str) -> KernelNote:
    return KernelNote(kernel, (), "", 1, 0, 0, 0.0, None)


def _kernel_row(
    note: KernelNote, trials: Sequence[Trial], best: dict[str, Trial | None],
    named: dict[str, tuple[str, ...]],
) -> KernelRow:  # fmt: skip
    parts = [(best.get(kernel), count) for kernel, count in note.parts]
    unfused = sum(_us(trial) * count for trial, count in parts) if parts else math.inf
    untuned = note.untuned_us if note.untuned_us is not None else math.inf
    levels = [("untuned", untuned), ("unfused", unfused), ("floor", note.floor_us)]
    return KernelRow(
        digest=note.kernel,
        name=operators_text(note.operators or named.get(note.kernel, ())) or note.kernel,
        strategy=note.strategy,
        depth=note.depth,
        calls=note.calls,
        trials=len(trials),
        right=sum(trial.verdict == "ok" for trial in trials),
        best=best[note.kernel],
        untuned_us=untuned,
        unfused_us=unfused,
        floor_us=note.floor_us,
        curve=build_curve(trials, levels) if len(trials) > 1 else None,
    )


def _us(trial: Trial | None) -> float:
    return trial.microseconds if trial is not None else math.inf


def _state(summary: Summary | None, count: int) -> str:
    """How the run stands, in a sentence."""
    if summary is None:
        return (
            f"{count} trials. No run of a model is on record beside them, so chains and the final "
            "comparison are not known; tuning the model again in this work dir adds them and "
            "measures nothing twice."
        )
    told = {
        "finished": "The run is finished",
        "stopped": "The run was stopped; the plan is the best so far",
        "running": "The run is under way, or was killed; the plan is the best so far",
    }[summary.state]
    return f"{told}: {summary.trials} trials of {summary.budget}, on {summary.date[:10]}."


def _tiles(summary: Summary) -> Iterable[dict[str, Any]]:
    """The outcome in large figures."""
    before, after = summary.launches
    if summary.shipped != "default":  # how many kernels TVM makes is not known
        yield _tile("kernel launches", "", before, after, str(before), str(after))
    sides = {
        "untuned": ("untuned", summary.untuned_us), "unfused": ("unfused", summary.unfused_us),
        "default": ("TVM's default", summary.default_us),
    }  # fmt: skip
    ours, us = sides.pop(summary.shipped, ("tuned", summary.tuned_us))
    for label, other in sides.values():
        if us is not None and other is not None:
            name = f"whole model, {label} → {ours}"
            yield _tile(name, "µs", other, us, time_text(other), time_text(us))


def _tile(
    label: str, unit: str, before: float, after: float, before_text: str, after_text: str
) -> dict[str, Any]:
    most = max(before, after) or 1
    return {
        "label": label, "unit": unit, "before": before_text, "after": after_text,
        "change": words.change(before, after),
        "bars": tuple(round(100 * value / most, 1) for value in (before, after)),
    }  # fmt: skip


def _chains(summary: Summary, best: dict[str, Trial | None]) -> tuple[DepthTable, ...]:
    """All chains, those that take most time unfused first."""

    def unfused(chain: ChainNote) -> float:
        known = (best.get(kernel) for kernel in chain.rows[0].kernels)
        return chain.count * sum(trial.microseconds for trial in known if trial is not None)

    order = sorted(summary.chains, key=lambda chain: (-unfused(chain), chain.nodes))
    return tuple(_depths(chain, best) for chain in order)


def _depths(chain: ChainNote, best: dict[str, Trial | None]) -> DepthTable:
    """Depth against latency of a chain, with the times of now."""
    times = [
        math.inf if row.failed else sum(_us(best.get(k)) for k in row.kernels) for row in chain.rows
    ]
    first = chain.rows[0].nbytes
    rows = [
        _depth_row(row, us, times[0], first, best, us == min(times))
        for row, us in zip(chain.rows, times, strict=True)
    ]  # fmt: skip
    name, nodes = operators_text(chain.operators, 12), words.span(chain.nodes)
    return DepthTable(name, nodes, chain.count, tuple(rows))


def _depth_row(
    row: RowNote, us: float, unfused: float, nbytes: int, best: dict[str, Trial | None], fastest: bool
) -> DepthRow:  # fmt: skip
    known = [trial for kernel in row.kernels if (trial := best.get(kernel)) is not None]
    deepest = functools.partial(_most, [] if row.failed else known)
    return DepthRow(
        depth=_DEPTHS[row.least],
        kernels=len(row.kernels),
        mib=words.mib(row.nbytes),
        traffic=words.change(nbytes, row.nbytes) if row.least > 1 else "",
        registers=deepest("registers"),
        spilled=deepest("spill_bytes"),
        us=time_text(us) if not row.failed else "no right kernel",
        change=gain_text(unfused, us) if row.least > 1 else "",
        chosen=row.chosen,
        fastest=fastest and math.isfinite(us),
    )


def _most(trials: Sequence[Trial], field: str) -> str:
    values = [value for trial in trials if (value := getattr(trial, field)) is not None]
    return str(max(values)) if values else "–"


def _rejected(trials: Sequence[Trial]) -> Iterable[Rejected]:
    """Candidates without a time by verdict, the most frequent first."""
    found = collections.defaultdict(list)
    for trial in trials:
        if trial.verdict != "ok":
            found[trial.verdict].append(trial)
    for verdict, same in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        examples = tuple(
            (operators_text(t.operators) or t.kernel, decision_text(t), t.message or "–")
            for t in same[:MAX_EXAMPLES]
        )
        share = f"{100 * len(same) / len(trials):.0f} %"
        yield Rejected(verdict, VERDICTS.get(verdict, ""), len(same), share, examples)
