"""What was tuned, for compilation: from a function to the template and the decision that measured best."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence

from ..compat import Target, tirx, tvm
from ..devices import TF32
from ..errors import DatabaseError
from ..planner.plan import Plan
from ..schedules.decisions import Decision
from ..schedules.registry import Lookup
from .kernels import kernel_digest
from .shipped import shipped_trials
from .summary import load_summaries
from .trials import Trial, TrialSet
from .tuner import Device
from .work_dir import Records, WorkDir, dtype_policy, record_arch


def lookup_in(records: Sequence[TrialSet], device: Device) -> Lookup:
    """A look-up of the fastest right trial; earlier records go before later ones.

    Parameters
    ----------
    records : sequence of TrialSet
        Trials for the target that will be compiled for. Of a work dir's, those of one device count (see
        `recorded_device`): the fastest of another one may be slow here.
    device : Device
        Where the model will run.
    """
    known: dict[str, Trial | None] = {}
    of_device = [
        (trials, recorded_device(trials, device).name if isinstance(trials, Records) else None)
        for trials in records
    ]

    def find(func: tirx.PrimFunc, target: Target) -> tuple[str, Decision] | None:
        digest = kernel_digest(func)
        if digest not in known:
            found = (trials.best(digest, name) for trials, name in of_device)
            known[digest] = next((best for best in found if best is not None), None)
        best = known[digest]
        return (best.template, best.decision) if best is not None else None

    return find


def recorded_device(records: TrialSet, wanted: Device) -> Device:
    """A device if there are trials of it, by its present or its former name, else the one of which there are most."""
    counts = collections.Counter(trial.device for trial in records)
    own = own_device(records, wanted)
    if own.name in counts or not counts:
        return own
    return Device(max(sorted(counts), key=counts.__getitem__))


def own_device(records: TrialSet, wanted: Device) -> Device:
    """A device by the name that it has in records: its former one, if there are trials of that alone."""
    names = {trial.device for trial in records}
    if wanted.name not in names and wanted.former in names:
        return Device(wanted.former, wanted.driver)
    return wanted


def tuned_records(
    mod: tvm.IRModule,
    target: Target,
    work_dir: str | os.PathLike[str] | None = None,
    *,
    shipped: bool = True,
) -> list[TrialSet]:
    """Records for a model: those of a work dir, then those that ship with the package.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    target : Target
        Complete target.
    work_dir : str or path, optional
        A work dir.
    shipped : bool
        Whether those of the package count.

    Raises
    ------
    DatabaseError
        If nothing was tuned in the work dir for this target and these dtypes. A run without trials is one: of a model
        without kernels, or with too little time.
    """
    arch = record_arch(target.attrs)
    found: list[TrialSet] = []
    if work_dir is not None:
        dtypes = policy_of(mod, target)
        own = WorkDir(work_dir).place(arch, dtypes).records()
        if not len(own) and not load_summaries(own.folder):
            raise DatabaseError(
                f"work dir {work_dir} holds no records of {arch} and {dtypes} for this version of "
                "TVM; tvm-fusion tune --work-dir makes them"
            )
        found.append(own)
    # Those are of exact products: the fastest of a float32 product is none on tensor cores.
    if shipped and TF32 not in target.keys:
        found.append(shipped_trials(arch, tvm.__version__))
    return found


def records_for(plan: Plan | None, records: Sequence[TrialSet]) -> list[TrialSet]:
    """Records that decide a plan's kernels: not a work dir's where tuning measured the model faster without them."""
    if plan is None or plan.pipeline != "untuned":
        return list(records)
    return [trials for trials in records if not isinstance(trials, Records)]


def policy_of(mod: tvm.IRModule, target: Target) -> str:
    """The dtypes in which a model computes for a target, as they name a folder of records."""
    dtypes = _dtypes(mod)
    return dtype_policy({*dtypes, TF32} if "float32" in dtypes and TF32 in target.keys else dtypes)


def _dtypes(mod: tvm.IRModule) -> set[str]:
    found: set[str] = set()
    for binding in mod["main"].body.blocks[0].bindings:
        ty = binding.var.ty
        found.update(str(f.dtype) for f in getattr(ty, "fields", [ty]) if hasattr(f, "dtype"))
    return found
