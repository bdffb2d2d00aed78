"""What a page about tuning needs beside the trials: one small file a model, in the folder of its records.

Times are not in it, except those of the whole model: they are looked up among the trials, so that
the page follows what is measured later. This module imports neither TVM nor anything that does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

from ..errors import DatabaseError
from .trials import now, parse_line

#: Version of the file's format.
SCHEMA = 1

#: Folder of the files, beside ``trials.jsonl``.
FOLDER = "models"


@dataclasses.dataclass(frozen=True)
class KernelNote:
    """A kernel of the model (see ``overview.KernelView``).

    ``parts`` are the kernels of its operators alone, each with how often it comes.
    """

    kernel: str
    operators: tuple[str, ...]
    strategy: str
    depth: int
    calls: int
    nbytes: int
    floor_us: float
    untuned_us: float | None
    parts: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class RowNote:
    """One row of a chain: its kernels, what they move, and whether the plan has them."""

    least: int
    most: int
    kernels: tuple[str, ...]
    nbytes: int
    chosen: bool
    failed: bool


@dataclasses.dataclass(frozen=True)
class ChainNote:
    """Depth against latency of a chain that comes ``count`` times."""

    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    count: int
    rows: tuple[RowNote, ...]


@dataclasses.dataclass(frozen=True)
class Slower:
    """A group that was measured slower than the best plan of its parts."""

    strategy: str
    nodes: tuple[str, ...]
    detail: str


@dataclasses.dataclass(frozen=True)
class GroupNote:
    """A group that the planner asked for (see ``strategies.base.Proposal``)."""

    strategy: str
    operators: tuple[str, ...]
    anchors: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    depth: int
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    options: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Summary:
    """One model's last tuning run.

    Attributes
    ----------
    model, target, dtype : str
        Which model, for what, in which type.
    device, driver : str
        Where it was measured.
    trials, budget : int
        Candidates tried in all runs, and how many were allowed.
    state : {"running", "stopped", "finished"}
        ``"running"`` of a run that is under way, or was killed.
    launches, groups : tuple of int, int
        Kernels of the model unfused and tuned; groups of the plan.
    kernels, chains, slower : tuple
        What was considered.
    alone : tuple of (str, int)
        Kernels of the model's operators alone, each with how often it comes: they tell models apart.
    tuned_us, unfused_us, default_us, untuned_us : float or None
        The whole model timed: with the best plan, with one kernel per operator, by TVM's default
        pipeline, and as it is compiled without tuning.
    shipped : {"tuned", "unfused", "untuned", "default"}
        What is compiled: the best plan, one kernel per operator, what it was without tuning, or TVM's default
        pipeline.
    options : tuple of (str, str)
        What the configuration says otherwise than the default one, as JSON by name.
    graph : str
        Digest of the model's graph.
    asked : tuple of GroupNote
        What the planner asked for beyond what every run explores.
    date : str
        When, in UTC.
    """

    model: str
    target: str
    dtype: str
    device: str
    driver: str
    trials: int
    budget: int
    state: str
    launches: tuple[int, int]
    groups: int
    kernels: tuple[KernelNote, ...] = ()
    chains: tuple[ChainNote, ...] = ()
    slower: tuple[Slower, ...] = ()
    alone: tuple[tuple[str, int], ...] = ()
    tuned_us: float | None = None
    unfused_us: float | None = None
    default_us: float | None = None
    untuned_us: float | None = None
    shipped: str = "tuned"
    options: tuple[tuple[str, str], ...] = ()
    graph: str = ""
    asked: tuple[GroupNote, ...] = ()
    date: str = dataclasses.field(default_factory=now)

    def to_json(self) -> str:
        """Return the summary as one line of JSON."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Summary:
        """Read what `to_json` made.

        Raises
        ------
        ValueError
            If it is damaged, or of another format.
        """
        data = parse_line(text)
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ValueError("no summary of this format")
        try:
            kernels = tuple(_read(KernelNote, entry) for entry in data.pop("kernels"))
            chains = tuple(_chain(entry) for entry in data.pop("chains"))
            slower = tuple(_read(Slower, entry) for entry in data.pop("slower"))
            asked = tuple(_read(GroupNote, entry) for entry in data.pop("asked", ()))
            notes = {"kernels": kernels, "chains": chains, "slower": slower, "asked": asked}
            return _read(Summary, {**data, **notes})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no summary: {error}") from error


def _read(cls: type, data: dict[str, Any]) -> Any:
    return cls(**{key: _tuples(value) for key, value in data.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _chain(data: dict[str, Any]) -> ChainNote:
    rows = tuple(_read(RowNote, row) for row in data.pop("rows"))
    return _read(ChainNote, {**data, "rows": rows})


def save_summary(folder: Path, summary: Summary) -> None:
    """Write a model's summary into a folder of records, in place of an older one.

    Raises
    ------
    DatabaseError
        If it cannot be written; an older one is left as it was.
    """
    file = folder / FOLDER / (re.sub(r"[^\w.-]+", "_", summary.model) + ".json")
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(exist_ok=True)
        try:
            fresh.write_text(summary.to_json() + "\n", encoding="utf-8")
            os.replace(fresh, file)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise DatabaseError(f"cannot write {file}: {error.strerror}") from error


def load_summaries(folder: Path) -> list[Summary]:
    """Read the summaries of a folder of records, by name of the model; a damaged one is skipped with a warning.

    Raises
    ------
    DatabaseError
        If one cannot be read.
    """
    found = []
    for file in sorted((folder / FOLDER).glob("[!.]*.json")):
        try:
            found.append(Summary.from_json(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise DatabaseError(f"cannot read {file}: {error.strerror}") from error
        except ValueError:
            warnings.warn(f"{file} is damaged or of another release; skipped", stacklevel=2)
    return found
