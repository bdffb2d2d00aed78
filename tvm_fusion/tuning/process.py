"""Worker processes that live on: asked with a time limit, replaced when they crash or hang.

A worker that dies costs the request it had in hand, nothing else. See `serve` for what is said.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from ..errors import TuningError

Answer = dict[str, Any]

#: Seconds in which a worker imports TVM, on a busy machine.
START_LIMIT = 300.0

#: What runs a worker's module.
_CHILD = "tvm_fusion.tuning.child"

#: Seconds between two attempts to end workers that threads are starting meanwhile.
_END_AGAIN = 0.2


class WorkerDied(Exception):
    """A worker ended, or was ended, with a request in hand.

    Attributes
    ----------
    verdict : {"crashed", "timeout"}
        How.
    stage : str
        What it said last that it was about to do.
    """

    def __init__(self, verdict: str, message: str, stage: str = "") -> None:
        super().__init__(message)
        self.verdict, self.stage = verdict, stage


class Worker:
    """One worker process, started when it is first asked, and again after it died.

    Parameters
    ----------
    module : str
        Module to run (``python -m``).
    arguments : sequence of str
        Its command line.
    environment : mapping of str to str
        Additions to the environment.
    start_limit : float
        Seconds in which it must be ready.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_limit: float = START_LIMIT,
    ) -> None:
        self._module = module
        self._command = [sys.executable, "-m", _CHILD, module, *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self._start_limit = start_limit
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._stop: Callable[[], Any] = lambda: None
        self._log: Any = None
        self._buffer = b""

    @property
    def pid(self) -> int | None:
        """Number of the process, if one is running."""
        return self._process.pid if self._process else None

    def launch(self) -> None:
        """Start the process unless it runs, without waiting until it is ready."""
        if self._process is not None:
            return
        self._is_ready = False
        self._log, self._buffer = tempfile.TemporaryFile(), b""
        # A session of its own, so that the compilers it started can be ended with it.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self._environment,
            start_new_session=True,
        )
        self._stop = weakref.finalize(self, _end, self._process)

    def start(self) -> None:
        """Start the process unless it runs, and wait until it is ready.

        Raises
        ------
        TuningError
            If it does not become ready.
        """
        self.launch()
        if self._is_ready:
            return
        try:
            self._answer(self._start_limit)
        except WorkerDied as err:
            raise TuningError(
                f"a tuning worker ({self._module}) cannot start: {err}; run "
                f"`{' '.join(self._command)}` to see why"
            ) from err
        self._is_ready = True

    def ask(self, request: Mapping[str, Any], limit: float) -> Answer:
        """Send a request and return the answer.

        Parameters
        ----------
        request : mapping
            Plain values.
        limit : float
            Seconds; starting the process does not count.

        Raises
        ------
        WorkerDied
            If the worker crashes, or takes too long and is killed.
        TuningError
            If it cannot be started.
        """
        self.start()
        line = json.dumps({"limit": limit, "request": request}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            raise WorkerDied("crashed", self._death()) from None
        answer = self._answer(limit)
        if answer.get("fatal"):
            self.kill()
        return answer

    def _answer(self, limit: float) -> Answer:
        end, stage = time.monotonic() + limit, ""
        while True:
            line = self._line(end)
            if line is None:
                self.kill()
                raise WorkerDied("timeout", f"took more than {limit:g} s", stage)
            if not line:
                raise WorkerDied("crashed", self._death(), stage)
            message = json.loads(line)
            if "extend" in message:
                limit, stage = float(message["extend"]), str(message["stage"])
                end = time.monotonic() + limit
            else:
                return message["answer"]

    def _line(self, end: float) -> bytes | None:
        """The next line; empty at the end of the output, None when the time is over."""
        output = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                return None
            chunk = os.read(output, 1 << 16)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _death(self) -> str:
        """How the process ended, with the last thing that it wrote."""
        try:
            code = self._process.wait(timeout=5)
            how = f"died of {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its output"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self.kill()
        return f"{how} ({lines[-1].strip()})" if lines and how[0] == "e" else how

    def interrupt(self) -> None:
        """End the process from another thread: the one that waits for an answer sees it crash."""
        process = self._process
        if process is not None:
            _kill(process)

    def kill(self) -> None:
        """End the process and what it started, at once; the next request starts another."""
        self._stop()
        self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class WorkerPool:
    """Workers that share a list of requests.

    Parameters
    ----------
    workers : sequence of Worker
        The workers; none is used by another pool.
    around : callable, optional
        Called with the number of a worker; returns a context manager that surrounds each of its
        requests, and whose waiting does not count towards their time.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        around: Callable[[int], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.workers = list(workers)
        self._around = around or (lambda number: contextlib.nullcontext())
        self._threads: ThreadPoolExecutor | None = None
        self._asked: set[Future[Any]] = set()
        # The one that answered last is asked first: it has what it needs in its caches.
        self._idle: queue.LifoQueue[int] = queue.LifoQueue()
        for number in reversed(range(len(self.workers))):
            self._idle.put(number)

    def launch(self) -> None:
        """Start all workers, without waiting until they are ready."""
        for worker in self.workers:
            worker.launch()

    def submit(
        self, request: Mapping[str, Any], limit: float, convert: Callable[[Answer], Any]
    ) -> Future[Any]:
        """Have a request carried out in the background, in the order of the calls.

        Not to be mixed with `map` on one pool.

        Parameters
        ----------
        request : mapping
            What a worker is asked.
        limit : float
            Seconds that it may take.
        convert : callable
            Makes the result of an answer as of `map`.

        Returns
        -------
        Future
            Of the result; it raises what `map` raises.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self.workers))
        future = self._threads.submit(self._ask_one, request, limit, convert)
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        return future

    def _ask_one(
        self, request: Mapping[str, Any], limit: float, convert: Callable[[Answer], Any]
    ) -> Any:
        number = self._idle.get()
        try:
            return convert(self._ask(number, request, limit))
        finally:
            self._idle.put(number)

    def _ask(self, number: int, request: Mapping[str, Any], limit: float) -> Answer:
        """Ask one worker; its death is an answer."""
        try:
            with self._around(number):
                return self.workers[number].ask(request, limit)
        except WorkerDied as err:
            return {"verdict": err.verdict, "message": str(err), "stage": err.stage}

    def map(
        self,
        requests: Sequence[Mapping[str, Any]],
        limit: float,
        finish: Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """Carry out requests.

        Parameters
        ----------
        requests : sequence of mapping
            What the workers are asked.
        limit : float
            Seconds for each.
        finish : mapping, optional
            What a worker is asked when nothing is left for it to do, while others may be busy.

        Returns
        -------
        list of dict
            Answers in the order of the requests. A worker that dies gives the verdict
            ``"crashed"`` or ``"timeout"`` with the ``"stage"`` that it was in, and is replaced.

        Raises
        ------
        TuningError
            If a worker cannot be started.
        """
        answers: list[Answer | None] = [None] * len(requests)
        todo = iter(range(len(requests)))
        turn, stopped = threading.Lock(), threading.Event()

        def work(number: int) -> None:
            worker = self.workers[number]
            while not stopped.is_set():
                with turn:
                    index = next(todo, None)
                if index is None:
                    break
                answers[index] = self._ask(number, requests[index], limit)
            if finish is not None and worker.pid is not None:
                with contextlib.suppress(WorkerDied):
                    worker.ask(finish, limit)

        busy = min(len(self.workers), len(requests))
        if not busy:
            return []
        with ThreadPoolExecutor(busy) as threads:
            futures = [threads.submit(work, number) for number in range(busy)]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # Ctrl-C too: do not wait for what nobody will read
                stopped.set()
                for worker in self.workers:
                    worker.interrupt()
                raise
        return [answer for answer in answers if answer is not None]

    def close(self) -> None:
        """End all workers; what was submitted and not begun is cancelled."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            while asked := set(self._asked):
                for worker in self.workers:
                    worker.interrupt()
                wait(asked, _END_AGAIN)
            self._threads = None
        for worker in self.workers:
            worker.kill()
