"""Trials: what was tried for a kernel and what came of it, one JSON line each.

This module imports neither TVM nor anything that touches the disk.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..schedules.decisions import Decision

#: Version of a line's format. A line of a later one is left alone.
SCHEMA = 1

#: From median absolute deviation to standard deviation, of normally distributed samples.
_DEVIATION = 1.4826

#: A sample above this (31 years, in microseconds) is no time.
_LONGEST = 1e15

_COUNTS = ("registers", "spill_bytes", "shared_bytes")
_TEXTS = ("kernel", "template", "verdict", "arch", "device", "driver", "code", "date", "message")


class NewerSchema(ValueError):
    """A line was written by a later release."""


def now() -> str:
    """Return the time in UTC, ISO 8601, to the millisecond."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def trial_digest(kernel: str, template: str, decision: Decision) -> str:
    """Name what a trial tried, in 16 hex digits; the order of the decisions does not count."""
    text = json.dumps([kernel, template, sorted(decision)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One decision of one template for one kernel, and what came of it.

    Parameters
    ----------
    kernel : str
        Digest of the unscheduled PrimFunc.
    template : str
        Name of the schedule template.
    decision : Decision
        What the template decided.
    verdict : str
        ``"ok"``, or why there is no time: ``"wrong"``, ``"crashed"``, ``"timeout"``, ``"error"``,
        ``"rejected"``, ``"spills"``, ``"shared_memory"``, ``"compiler"``.
    arch : str
        Base arch (``"sm_90"``) or CPU architecture (``"x86_64"``) for which it was built.
    samples_us : tuple of float
        Measured times in microseconds; at least one where the verdict is ``"ok"``.
    registers, spill_bytes, shared_bytes : int or None
        What the compiler reported, per thread, thread and block; None where it reports nothing.
    predicted_us : float or None
        What the template's cost model predicted when it was tried, in microseconds; None where unknown.
    code : str
        Digest of the machine code.
    device, driver : str
        Where it was measured.
    date : str
        When, in UTC.
    operators : tuple of str
        Operators of the kernel, where known; for people only.
    message : str
        Details of a failure; for people only.
    settled : bool
        Whether this is the winner of a kernel's last round (`finals`), which goes before all others.

    Raises
    ------
    ValueError
        If a value has another type, or a verdict ``"ok"`` comes without a time.
    """

    kernel: str
    template: str
    decision: Decision
    verdict: str
    arch: str
    samples_us: tuple[float, ...] = ()
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    predicted_us: float | None = None
    code: str = ""
    device: str = ""
    driver: str = ""
    date: str = dataclasses.field(default_factory=now)
    operators: tuple[str, ...] = ()
    message: str = ""
    settled: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "decision", tuple(map(tuple, self.decision)))
        object.__setattr__(self, "samples_us", tuple(self.samples_us))
        object.__setattr__(self, "operators", tuple(self.operators))
        texts = {name: getattr(self, name) for name in _TEXTS}
        texts |= {f"operators[{i}]": name for i, name in enumerate(self.operators)}
        for name, value in texts.items():
            _check(isinstance(value, str), name, "a text", value)
        for name in ("kernel", "template", "verdict", "arch"):
            _check(bool(texts[name]), name, "not empty", texts[name])
        for name in _COUNTS:
            value = getattr(self, name)
            legal = value is None or (type(value) is int and value >= 0)
            _check(legal, name, "a count or None", value)
        types = [tuple(map(type, pair)) for pair in self.decision]
        legal = all(pair in ((str, int), (str, str)) for pair in types)
        legal = legal and len(dict(self.decision)) == len(types)
        _check(legal, "decision", "names, each with a number or word", self.decision)
        legal = all(type(s) in (int, float) and 0 < s < _LONGEST for s in self.samples_us)
        _check(legal, "samples_us", "positive numbers", self.samples_us)
        time = self.predicted_us
        legal = time is None or (type(time) in (int, float) and 0 < time < _LONGEST)
        _check(legal, "predicted_us", "a positive number or None", time)
        timed = bool(self.samples_us) or self.verdict != "ok"
        _check(timed, "samples_us", "given for the verdict 'ok'", self.samples_us)
        _check(type(self.settled) is bool, "settled", "true or false", self.settled)

    @functools.cached_property
    def trial(self) -> str:
        """Digest of kernel, template and decision."""
        return trial_digest(self.kernel, self.template, self.decision)

    @property
    def microseconds(self) -> float:
        """Median of the samples; infinite unless the verdict is ``"ok"``."""
        return statistics.median(self.samples_us) if self.verdict == "ok" else math.inf

    @property
    def error_us(self) -> float:
        """Standard error of `microseconds`, from the samples' median absolute deviation; 0 of one sample."""
        if self.verdict != "ok":
            return math.inf
        middle = self.microseconds
        spread = statistics.median(abs(s - middle) for s in self.samples_us)
        # The standard error of a median is about 1.25 times that of a mean.
        return 1.25 * _DEVIATION * spread / math.sqrt(len(self.samples_us))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they stand in a line."""
        fields = {"schema": SCHEMA, "kernel": self.kernel, "trial": self.trial}
        fields |= {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {"decision": dict(self.decision), "samples_us": list(self.samples_us)}
        for name in ("operators", "message", "predicted_us", "settled"):
            if not fields[name]:
                del fields[name]
        return fields

    @classmethod
    def from_dict(cls, fields: Any) -> Trial:
        """Read what ``to_dict`` returned; names that are not known are skipped.

        Raises
        ------
        NewerSchema
            If the line is of a later format.
        ValueError
            If it is no trial, or its digest is not that of its decision.
        """
        if not isinstance(fields, dict) or type(fields.get("schema")) is not int:
            raise ValueError("no trial")
        if fields["schema"] > SCHEMA:
            raise NewerSchema(f"schema {fields['schema']}")
        known = {f.name: fields[f.name] for f in dataclasses.fields(cls) if f.name in fields}
        for name, kind in (("decision", dict), ("samples_us", list), ("operators", list)):
            _check(isinstance(known.get(name, kind()), kind), name, kind.__name__, known.get(name))
        try:
            # A date that is missing must not become the time of reading.
            trial = cls(**{"date": "", **known, "decision": tuple(known["decision"].items())})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no trial: {error}") from error
        _check(fields.get("trial") == trial.trial, "trial", trial.trial, fields.get("trial"))
        return trial

    def to_line(self) -> str:
        """Return the trial as one line of JSON without its end."""
        return json.dumps(self.to_dict(), separators=(",", ":"))


def parse_line(line: str | bytes) -> Any:
    """Parse one line of JSON.

    Raises
    ------
    ValueError
        If it is damaged, in whatever way.
    """
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _check(condition: bool, name: str, wanted: str, value: Any) -> None:
    if not condition:
        raise ValueError(f"{name} of a trial must be {wanted}, got {value!r}")


#: What was tried, for which arch, on which device.
_Key = tuple[str, str, str]


class TrialSet:
    """Trials in memory: one for each (trial, arch, device), the latest.

    Of two of the same date the one whose line sorts last is kept, so that the content does not
    depend on the order in which trials arrive.
    """

    def __init__(self, trials: Iterable[Trial] = ()) -> None:
        self._trials: dict[_Key, Trial] = {}
        self._by_kernel: dict[str, dict[_Key, Trial]] = collections.defaultdict(dict)
        for trial in trials:
            self._keep(trial)

    def _keep(self, trial: Trial) -> bool:
        """Take a trial in; say whether it changed anything."""
        key = (trial.trial, trial.arch, trial.device)
        known = self._trials.get(key)
        if known is not None and _age(known) >= _age(trial):
            return False
        self._trials[key] = self._by_kernel[trial.kernel][key] = trial
        return True

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(list(self._trials.values()))

    def kernels(self) -> list[str]:
        """Return the kernels that have trials."""
        return list(self._by_kernel)

    def trials(self, kernel: str, device: str | None = None) -> list[Trial]:
        """Return the trials of a kernel in the order in which they came, of one device if given."""
        found: Mapping[_Key, Trial] = self._by_kernel.get(kernel, {})
        return [trial for trial in found.values() if device in (None, trial.device)]

    def best(self, kernel: str, device: str | None = None) -> Trial | None:
        """Return the right trial that is settled, else the one of least median time; None where there is none.

        Ties go to the smaller digest, then to the smaller name of a device.
        """
        return next(iter(ranked(self.trials(kernel, device))), None)


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials of verdict ``"ok"``: those that are settled, then the others, fastest first."""
    right = (trial for trial in trials if trial.verdict == "ok")
    return sorted(right, key=lambda t: (not t.settled, t.microseconds, t.trial, t.device))


def _age(trial: Trial) -> tuple[str, str]:
    return trial.date, trial.to_line()
