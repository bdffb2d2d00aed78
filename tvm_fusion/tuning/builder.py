"""Builds candidates in parallel, in worker processes that live on.

Importing TVM takes seconds, so a process for each candidate would take longer to start than to
compile. A worker that crashes or hangs costs the candidate that it had in hand.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ..compat import process_cpu_count
from ..schedules.decisions import Point
from ..schedules.registry import Space
from .added_templates import write_added
from .measure import BuildFailure, BuildRequest, Built, KernelSource
from .process import Answer, Worker, WorkerPool

_MODULE = "tvm_fusion.tuning.build_worker"

#: Workers see no GPU, so that none of them makes a context there.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}

#: From so many cores on one is left free.
_MANY = 4


class Builder:
    """Builds candidates on the local cores.

    Parameters
    ----------
    workers : int, optional
        Worker processes; when absent, one per core that this process may use, but for one of many, on which the
        process itself and the measurements run.
    timeout_s : float
        Seconds for one candidate. The start of a worker does not count.
    folder : Path, optional
        Where artifacts go and stay; a temporary folder, removed at `close`, when absent.
    """

    def __init__(
        self, workers: int | None = None, timeout_s: float = 120.0, folder: Path | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._temporary = tempfile.TemporaryDirectory(prefix="tvm_fusion-") if not folder else None
        self._folder = Path(folder or self._temporary.name)
        self._folder.mkdir(parents=True, exist_ok=True)
        cores = process_cpu_count()
        #: How many candidates are built at once.
        self.workers = workers or cores - (cores >= _MANY)
        self._pool = WorkerPool(
            [Worker(_MODULE, environment=_ENVIRONMENT) for _ in range(self.workers)]
        )

    def launch(self) -> None:
        """Start the workers, without waiting until they are ready."""
        self._pool.launch()

    def submit(self, requests: Sequence[BuildRequest]) -> list[Future[Built | BuildFailure]]:
        """Have candidates built in the background, in the order of the calls.

        Parameters
        ----------
        requests : sequence of BuildRequest
            Equal ones are built once.

        Returns
        -------
        list of Future
            Of the results, in the order of the requests. They raise ``TuningError`` if a worker cannot be started.
        """
        made: dict[str, Future[Built | BuildFailure]] = {}
        for request in requests:
            if request.trial not in made:
                asked = self._question(request)
                made[request.trial] = self._pool.submit(asked, self._timeout_s, _result)
        return [made[request.trial] for request in requests]

    def build(self, requests: Sequence[BuildRequest]) -> list[Built | BuildFailure]:
        """Build candidates and wait for them.

        Parameters
        ----------
        requests : sequence of BuildRequest
            Equal ones are built once.

        Returns
        -------
        list of Built or BuildFailure
            In the order of the requests.

        Raises
        ------
        TuningError
            If a worker cannot be started.
        """
        return [future.result() for future in self.submit(requests)]

    def find_spaces(self, sources: Sequence[KernelSource]) -> list[Future[tuple[Space, ...] | str]]:
        """Ask the templates what may be decided about kernels, in the background and in parallel.

        A model has hundreds of kernels, and to find out about one takes some tenths of a second.

        Returns
        -------
        list of Future
            Of the search spaces (`registry.spaces`) of each kernel, or of a message where they cannot be found.
        """
        asked = [self._named(source) | {"do": "spaces"} for source in sources]
        return [self._pool.submit(question, self._timeout_s, _spaces) for question in asked]

    def _named(self, source: KernelSource) -> dict[str, Any]:
        """What a worker needs to know of a kernel."""
        path = write_source(source, self._folder)
        named = {"kernel": source.kernel, "source": str(path), "target": source.target}
        added = write_added(self._folder)
        return named | {"templates": str(added)} if added else named

    def _question(self, request: BuildRequest) -> dict[str, Any]:
        return self._named(request.source) | {
            "do": "build",
            "template": request.template,
            "decision": request.decision,
            "artifact": str(self._folder / f"{request.trial}.so"),
        }

    def close(self) -> None:
        """End the workers and remove the artifacts, unless the caller named their folder."""
        self._pool.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_source(source: KernelSource, folder: Path) -> Path:
    """Write a function where workers read it, unless it is there, and return the file."""
    path = folder / f"{source.kernel}.json"
    if not path.exists():
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, suffix=".part", delete=False, encoding="utf-8"
        ) as file:
            file.write(source.func_json)
        os.replace(file.name, path)
    return path


def _spaces(answer: Answer) -> tuple[Space, ...] | str:
    if answer["verdict"] != "found":
        return str(answer["message"])
    return tuple(
        Space(
            template,
            tuple(
                Point(
                    name,
                    tuple(tuple((key, value) for key, value in option) for option in options),
                    tuple(microseconds),
                )
                for name, options, microseconds in points
            ),
        )
        for template, points in answer["spaces"]
    )


def _result(answer: Answer) -> Built | BuildFailure:
    taken = {key: answer.get(key) for key in ("registers", "spill_bytes", "shared_bytes")}
    if answer["verdict"] != "built":
        # What the worker did not foresee counts as the compiler's failure.
        verdict = "compiler" if answer["verdict"] == "error" else answer["verdict"]
        return BuildFailure(verdict, answer["message"], **taken)
    packed = tuple((number, tuple(axes)) for number, axes in answer["packed"])
    return Built(Path(answer["artifact"]), answer["code_digest"], packed=packed, **taken)
