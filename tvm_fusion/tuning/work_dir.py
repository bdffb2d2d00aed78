"""A work dir: one folder of records for each arch, dtype policy and version of TVM.

``<dir>/<arch>-<dtype policy>-tvm<version>/`` holds ``trials.jsonl`` and meta-schedule's own two
files. Several processes may use one work dir at once.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices import base_arch
from ..errors import DatabaseError
from .journal import Journal
from .trials import NewerSchema, Trial, TrialSet, parse_line

if TYPE_CHECKING:
    from .meta_database import MetaDatabase

_FOLDER = re.compile(r"(?P<arch>\w+)-(?P<dtype_policy>[\w+]+)-tvm(?P<tvm>[\w.+-]+)")


def record_arch(target: Mapping[str, Any]) -> str:
    """Return the arch that keys records of a target.

    Parameters
    ----------
    target : mapping
        TVM's dict form of a complete target: its attributes, or a parsed ``str(target)``.

    Returns
    -------
    str
        The base arch of CUDA (``"sm_90"`` for ``sm_90a``), the first part of the triple of a CPU; without a
        triple, LLVM compiles for this machine's.

    Raises
    ------
    ValueError
        If the arch is unknown.
    """
    arch, triple = target.get("arch"), target.get("mtriple")
    if arch:
        return base_arch(str(arch))
    if triple:
        return str(triple).partition("-")[0]
    return platform.machine()


def folder_of_records(file: Path) -> Path | None:
    """The folder of records in which a file is or would be; None elsewhere."""
    parents = file.resolve().parents
    return next((folder for folder in parents if _FOLDER.fullmatch(folder.name)), None)


def dtype_policy(dtypes: Iterable[str]) -> str:
    """Name the dtypes in which a model computes: its floating-point ones (``tf32`` too), joined by ``+``.

    A model without any is named by all its dtypes, one without tensors ``"none"``.
    """
    names = set(map(str, dtypes))
    floats = {name for name in names if re.match(r"b?float|tf32", name)}
    return "+".join(sorted(floats or names)) or "none"


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder of records.

    Attributes
    ----------
    folder : Path
        Where it is.
    arch, dtype_policy, tvm : str
        What its name says.
    """

    folder: Path
    arch: str
    dtype_policy: str
    tvm: str

    def records(self) -> Records:
        """Open its trials."""
        return Records(self.folder / "trials.jsonl", self.arch)

    def meta_database(self) -> MetaDatabase:
        """Open meta-schedule's records."""
        # It needs TVM; lists of trials do not.
        from .meta_database import MetaDatabase

        return MetaDatabase(self.folder, self.arch)

    def create(self) -> None:
        """Make the folder and see that it can be written.

        Raises
        ------
        DatabaseError
            If it cannot.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"cannot make work dir {self.folder}: {error.strerror}; name another one"
            ) from error
        Journal(self.folder / "trials.jsonl").append([])


class WorkDir:
    """A folder for everything that tuning keeps.

    Parameters
    ----------
    path : str or Path
        The folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def place(self, arch: str, dtype_policy: str, tvm: str | None = None) -> Place:
        """Return where records of an arch, dtypes and a version of TVM (this one's) lie.

        Raises
        ------
        ValueError
            If the arch is unknown, or a name would not do as one of a folder.
        """
        if tvm is None:
            from ..compat import tvm as installed

            tvm = str(installed.__version__)
        arch = base_arch(arch) if arch.startswith("sm_") else arch
        name = f"{arch}-{dtype_policy}-tvm{tvm}"
        if _FOLDER.fullmatch(name) is None:
            raise ValueError(f"{name!r} is no legal name for a folder of records")
        return Place(self.path / name, arch, dtype_policy, tvm)

    def open(self, arch: str, dtype_policy: str) -> Records:
        """Open the trials of an arch and dtypes for reading and adding.

        Raises
        ------
        DatabaseError
            If the folder cannot be made, read or written.
        """
        place = self.place(arch, dtype_policy)
        place.create()
        return place.records()

    def places(self) -> list[Place]:
        """Return the folders of records that are there, in the order of their names.

        Raises
        ------
        DatabaseError
            If the work dir does not exist, cannot be read, or has no records.
        """
        try:
            folders = sorted(folder for folder in self.path.iterdir() if folder.is_dir())
        except OSError as error:
            raise DatabaseError(
                f"cannot read work dir {self.path}: {error.strerror}; name the folder that tvm-fusion tune "
                "--work-dir made"
            ) from error
        found = [(folder, _FOLDER.fullmatch(folder.name)) for folder in folders]
        places = [Place(folder, **match.groupdict()) for folder, match in found if match]
        if not places:
            raise DatabaseError(
                f"work dir {self.path} holds no records; tvm-fusion tune --work-dir makes them"
            )
        return places


class Records(TrialSet):
    """The trials of one file, in memory and on the disk.

    Lines that are damaged or of a later release are left out with one warning, trials of another
    arch without. What other processes add is seen after `refresh`.

    Parameters
    ----------
    path : Path
        The file; it need not exist.
    arch : str
        Base arch whose trials count.

    Raises
    ------
    DatabaseError
        If the file cannot be read.
    """

    def __init__(self, path: Path, arch: str) -> None:
        super().__init__()
        self.arch = arch
        self._journal = Journal(path)
        self._unwritten: list[str] = []
        self._warned = False
        self.refresh()

    @property
    def folder(self) -> Path:
        """Where the file is."""
        return self._journal.path.parent

    def add(self, *trials: Trial) -> None:
        """Keep trials in memory and on the disk; those already known are left out.

        Raises
        ------
        DatabaseError
            If they cannot be written. They are in memory, the file is whole, and the next call writes them too.
        ValueError
            If a trial is of another arch.
        """
        for trial in trials:
            if trial.arch != self.arch:
                raise ValueError(f"a trial of {trial.arch} among records of {self.arch}")
        self._unwritten += [trial.to_line() for trial in trials if self._keep(trial)]
        if not self._unwritten:
            return
        try:
            self._journal.append(self._unwritten)
        except DatabaseError as error:
            raise DatabaseError(
                f"{error}; {len(self._unwritten)} of the {len(self)} trials are in memory only"
            ) from error
        self._unwritten = []

    def refresh(self) -> int:
        """Read what other processes have added; return how many trials that changed.

        Raises
        ------
        DatabaseError
            If the file cannot be read.
        """
        news = self._journal.read()
        changed, damaged, newer = 0, 0, 0
        for line in filter(bytes.strip, [*news.lines, news.tail]):
            try:
                trial = Trial.from_dict(parse_line(line))
            except NewerSchema:
                newer += 1
            except ValueError:
                damaged += 1
            else:
                changed += trial.arch == self.arch and self._keep(trial)
        if (damaged or newer) and not self._warned:
            self._warned = True
            warn_of_lines(self._journal.path, damaged, newer)
        return changed


def warn_of_lines(path: Path, damaged: int, newer: int = 0) -> None:
    """Warn that lines of a file are skipped."""
    counts = [(damaged, "damaged"), (newer, "of a later release")]
    told = " and ".join(f"{count} {what}" for count, what in counts if count)
    plural = "s" if damaged + newer > 1 else ""
    warnings.warn(f"{path}: line{plural} skipped: {told}", stacklevel=3)
