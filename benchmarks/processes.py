"""Worker processes: started, asked with a time limit, and replaced when they die."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


class WorkerError(RuntimeError):
    """A request failed. ``dead`` says whether the worker is gone with it."""

    def __init__(self, reason: str, dead: bool = False) -> None:
        super().__init__(reason)
        self.dead = dead


class Worker:
    """One child process that answers JSON lines.

    Parameters
    ----------
    command : sequence of str
        What to run.
    log : Path
        Where its standard error goes.
    environment : mapping of str to str
        Additions to the environment.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                text=True, env={**os.environ, **(environment or {})},
            )  # fmt: skip
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def hello(self, seconds: float) -> Any:
        """Wait for the first line.

        Raises
        ------
        WorkerError
            If the worker cannot start.
        """
        return self._answer(seconds)

    def ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Send a request and return the answer's value.

        Raises
        ------
        WorkerError
            If the worker reports an error, dies, or takes too long (it is killed then).
        """
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, OSError):
            raise WorkerError(self._death(), dead=True) from None
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self.kill()
                raise WorkerError(f"took more than {seconds:.0f} s", dead=True) from None
            if line is None:
                raise WorkerError(self._death(), dead=True)
            try:
                answer = json.loads(line)
            except ValueError:
                continue  # something that a library printed
            if not isinstance(answer, dict) or not ({"ok", "error"} & set(answer)):
                continue
            if "error" in answer:
                if answer.get("fatal"):
                    self.kill()
                raise WorkerError(answer["error"], dead=bool(answer.get("fatal")))
            return answer["ok"]

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its output"
        return f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let the process end by itself, or end it."""
        try:
            self._process.stdin.close()
            self._process.wait(timeout=3)
        except (BrokenPipeError, OSError, subprocess.TimeoutExpired):
            self.kill()


class Lane:
    """A worker of one contender with its history: what it holds, and why it could not start.

    Parameters
    ----------
    contender : str
        Name of the contender (``worker.py`` knows it).
    shard : int
        Number among the contender's workers.
    settings : mapping
        The worker's second argument.
    environment : mapping of str to str
        Additions to the environment.
    limit : float
        Seconds to start in.
    """

    MAX_STARTS = 6

    def __init__(
        self,
        contender: str,
        shard: int,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
        limit: float = 240.0,
    ) -> None:
        self.contender, self.shard = contender, shard
        self.settings, self.environment, self.limit = settings, environment, limit
        self.held: set[tuple[str, str]] = set()
        self.versions: dict[str, str] = {}
        self.missing: str | None = None
        self._starts = 0
        self._worker: Worker | None = None

    def command(self) -> list[str]:
        """The worker's command line."""
        return [sys.executable, str(WORKER), self.contender, json.dumps(dict(self.settings))]

    def start(self) -> None:
        """Start the worker, unless it runs; ``missing`` says why it could not."""
        if self._worker is not None or self.missing:
            return
        if self._starts >= self.MAX_STARTS:
            self.missing = f"its worker died {self._starts} times"
            return
        self._starts += 1
        self.held.clear()
        log = Path(self.settings["work"]) / "logs" / f"{self.contender}-{self.shard}.log"
        self._worker = Worker(self.command(), log, self.environment)
        try:
            self.versions = self._worker.hello(self.limit)
        except WorkerError as error:
            self.missing = str(error)
            self.close()

    def ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Ask the worker, starting it again if it died.

        Raises
        ------
        WorkerError
            As `Worker.ask`, or with ``missing`` if it cannot start.
        """
        self.start()
        if self._worker is None:
            raise WorkerError(self.missing or "not started", dead=True)
        try:
            return self._worker.ask(request, seconds)
        except WorkerError as error:
            if error.dead:
                self._worker = None
                self.held.clear()
            raise

    def prepare(self, key: tuple[str, str], seconds: float) -> dict[str, Any]:
        """Compile and check a row."""
        about = self.ask({"do": "prepare", "row": key[0], "dtype": key[1]}, seconds)
        self.held.add(key)
        return about

    def measure(
        self, key: tuple[str, str], seconds: float, prepare_seconds: float
    ) -> dict[str, Any]:
        """Time a row once; a worker that was replaced compiles it again first."""
        if key not in self.held:
            self.prepare(key, prepare_seconds)
        return self.ask({"do": "measure", "row": key[0], "dtype": key[1]}, seconds)

    def release(self, key: tuple[str, str]) -> None:
        """Free a row."""
        if key in self.held:
            self.held.discard(key)
            try:
                self.ask({"do": "release", "row": key[0], "dtype": key[1]}, 60.0)
            except WorkerError:
                pass  # the next request starts a new one

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
