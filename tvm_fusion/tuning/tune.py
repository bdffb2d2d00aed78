"""Tuning of a model, from what a user asks for to a plan with measured numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ..compat import Target, tvm
from ..config import FusionConfig
from ..errors import TuningError
from ..planner.plan import Plan
from ..targets import runs_here, with_variant
from .builder import Builder
from .local_runner import LocalRunner
from .measure import Runner
from .reference import References
from .rpc_runner import RpcRunner
from .session import Session
from .tuned import lookup_in, policy_of
from .tuner import Budget, Device, Tuner
from .whole import WholeTimes, time_whole
from .work_dir import Records, WorkDir, record_arch

#: Trials over all kernels when nobody says how many.
TRIALS = 1000


@dataclasses.dataclass(frozen=True)
class Remote:
    """Servers of TVM's RPC tracker.

    Attributes
    ----------
    host, port : str, int
        The tracker.
    key : str
        Key of the servers, all of which have the same device.
    """

    host: str
    port: int
    key: str


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a tuning run found.

    Attributes
    ----------
    plan : Plan
        The fastest plan, with measured numbers.
    whole : WholeTimes or None
        Times of the whole model; None where only a server could have run it.
    trials : int
        Candidates tried, those of earlier runs included.
    fell_back : bool
        Whether the plan has no groups because the whole model was not faster with them.
    """

    plan: Plan
    whole: WholeTimes | None
    trials: int
    fell_back: bool = False


def tune_model(
    mod: tvm.IRModule,
    target: Target,
    work_dir: str | Path,
    *,
    config: FusionConfig | None = None,
    trials: int = TRIALS,
    minutes: float | None = None,
    remote: Remote | None = None,
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
    require_cached : bool
        Measure nothing; an error if something would have to be.
    name : str
        Name of the model in the plan.
    report : callable, optional
        Called with the session after each batch.

    Raises
    ------
    TuningError
        If nothing can be measured there, or with ``require_cached`` something would have to be.
    DatabaseError
        If the work dir cannot be used.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, not {trials}")
    records = WorkDir(work_dir).open(record_arch(target.attrs), policy_of(mod, target))
    config = config or FusionConfig()
    budget = Budget(trials, 60 * minutes if minutes is not None else float("inf"))
    with _parts(target, remote, require_cached) as (builder, references, runner, device):
        tuner = Tuner(with_variant(target), builder, references, runner, records, device)
        session = Session(mod, target, config, tuner, budget, name)
        tuner.report = functools.partial(report, session) if report is not None else None
        plan = session.recall(require_all=True) if require_cached else session.run()
    if remote is not None or not runs_here(target) or require_cached:
        return Tuned(plan, None, tuner.trials)
    lookup = lookup_in([records])
    whole = time_whole(mod, target, plan, lookup)
    if plan.groups and not whole.fusing_pays:
        return Tuned(session.without_groups(plan, whole), whole, tuner.trials, fell_back=True)
    return Tuned(session.with_totals(plan, whole), whole, tuner.trials)


def plan_from_records(
    mod: tvm.IRModule,
    target: Target,
    records: Records,
    *,
    config: FusionConfig | None = None,
    name: str = "model",
) -> Plan:
    """Plan a canonical module with the times that are on record, measuring nothing."""
    tuner = Tuner(with_variant(target), None, None, None, records, device_of(target, None))
    session = Session(mod, target, config or FusionConfig(), tuner, Budget(0), name)
    return session.recall()


@contextlib.contextmanager
def _parts(target: Target, remote: Remote | None, nothing: bool) -> Iterator[tuple]:
    """What builds, makes references and measures (None where nothing may), and the device."""
    device = device_of(target, remote)
    if nothing:
        yield None, None, None, device
        return
    with contextlib.ExitStack() as stack:
        runner: Runner
        if remote is not None:
            runner = stack.enter_context(RpcRunner(remote.host, remote.port, remote.key))
        else:
            if not runs_here(target):
                raise TuningError(
                    f"this machine has no device for {target.kind.name}; measure on another one with "
                    "--rpc HOST:PORT --key KEY"
                )
            runner = stack.enter_context(LocalRunner(target.kind.name))
        builder = stack.enter_context(Builder())
        references = stack.enter_context(References())
        yield builder, references, runner, device


def device_of(target: Target, remote: Remote | None) -> Device:
    """The device whose times are meant."""
    if remote is not None:
        return Device(f"rpc:{remote.key}")
    if target.kind.name == "llvm":
        return Device(str(json.loads(str(target)).get("mcpu") or "cpu"))
    device = tvm.cuda(0)
    if not device.exist:
        return Device(str(target.attrs["arch"]))
    return Device(str(device.device_name), _driver())


def _driver() -> str:
    """Version of the NVIDIA driver; empty where the kernel does not say."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"\b(\d{3}\.\d[\d.]*)\b", text)
    return match[1] if match else ""
