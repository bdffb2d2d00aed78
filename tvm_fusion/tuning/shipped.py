"""Records that come with the package, one file an arch, and the making of such files.

``tvm_fusion/tuning/records/<arch>.jsonl`` has the best trial of each kernel, a line each, as
``trials.jsonl`` has them, with two differences: the samples are their median, and ``tvm`` names the
version of TVM to which the kernel's digest belongs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from importlib import resources

from ..devices import TF32
from .trials import Trial, TrialSet, parse_line, ranked
from .work_dir import Place


@functools.cache
def shipped_trials(arch: str, tvm_version: str) -> TrialSet:
    """Return the trials that came with the package.

    Parameters
    ----------
    arch : str
        Base arch.
    tvm_version : str
        Trials of other versions are left out.

    Returns
    -------
    TrialSet
        One trial a kernel; empty for an arch without a file.
    """
    file = resources.files(__package__) / "records" / f"{arch}.jsonl"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = [
        Trial.from_dict(fields)
        for fields in map(parse_line, filter(str.strip, text.splitlines()))
        if fields["tvm"] == tvm_version and fields["arch"] == arch
    ]
    return TrialSet(found)


def export_trials(places: Iterable[Place]) -> str:
    """Return the best trial of each kernel in the format in which the package ships them.

    Parameters
    ----------
    places : iterable of Place
        Folders of records of one arch; those of kernels that may be in TF32 are left out.

    Returns
    -------
    str
        A line each, sorted; empty where no kernel has a time.

    Raises
    ------
    DatabaseError
        If a file cannot be read.
    """
    found: dict[tuple[str, str], list[Trial]] = {}
    for place in places:
        if TF32 in place.dtype_policy.split("+"):
            continue  # what is shipped serves exact products
        for trial in place.records():
            found.setdefault((place.tvm, trial.kernel), []).append(trial)
    lines = []
    for (version, _), trials in sorted(found.items()):
        for best in ranked(trials)[:1]:
            short = dataclasses.replace(best, samples_us=(best.microseconds,))
            fields = {**short.to_dict(), "tvm": version}
            lines.append(json.dumps(fields, separators=(",", ":")) + "\n")
    return "".join(lines)
