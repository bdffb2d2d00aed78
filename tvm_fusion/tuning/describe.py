"""A tuning run as a summary: what was considered, how deep, and what the whole model takes."""

from __future__ import annotations

import collections
import dataclasses
import json
import math

from ..config import FusionConfig
from ..planner.plan import Plan
from ..strategies.base import Proposal
from .asked import graph_digest, notes_of
from .depths import Chain, Row, chains
from .overview import KernelView, kernel_views, single_kernels
from .session import Session
from .summary import ChainNote, KernelNote, RowNote, Slower, Summary
from .tuned_kernel import TunedKernel
from .whole import WholeTimes


def describe(
    session: Session,
    state: str,
    *,
    plan: Plan | None = None,
    whole: WholeTimes | None = None,
    shipped: str = "tuned",
) -> Summary:
    """Summarise a run that has a plan.

    Parameters
    ----------
    session : Session
        The run.
    state : {"running", "stopped", "finished"}
        How it stands.
    plan : Plan, optional
        What will be compiled; the session's when absent.
    whole : WholeTimes, optional
        Times of the whole model.
    shipped : {"tuned", "unfused", "untuned", "default"}
        What is compiled (see `Tuned`).
    """
    plan = plan or session.plan
    if plan is None:
        raise ValueError("the run has no plan yet")
    target = " ".join(part for part in (plan.target.kind, plan.target.arch) if part)
    slower = [r for r in plan.rejected if r.reason == "slower_measured"]
    return Summary(
        model=plan.model,
        target=target,
        dtype=plan.dtype,
        device=session.tuner.device.name,
        driver=session.tuner.device.driver,
        trials=session.tuner.trials,
        budget=session.budget.trials,
        state=state,
        launches=(plan.totals.launches_before, plan.totals.launches_after),
        groups=len(plan.groups),
        kernels=tuple(map(_note, kernel_views(session))),
        chains=tuple(_chains(session, shipped)),
        slower=tuple(Slower(r.strategy, r.nodes, r.detail) for r in slower),
        alone=alone(session),
        tuned_us=whole.tuned_us if whole else None,
        unfused_us=whole.unfused_us if whole else None,
        default_us=whole.default_us if whole else None,
        untuned_us=whole.untuned_us if whole else None,
        shipped=shipped,
        options=options(session),
        graph=graph_digest(session.graph),
        asked=notes_of((p for p, _ in session.times.asked), session.explored()),
    )


def alone(session: Session) -> tuple[tuple[str, int], ...]:
    """Kernels of the operators alone, each with how often it comes, sorted."""
    counts = collections.Counter(kernel.digest for kernel in single_kernels(session).values())
    return tuple(sorted(counts.items()))


def options(session: Session) -> tuple[tuple[str, str], ...]:
    """What the configuration says otherwise than the default one: what was timed with it says nothing of another."""
    default = dataclasses.asdict(FusionConfig())
    own = sorted(dataclasses.asdict(session.config).items())
    return tuple((n, json.dumps(v, sort_keys=True)) for n, v in own if v != default[n])


def _note(view: KernelView) -> KernelNote:
    untuned = view.untuned_us if math.isfinite(view.untuned_us) else None
    return KernelNote(
        view.kernel, view.operators, view.strategy, view.depth, view.calls, view.nbytes,
        view.floor_us, untuned, view.parts,
    )  # fmt: skip


def _chains(session: Session, shipped: str) -> list[ChainNote]:
    """Depth against latency; chains of the same kernels once, with their number."""
    singles = single_kernels(session)
    kernels = {p: k for p, k in session.times.asked if k is not None and len(p.operators) > 1}

    def time(group: Proposal) -> float:
        return kernels[group].best_us

    def time_alone(name: str) -> float:
        return singles[name].best_us if name in singles else math.inf

    notes: dict[tuple, list[ChainNote]] = collections.defaultdict(list)
    for chain in chains(session.graph, list(kernels), time, time_alone):
        note = _chain(session, chain, kernels, singles, shipped)
        if len(note.rows) > 1:
            notes[note.operators, note.rows].append(note)
    first = [(same[0], len(same)) for same in notes.values()]
    return [ChainNote(n.nodes, n.operators, count, n.rows) for n, count in first]


def _chain(
    session: Session, chain: Chain, kernels: dict[Proposal, TunedKernel],
    singles: dict[str, TunedKernel], shipped: str,
) -> ChainNote:  # fmt: skip
    graph, inside = session.graph, set(chain.operators)
    planned = {g.operators for g in session.groups if inside & set(g.operators)}

    def note(row: Row) -> RowNote:
        digests = [kernels[group].digest for group in row.groups]
        digests += [singles[name].digest for name in row.singles if name in singles]
        sets = [group.operators for group in row.groups] + [(name,) for name in row.singles]
        nbytes = sum(sum(graph.traffic(names)) for names in sets)
        chosen = shipped != "default" and {group.operators for group in row.groups} == planned
        failed = math.isinf(row.microseconds)
        return RowNote(row.least, row.most, tuple(digests), nbytes, chosen, failed)

    operators = tuple(graph.by_name[name].op for name in chain.operators)
    return ChainNote(chain.operators, operators, 1, tuple(map(note, chain.rows)))
