"""Tuning of a model, from what a user asks for to a plan with measured numbers."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..build.inputs import require_static
from ..build.signature import signature_of
from ..compat import Target, tvm
from ..config import FusionConfig
from ..devices import TF32
from ..errors import DatabaseError, TuningError
from ..planner.plan import Plan
from ..schedules import remembering
from ..schedules.registry import Lookup
from ..targets import with_variant
from .allocation import TRIALS
from .describe import alone, describe, options
from .lookup import lookup_in, own_device, policy_of, recorded_device
from .session import Session
from .shipped import shipped_trials
from .summary import load_summaries, save_summary
from .trials import TrialSet
from .tuner import BATCH, Budget, Tuner
from .untuned import untuned_model
from .whole import Untuned, WholeTimes, time_whole
from .work_dir import Place, Records, WorkDir, record_arch
from .workbench import Remote, Workbench, device_of


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a tuning run found.

    Attributes
    ----------
    plan : Plan
        The fastest plan, with measured numbers.
    whole : WholeTimes or None
        Times of the whole model; None where only a server could have run it, and of a run that was
        stopped.
    trials : int
        Candidates tried, those of earlier runs included.
    shipped : {"tuned", "unfused", "untuned", "default"}
        What is compiled: the plan as tuned, without its groups because the whole model was not faster
        with them, what is compiled without tuning because that was faster than both, or TVM's default
        pipeline because that was faster still.
    stopped : bool
        Whether the run was stopped (``session.tuner.stopping``).
    """

    plan: Plan
    whole: WholeTimes | None
    trials: int
    shipped: str = "tuned"
    stopped: bool = False


def tune_model(
    mod: tvm.IRModule,
    target: Target,
    work_dir: str | os.PathLike[str],
    *,
    config: FusionConfig | None = None,
    trials: int = TRIALS,
    minutes: float | None = None,
    remote: Remote | None = None,
    devices: Sequence[int] | None = None,
    workbench: Workbench | None = None,
    require_cached: bool = False,
    name: str = "model",
    report: Callable[[Session], None] | None = None,
) -> Tuned:
    """Tune a canonical module.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    target : Target
        Complete target.
    work_dir : str or Path
        Where trials are kept; what is there already counts.
    config : FusionConfig, optional
        Strategies and limits.
    trials : int
        Trials over all kernels, those of earlier runs included.
    minutes : float, optional
        When to stop at the latest.
    remote : Remote, optional
        Where to measure; this machine when absent.
    devices : sequence of int, optional
        Numbers of the GPUs of this machine that measure, all alike; GPU 0 when absent.
    workbench : Workbench, optional
        Builds and measures, and lives on; one for this run alone when absent.
    require_cached : bool
        Measure nothing; an error if something would have to be.
    name : str
        Name of the model in the plan.
    report : callable, optional
        Called with the session at the start, after each batch and with each new plan. It may set
        ``session.tuner.stopping``: what is under way is finished, and the best so far returned.

    Raises
    ------
    ValueError
        If ``trials`` or ``minutes`` are not positive, the shape of an input is symbolic, or ``remote``,
        ``devices`` and ``workbench`` exclude each other.
    TuningError
        If nothing can be measured there, or with ``require_cached`` something would have to be.
    DatabaseError
        If the work dir cannot be used.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, not {trials}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be above 0, not {minutes:g}")
    require_static(signature_of(mod, target).inputs)
    place = WorkDir(work_dir).place(record_arch(target.attrs), policy_of(mod, target))
    config = config or FusionConfig()
    budget = Budget(trials, 60 * minutes if minutes is not None else float("inf"))
    if require_cached:
        device = device_of(target, remote, devices[0] if devices else 0)
        records = place.records()
        device = own_device(records, device)
        tuner = Tuner(with_variant(target), None, None, None, records, device)
        return _cached(_session(mod, target, config, tuner, budget, name, place.folder), mod, place)
    with _workbench(target, remote, devices, workbench) as bench:
        place.create()  # not before it is known that something can be measured
        records = place.records()
        tuner = _tuner(target, bench, records)
        session = _session(mod, target, config, tuner, budget, name, place.folder)
        tuner.report = _Watch(session, place, report)
        tuner.report()
        plan = session.run()
        _commit(session, place)
        here = not bench.is_remote
    found = _finish(session, plan, mod, lookup_in([records], tuner.device) if here else None)
    _save(session, place, found)
    return found


def _session(
    mod: tvm.IRModule,
    target: Target,
    config: FusionConfig,
    tuner: Tuner,
    budget: Budget,
    name: str,
    folder: Path,
) -> Session:
    """A run that knows what earlier ones with records of this folder asked for."""
    return Session(mod, target, config, tuner, budget, name, runs=load_summaries(folder))


def _cached(session: Session, mod: tvm.IRModule, place: Place) -> Tuned:
    """What is on record, without measuring.

    Raises
    ------
    TuningError
        If something would have to be measured.
    """
    try:
        return _recalled(session, mod, require_all=True)
    except TuningError as error:
        name = session.tuner.device.name
        others = collections.Counter(trial.device for trial in session.tuner.records)
        if name in others:
            raise
        told = f", but {others.total()} of {', '.join(sorted(others))}" if others else ""
        raise TuningError(
            f"work dir {place.folder.parent} has no trials of {place.arch}, {place.dtype_policy} and TVM {place.tvm} "
            f"on {name}{told}: the model was never measured there; tune first, by the same command without "
            "require_cached (--require-cached)"
        ) from error


def _tuner(target: Target, bench: Workbench, records: Records) -> Tuner:
    """A tuner that keeps all the builder's processes busy."""
    workers = bench.builder.workers
    batch = max(BATCH, min(workers, 2 * BATCH))
    return Tuner(
        with_variant(target), bench.builder, bench.references, bench.runner, records, bench.device,
        hints=_hints(target, records), batch=batch, ahead=2 * max(batch, workers),
    )  # fmt: skip


def _hints(target: Target, records: Records) -> TrialSet:
    """What comes with the package, which a run of its own may begin with; it has no products in TF32."""
    return TrialSet() if TF32 in target.keys else shipped_trials(records.arch, tvm.__version__)


def _finish(session: Session, plan: Plan, mod: tvm.IRModule, lookup: Lookup | None) -> Tuned:
    """Time the whole model, where that is possible, and take the fastest: tuned, unfused, untuned, or TVM's own."""
    trials, stopped = session.tuner.trials, session.tuner.stopping
    if lookup is None or stopped:
        return Tuned(plan, None, trials, stopped=stopped)
    with remembering():
        untuned = _untuned(session, mod)
        whole = time_whole(mod, session.target, plan, lookup, untuned)
    if whole.fastest == "tuned":
        plan = session.with_totals(plan, whole)
    elif whole.fastest == "untuned":
        plan = session.without_tuning(untuned.plan, whole)
    else:
        plan = session.without_groups(plan, whole, whole.fastest)
    return Tuned(plan, whole, trials, whole.fastest)


class _Watch:
    """Keeps a summary of each new plan, so that a run that is killed has one, and tells who asked."""

    def __init__(
        self, session: Session, place: Place, report: Callable[[Session], None] | None
    ) -> None:
        self._session, self._place, self._report = session, place, report
        self._plan: Plan | None = None

    def __call__(self) -> None:
        if self._session.plan is not self._plan:
            self._plan = self._session.plan
            _save(self._session, self._place, None)
        if self._report is not None:
            self._report(self._session)


def _commit(session: Session, place: Place) -> None:
    """Write what the plan's kernels decide, and their times, into meta-schedule's own database."""
    tuner, database = session.tuner, place.meta_database()
    for kernel, _ in session.calls:
        best = tuner.best(kernel)
        candidate = kernel.search.candidate_of(best.template, best.decision) if best else None
        trace = kernel.search.trace_of(candidate) if candidate is not None else None
        if trace is None:
            continue
        try:
            seconds = [us * 1e-6 for us in best.samples_us]
            database.commit(kernel.search.mod, trace, seconds, session.target)
        except DatabaseError as error:  # that trials are not written is worse
            tuner.disk_problem = tuner.disk_problem or str(error)
            return


def _save(session: Session, place: Place, found: Tuned | None) -> None:
    """Write the summary; a disk that is full does not end a run."""
    try:
        if found is None:
            save_summary(place.folder, describe(session, "running"))
            return
        state = "stopped" if found.stopped else "finished"
        summary = describe(
            session, state, plan=found.plan, whole=found.whole, shipped=found.shipped
        )
        save_summary(place.folder, summary)
    except DatabaseError as error:  # that trials are not written is worse
        session.tuner.disk_problem = session.tuner.disk_problem or str(error)


def plan_from_records(
    mod: tvm.IRModule,
    target: Target,
    records: Records,
    *,
    config: FusionConfig | None = None,
    name: str = "model",
) -> Plan:
    """Plan a canonical module with the times that are on record, measuring nothing.

    Where this machine's device has none, those of the device with most trials count: a build
    machine needs no GPU, and servers of a tracker measure for it.
    """
    device = recorded_device(records, device_of(target, None))
    tuner = Tuner(with_variant(target), None, None, None, records, device)
    session = _session(
        mod, target, config or FusionConfig(), tuner, Budget(0), name, records.folder
    )
    return _recalled(session, mod).plan


def _recalled(session: Session, mod: tvm.IRModule, *, require_all: bool = False) -> Tuned:
    """What the records say; another plan where the last run of this model found another way faster."""
    plan, trials = session.recall(require_all=require_all), session.tuner.trials
    own = alone(session), session.tuner.device.name, options(session)
    timed = [last for last in session.runs if last.tuned_us]
    # It may have been tuned by several names.
    runs = [last for last in timed if (last.alone, last.device, last.options) == own]
    last = max(runs, key=lambda run: run.date, default=None)
    if last is None or last.shipped == "tuned":
        return Tuned(plan, None, trials)
    whole = WholeTimes(last.tuned_us, last.unfused_us, last.default_us, untuned_us=last.untuned_us)
    if last.shipped == "untuned":
        plan = session.without_tuning(_untuned(session, mod).plan, whole)
    else:
        plan = session.without_groups(plan, whole, last.shipped)
    return Tuned(plan, None, trials, last.shipped)


def _untuned(session: Session, mod: tvm.IRModule) -> Untuned:
    return untuned_model(mod, session.target, config=session.config, name=session.name)


@contextlib.contextmanager
def _workbench(
    target: Target,
    remote: Remote | None,
    devices: Sequence[int] | None,
    given: Workbench | None,
) -> Iterator[Workbench]:
    """The caller's workbench, or one for this run alone."""
    if given is None:
        with Workbench(target, remote, devices) as own:
            yield own
        return
    if remote is not None or devices is not None:
        raise ValueError("a workbench measures where it was made to; leave remote and devices out")
    if given.kind != target.kind.name:
        raise ValueError(f"the workbench is for {given.kind}, the target is {target.kind.name}")
    yield given
