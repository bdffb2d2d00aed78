"""Measures candidates on this machine, each in a child process.

The process lives on for the next candidate; when one crashes or hangs it is replaced, and the
candidate is lost. A device serves one process at a time, whichever tuner it belongs to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .measure import RunRequest, RunResult
from .process import Worker, WorkerPool

_MODULE = "tvm_fusion.tuning.run_worker"


class LocalRunner:
    """Measures candidates on GPUs of this machine, or on its CPU.

    Parameters
    ----------
    kind : {"cuda", "llvm"}
        What the candidates are compiled for.
    devices : sequence of int
        Numbers of the GPUs; all of them must be alike. Of no meaning for a CPU, which runs one
        candidate at a time.
    timeout_s : float
        Seconds for one candidate, without the wait for the device.
    """

    in_parts = True

    def __init__(
        self, kind: str = "cuda", devices: Sequence[int] = (0,), timeout_s: float = 20.0
    ) -> None:
        self._timeout_s = timeout_s
        numbers = list(devices) if kind == "cuda" else [0]
        names = [device_name(kind, number) for number in numbers]
        self._pool = WorkerPool(
            [Worker(_MODULE, [str(number)]) for number in numbers],
            lambda worker: device_lock(names[worker]),
        )

    def launch(self) -> None:
        """Start the processes, without waiting until they are ready."""
        self._pool.launch()

    def run(self, requests: Sequence[RunRequest]) -> list[RunResult]:
        """Check and time candidates.

        Parameters
        ----------
        requests : sequence of RunRequest
            Those of one kernel together are quickest.

        Returns
        -------
        list of RunResult
            In the order of the requests.

        Raises
        ------
        TuningError
            If a worker cannot be started.
        """
        answers = self._pool.map([request.to_dict() for request in requests], self._timeout_s)
        return [RunResult.from_dict(answer) for answer in answers]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def __enter__(self) -> LocalRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def device_name(kind: str, number: int) -> str:
    """Name of a device that is the same in all processes of this machine.

    ``CUDA_VISIBLE_DEVICES`` gives GPUs other numbers.
    """
    if kind != "cuda":
        return "cpu"
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return f"gpu-{visible[number]}" if number < len(visible) and visible[0] else f"gpu-{number}"


@contextlib.contextmanager
def device_lock(name: str, folder: Path | None = None) -> Iterator[None]:
    """Hold a device inside a ``with``, waiting while another process does.

    The lock goes with the process that holds it, however that ends.

    Parameters
    ----------
    name : str
        See `device_name`.
    folder : Path, optional
        Where the lock file is; the folder of temporary files when absent.
    """
    base = folder or Path(tempfile.gettempdir())
    path = base / f"tvm_fusion-{os.getuid()}-{name}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
