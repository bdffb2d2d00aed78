"""A file of lines to which several processes append at once, and which survives their deaths.

Every access takes the file's own lock (``flock``), so what follows the last line end under a lock
is what a killed writer left. Nothing is ever half written: a write that fails is taken back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DatabaseError
from .trials import parse_line

_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or "),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable, or "),
}


class News(NamedTuple):
    """What ``Journal.read`` found."""

    lines: list[bytes]  #: complete lines that were not read before, without their ends
    tail: bytes  #: what follows the last line end; not complete, unless an editor left the end out
    anew: bool  #: whether the file is another one than before, so that ``lines`` are all of it


class Journal:
    """Lines of JSON in a file.

    Parameters
    ----------
    path : Path
        The file; its folder must exist before a line is appended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> News:
        """Return the lines that came since the last call; none where there is no file.

        Raises
        ------
        DatabaseError
            If the file cannot be read.
        """
        try:
            with self._locked(os.O_RDONLY) as fd:
                return self._news(fd)
        except FileNotFoundError:
            return News([], b"", anew=False)
        except OSError as error:
            raise DatabaseError(f"cannot read {self.path}: {error.strerror}") from error

    def append(self, lines: Sequence[str]) -> None:
        """Append lines, all or none, and wait until they are on the disk.

        Raises
        ------
        DatabaseError
            If the file cannot be written; it is left as it was.
        """
        self._append(lambda fd: lines)

    def update(self, make: Callable[[News], Sequence[str]]) -> None:
        """Append what a function makes of the lines not read yet, with nothing between the two.

        Raises
        ------
        DatabaseError
            If the file cannot be read or written; it is left as it was.
        """
        self._append(lambda fd: make(self._news(fd)))

    def _append(self, make: Callable[[int], Sequence[str]]) -> None:
        """Append, all or none, what a function makes under the lock."""
        try:
            with self._locked(os.O_RDWR | os.O_APPEND | os.O_CREAT) as fd:
                size = _mend(fd)
                lines = [line.encode() + b"\n" for line in make(fd)]
                try:
                    if lines:
                        _write(fd, b"".join(lines))
                except BaseException:
                    os.ftruncate(fd, size)
                    raise
        except OSError as error:
            raise DatabaseError(_unwritable(self.path, error)) from error

    def rewrite(self, change: Callable[[list[bytes]], list[bytes]]) -> bool:
        """Replace the lines by what a function makes of them; other processes wait meanwhile.

        Returns
        -------
        bool
            Whether what a killed writer left after the last line end was dropped.

        Raises
        ------
        DatabaseError
            If the file cannot be read or written; it is left as it was.
        """
        fresh = self.path.with_name(f".{self.path.name}.new")
        try:
            with self._locked(os.O_RDWR) as fd:
                *lines, tail = _read(fd, 0).split(b"\n")
                torn = bool(tail) and not _complete(tail)
                kept = change(lines if torn or not tail else [*lines, tail])
                try:
                    with open(fresh, "wb") as file:
                        _write(file.fileno(), b"".join(line + b"\n" for line in kept))
                    os.replace(fresh, self.path)
                finally:
                    fresh.unlink(missing_ok=True)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DatabaseError(_unwritable(self.path, error)) from error
        return torn

    def _news(self, fd: int) -> News:
        """Read on under the lock."""
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino)
        anew = identity != self._identity or status.st_size < self._offset
        self._identity = identity
        *lines, tail = _read(fd, 0 if anew else self._offset).split(b"\n")
        # A tail is read again next time, when its writer's successor has ended or removed it.
        self._offset = status.st_size - len(tail)
        return News(lines, tail, anew)

    @contextlib.contextmanager
    def _locked(self, flags: int) -> Iterator[int]:
        """Open the file and hold its lock, shared for reading."""
        kind = fcntl.LOCK_SH if flags == os.O_RDONLY else fcntl.LOCK_EX
        while True:
            fd = os.open(self.path, flags | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, kind)
                if _is_at(fd, self.path):
                    yield fd
                    return
            finally:
                os.close(fd)


def _unwritable(path: Path, error: OSError) -> str:
    """Why a file cannot be written, and what to do."""
    advice = _ADVICE.get(error.errno or 0, "")
    return f"cannot write {path}: {error.strerror}; {advice}name another work dir"


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is still the one at a path; ``rewrite`` may have replaced it."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _read(fd: int, offset: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        file.seek(offset)
        return file.read()


def _write(fd: int, rest: bytes) -> None:
    """Write all of it and wait for the disk; a full disk may take a part and fail at the next call."""
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.fsync(fd)


def _mend(fd: int) -> int:
    """End or remove what a killed writer left after the last line end; return the size then."""
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return size
    content = _read(fd, 0)
    kept = content.rfind(b"\n") + 1
    if _complete(content[kept:]):
        return size + os.write(fd, b"\n")
    os.ftruncate(fd, kept)
    return kept


def _complete(tail: bytes) -> bool:
    """Whether a line without an end is whole: no proper part of a JSON list or object is legal."""
    try:
        parse_line(tail)
    except ValueError:
        return False
    return True
