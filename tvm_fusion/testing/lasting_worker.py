"""A worker process that lives on over many requests, and is replaced when one of them kills it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


class WorkerDied(Exception):
    """The request in hand ended the worker, or took too long; the message says which."""


class LastingWorker:
    """One worker process, started at the first request and again after it died.

    Parameters
    ----------
    module : str
        Module to run with ``python -m``; its main calls `serve`.
    seconds : float
        Time limit of a request. Starting the process may take ten times as long.
    """

    def __init__(self, module: str, seconds: float) -> None:
        self._module, self._seconds = module, seconds
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Any) -> Any:
        """Send a request of plain values and return the answer.

        Raises
        ------
        WorkerDied
            If the worker crashes or takes too long; the next request starts another one.
        """
        if self._process is None:
            self._start()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerDied(self._end()) from None
        return json.loads(self._line(self._seconds))

    def close(self) -> None:
        """End the process, if one is running."""
        if self._process is not None:
            self._end()

    def __enter__(self) -> LastingWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # so that what it starts can be ended with it
        )
        self._line(10 * self._seconds)

    def _line(self, seconds: float) -> bytes:
        output, line = self._process.stdout.fileno(), b""
        end = time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                self._end()
                raise WorkerDied(f"took more than {seconds:g} s")
            chunk = os.read(output, 1 << 16)
            if not chunk:
                raise WorkerDied(self._end())
            line += chunk
        return line

    def _end(self) -> str:
        """End the process and return how it ended by itself."""
        process, self._process = self._process, None
        try:
            code = process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        process.stdin.close()
        process.stdout.close()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        self._log.close()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return " ".join([f"the process ended with {how}", *last])


def serve(answer: Callable[[Any], Any]) -> None:
    """In the worker: answer requests until there are no more.

    What the code in between prints goes nowhere; native code and Python use the same descriptors.
    """
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    channel.write(b"\n")
    channel.flush()
    for line in sys.stdin.buffer:
        channel.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        channel.flush()


def last_line(error: BaseException) -> str:
    """The last line of an error's text that is not empty, at most 300 characters of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
