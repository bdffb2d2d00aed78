"""What a contender does in its worker process: prepare a row, measure it, let it go."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import error_of
from protocol import Times, cpu_times


@dataclasses.dataclass
class Context:
    """Where a contender works.

    Attributes
    ----------
    work : Path
        Folder of the rows' data (``reference.py`` writes it).
    device : {"cuda", "cpu"}
        What to run on.
    cache : Path
        Folder of compiled libraries that later runs may use again.
    options : dict
        Options of the run that single contenders read.
    """

    work: Path
    device: str
    cache: Path
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def folder(self, row: str, dtype: str) -> Path:
        """Folder of one row's data."""
        return self.work / f"{row}-{dtype}-{rows_digest()}"

    def reference(self, row: str, dtype: str) -> list[np.ndarray]:
        """The float64 outputs of a row."""
        files = sorted(self.folder(row, dtype).glob("reference*.npy"))
        return [np.load(f, mmap_mode="r") for f in files]

    def inputs(self, row: str, dtype: str) -> list[np.ndarray]:
        """The inputs of a row, in its dtype, images as ``[N, C, H, W]``."""
        files = sorted(self.folder(row, dtype).glob("input*.npy"))
        return [np.load(f) for f in files]


@functools.cache
def rows_digest() -> str:
    """Digest of the rows' definitions: data that was written for others is not read."""
    folder = Path(__file__).resolve().parent.parent
    files = ("rows.py", "torch_rows.py", "peers/reference.py")
    return hashlib.sha256(b"".join((folder / f).read_bytes() for f in files)).hexdigest()[:8]


_HELD = threading.RLock()
_DEPTH = [0]


@contextlib.contextmanager
def gpu_alone(context: Context) -> Iterator[None]:
    """Hold the GPU: what chooses kernels by timing them must not be disturbed by other processes.

    A process that holds it may hold it again.
    """
    with _HELD:
        _DEPTH[0] += 1
        try:
            if _DEPTH[0] > 1:
                yield
                return
            with file_lock(context.work / "gpu.lock"):
                yield
        finally:
            _DEPTH[0] -= 1


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock file, which other processes wait for."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, also when we die
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also in children that inherited the file


class Ready:
    """One prepared row: how to call it, read its outputs and time it.

    Subclasses implement ``call`` and ``outputs``; on a GPU also ``measure``.
    """

    def call(self) -> Any:
        """Enqueue one call of the workload, without a graph."""
        raise NotImplementedError

    def outputs(self) -> list[np.ndarray]:
        """Outputs of what is timed, images as ``[N, C, H, W]``."""
        raise NotImplementedError

    def measure(self) -> Times:
        """One round of the protocol."""
        return cpu_times(self.call)

    def close(self) -> None:
        """Free what the row holds."""


class Peer:
    """A contender. Subclasses implement ``versions`` and ``make``."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.ready: dict[tuple[str, str], Ready] = {}

    def versions(self) -> dict[str, str]:
        """Versions of what this contender is made of."""
        return {}

    def make(self, row: str, dtype: str) -> tuple[Ready, dict[str, Any]]:
        """Compile a row; also return what is to be known of it (number of kernels…).

        Raises
        ------
        LookupError
            If there is no such version of the row.
        """
        raise NotImplementedError

    def prepare(self, row: str, dtype: str) -> dict[str, Any]:
        """Compile a row, run it, and compare it with the reference."""
        start = time.perf_counter()
        ready, about = self.make(row, dtype)
        error = error_of(ready.outputs(), self.context.reference(row, dtype))
        self.ready[row, dtype] = ready
        seconds = round(time.perf_counter() - start, 2)
        return {**about, "error": error.to_dict(), "seconds": seconds}

    def measure(self, row: str, dtype: str) -> dict[str, Any]:
        """One round of the protocol on a prepared row."""
        return self.ready[row, dtype].measure().to_dict()

    def release(self, row: str, dtype: str) -> dict[str, Any]:
        """Free a row."""
        ready = self.ready.pop((row, dtype), None)
        if ready is not None:
            ready.close()
        return {}
