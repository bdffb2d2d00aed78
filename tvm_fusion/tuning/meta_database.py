"""Meta-schedule's own records (its ``JSONDatabase``), read and written without its reader.

TVM 0.27's reader fails on one damaged line, ends the process by a signal on others (an empty line,
a null in a trace), and numbers workloads by what its own process has seen, so that two processes
mix theirs up. Here the files keep TVM's format, which its reader reads, but workloads are only
compared by their structural hash, a record is checked before TVM sees its trace, and a workload is
numbered under the lock of its file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..compat import Target, s_tir, tvm
from .journal import Journal, News
from .trials import parse_line
from .work_dir import record_arch, warn_of_lines

ms = s_tir.meta_schedule

#: A time above this (31 years, in seconds) is none.
_LONGEST = 1e9

#: A workload as its line has it: its structural hash and its module.
_Workload = list[str]

#: A record as its line has it: trace, seconds, target, arguments.
_Record = list[Any]


class MetaDatabase:
    """Schedule traces and their times, by workload.

    Parameters
    ----------
    folder : Path
        Holds ``database_workload.json`` and ``database_tuning_record.json``, or will.
    arch : str
        Base arch whose records count; TVM's own look-up ignores the target.

    Raises
    ------
    DatabaseError
        If a file cannot be read.
    """

    def __init__(self, folder: Path, arch: str) -> None:
        self.arch = arch
        self._workload_file = Journal(folder / "database_workload.json")
        self._record_file = Journal(folder / "database_tuning_record.json")
        self._workloads: list[_Workload | None] = []
        self._rows: list[tuple[int, _Record]] = []
        self._warned: set[Path] = set()
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have added.

        Raises
        ------
        DatabaseError
            If a file cannot be read.
        """
        # Records first: the workload of a record is always written before it.
        news = self._record_file.read()
        self._read_workloads(self._workload_file.read())
        if news.anew:
            self._rows = []
        damaged = int(bool(news.tail))
        for line in news.lines:
            try:
                self._rows.append(_parse_record(line, len(self._workloads)))
            except ValueError:
                damaged += 1
        self._warn(self._record_file, damaged)

    def commit(
        self, mod: tvm.IRModule, trace: Any, seconds: Sequence[float], target: Target
    ) -> None:
        """Write a record, unless the same one is there.

        Parameters
        ----------
        mod : tvm.IRModule
            The unscheduled function, named ``main``.
        trace : Trace
            Trace of its schedule.
        seconds : sequence of float
            Measured times.
        target : Target
            For which it was built.

        Raises
        ------
        DatabaseError
            If a file cannot be written.
        ValueError
            If the target is of another arch, or a time is none.
        """
        workload = ms.database.Workload(mod)
        arguments = ms.arg_info.ArgInfo.from_prim_func(mod["main"])
        record = ms.database.TuningRecord(trace, workload, list(seconds), target, arguments)
        row = record.as_json()
        _check_record(row)
        if record_arch(row[2]) != self.arch:
            raise ValueError(f"a record of {record_arch(row[2])} among records of {self.arch}")
        own = workload.as_json(), row
        if _content(*own) not in {_content(*known) for known in self._own()}:
            self._add([own])

    def records(self, mod: tvm.IRModule, most: int | None = None) -> list[Any]:
        """Return meta-schedule's ``TuningRecord`` of a module, that of least mean time first.

        Parameters
        ----------
        mod : tvm.IRModule
            As it was given to `commit`.
        most : int, optional
            How many at most.

        Returns
        -------
        list of TuningRecord
            Without those of other archs, and those whose trace does not fit the module.
        """
        workload = ms.database.Workload(mod)
        arguments = ms.arg_info.ArgInfo.from_prim_func(mod["main"])
        digest = workload.as_json()[0]
        rows = [row for (known, _), row in self._own() if known == digest]
        found: list[Any] = []
        for trace, seconds, target, _ in sorted(rows, key=_mean):
            if len(found) == most:
                break
            schedule = s_tir.Schedule(mod)
            try:
                s_tir.schedule.Trace.apply_json_to_schedule(trace, schedule)
                parts = (schedule.trace, workload, seconds, Target(target), arguments)
                found.append(ms.database.TuningRecord(*parts))
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                self._warn(self._record_file, 1)
        return found

    def best(self, mod: tvm.IRModule) -> Any:
        """Return the ``TuningRecord`` of least mean time; None where there is none."""
        return next(iter(self.records(mod, most=1)), None)

    def view(self, mods: Iterable[tvm.IRModule]) -> Any:
        """Return a ``MemoryDatabase`` with the records of some modules, for TVM's own use."""
        database = ms.database.MemoryDatabase()
        for mod in mods:
            for record in self.records(mod):
                database.commit_workload(mod)
                database.commit_tuning_record(record)
        return database

    def merge(self, other: MetaDatabase) -> int:
        """Take over the records of another database; return how many were new.

        Raises
        ------
        DatabaseError
            If a file cannot be written.
        """
        known = {_content(*own) for own in self._own()}
        new = {_content(*own): own for own in other._own()}
        added = [own for content, own in new.items() if content not in known]
        if added:
            self._add(added)
        return len(added)

    def prune(self, keep: int) -> tuple[int, int]:
        """Drop all but the fastest records of each workload, and damaged lines.

        Returns
        -------
        records, damaged : int
            How many of each were dropped.

        Raises
        ------
        DatabaseError
            If the file cannot be written.
        """
        dropped = damaged = 0

        def fastest(lines: list[bytes]) -> list[bytes]:
            nonlocal dropped, damaged
            rows: dict[bytes, tuple[int, _Record]] = {}
            for line in lines:
                try:
                    rows[line] = _parse_record(line, len(self._workloads))
                except ValueError:
                    damaged += 1
            kept = _fastest(rows, keep)
            dropped = len(lines) - damaged - len(kept)
            return kept

        torn = self._record_file.rewrite(fastest)
        self.refresh()
        return dropped, damaged + torn

    def _own(self) -> Iterator[tuple[_Workload, _Record]]:
        """Records of this arch with their workloads."""
        for index, row in self._rows:
            workload = self._workloads[index]
            if workload is not None and _arch(row) == self.arch:
                yield workload, row

    def _add(self, pairs: Sequence[tuple[_Workload, _Record]]) -> None:
        """Write records, and those of their workloads that are not there yet."""
        wanted = {workload[0]: workload for workload, _ in pairs}

        def missing(news: News) -> list[str]:
            self._read_workloads(news)
            known = {workload[0] for workload in self._workloads if workload is not None}
            return [json.dumps(w) for digest, w in wanted.items() if digest not in known]

        self._workload_file.update(missing)
        self._read_workloads(self._workload_file.read())
        numbers = {w[0]: number for number, w in enumerate(self._workloads) if w is not None}
        self._record_file.append([json.dumps([numbers[w[0]], row]) for w, row in pairs])
        self.refresh()

    def _read_workloads(self, news: News) -> None:
        if news.anew:
            self._workloads = []
        fresh = [_parse_workload(line) for line in news.lines]
        self._workloads += fresh
        self._warn(self._workload_file, fresh.count(None) + bool(news.tail))

    def _warn(self, journal: Journal, damaged: int) -> None:
        """Warn once a file."""
        if damaged and journal.path not in self._warned:
            self._warned.add(journal.path)
            warn_of_lines(journal.path, damaged)


def _parse_workload(line: bytes) -> _Workload | None:
    """Read a workload; None if it is damaged, for it still takes a number."""
    try:
        pair = parse_line(line)
    except ValueError:
        return None
    legal = isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) for p in pair)
    return pair if legal else None


def _parse_record(line: bytes, workloads: int) -> tuple[int, _Record]:
    """Read a record and the number of its workload.

    Raises
    ------
    ValueError
        If the line is damaged.
    """
    pair = parse_line(line)
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int:
        raise ValueError("no record")
    if not 0 <= pair[0] < workloads:
        raise ValueError("no such workload")
    _check_record(pair[1])
    return pair[0], pair[1]


def _check_record(row: Any) -> None:
    """Raise ``ValueError`` for a record that TVM might fail on other than by an exception."""
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError("no record")
    trace, seconds, target, _ = row
    legal = isinstance(seconds, list) and len(seconds) > 0
    if not legal or not all(type(s) in (int, float) and 0 < s < _LONGEST for s in seconds):
        raise ValueError(f"the times of a record must be positive seconds, got {seconds!r}")
    if not isinstance(target, dict) or not _is_plain(target):
        raise ValueError("no target")
    record_arch(target)
    if not isinstance(trace, list) or len(trace) != 2 or not all(map(_is_list, trace)):
        raise ValueError("no trace")
    if not all(map(_is_instruction, trace[0])):
        raise ValueError("no instruction")
    if not all(_is_decision(decision, len(trace[0])) for decision in trace[1]):
        raise ValueError("no decision")


def _is_instruction(value: Any) -> bool:
    """Whether a value has the form ``[kind, inputs, attributes, outputs]``."""
    if not _is_list(value) or len(value) != 4 or not isinstance(value[0], str):
        return False
    _, inputs, attributes, outputs = value
    named = _is_list(outputs) and all(isinstance(name, str) for name in outputs)
    return named and all(_is_list(part) and _is_plain(part) for part in (inputs, attributes))


def _is_decision(value: Any, instructions: int) -> bool:
    """Whether a value has the form ``[instruction, decision]``; extents are positive."""
    if not _is_list(value) or len(value) != 2 or type(value[0]) is not int:
        return False
    extents = value[1] if _is_list(value[1]) else [1]
    legal = all(type(extent) is not int or extent > 0 for extent in extents)
    return 0 <= value[0] < instructions and legal and _is_plain(value[1])


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_plain(value: Any) -> bool:
    """Whether a value and all in it are no nulls and no numbers without an end."""
    if isinstance(value, list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _arch(row: _Record) -> str:
    return record_arch(row[2])


def _mean(row: _Record) -> float:
    return math.fsum(row[1]) / len(row[1])


def _content(workload: _Workload, row: _Record) -> tuple[str, str]:
    """What makes two records the same."""
    return workload[0], json.dumps(row, sort_keys=True)


def _fastest(rows: dict[bytes, tuple[int, _Record]], keep: int) -> list[bytes]:
    """The lines of the fastest records of each workload and arch, in the order of the file."""
    left: dict[tuple[int, str], int] = {}
    kept = set()
    for line, (number, row) in sorted(rows.items(), key=lambda item: _mean(item[1][1])):
        key = (number, _arch(row))
        left[key] = left.get(key, keep) - 1
        if left[key] >= 0:
            kept.add(line)
    return [line for line in rows if line in kept]
