"""Stand-ins for what compiles and measures candidates: deterministic, and they note what they were asked."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from ..compat import Target
from ..schedules.registry import spaces
from ..targets import with_variant
from ..tuning.build_worker import load_function
from ..tuning.measure import BuildFailure, Built, Inputs, RunResult
from ..tuning.tuner import Device


class FakeBuilder:
    """Compiles nothing; ``fails`` may refuse a request."""

    workers = 2

    def __init__(self, fails: Callable = lambda request: None):
        self.fails, self.requests = fails, []

    def submit(self, requests):
        """Answer each request."""
        self.requests += requests
        return [done(self.fails(request) or self.made(request)) for request in requests]

    @staticmethod
    def find_spaces(sources):
        """Ask the templates here."""
        targets = (with_variant(Target(json.loads(source.target))) for source in sources)
        pairs = zip(sources, targets, strict=True)
        return [done(spaces(load_function(source.func_json), target)) for source, target in pairs]

    @staticmethod
    def made(request):
        """A compiled candidate whose file's name says what it is."""
        what = [request.source.kernel, request.template, dict(request.decision)]
        code = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        return Built(Path(json.dumps(what)), code, 32, 0, 0)


class FakeReferences:
    """Knows no inputs."""

    def submit(self, sources):
        """Answer for each source."""
        return [done(Inputs(0, False, (), (), (), (), ())) for _ in sources]


class FakeRunner:
    """Takes times from a function of kernel, template and decision; ``stop`` interrupts it."""

    in_parts = True

    def __init__(self, time: Callable, stop: int | None = None):
        self.time, self.stop, self.ran = time, stop, []

    def run(self, requests):
        """Answer each request."""
        results = []
        for request in requests:
            if self.stop is not None and len(self.ran) >= self.stop:
                raise KeyboardInterrupt
            what = json.loads(str(request.built.artifact))
            self.ran.append(json.dumps(what))
            found = self.time(*what)
            results.append(found if isinstance(found, RunResult) else ok(found))
        return results

    def close(self):
        """Nothing to close."""


def done(result) -> Future:
    """A future whose result is there."""
    future: Future = Future()
    future.set_result(result)
    return future


def ok(microseconds: float) -> RunResult:
    """A right result."""
    return RunResult("ok", (microseconds * 0.999, microseconds, microseconds * 1.001))


def spills(request) -> BuildFailure:
    """A refusal by the compiler."""
    return BuildFailure("spills", "8 bytes are spilled", 255, 8, 0)


class FakeWorkbench:
    """A stand-in for what ``tune_model`` builds and measures with."""

    kind, is_remote = "llvm", False

    def __init__(self, builder: FakeBuilder, runner: FakeRunner):
        self.builder, self.runner, self.references = builder, runner, FakeReferences()
        self.device = Device("a device", "1.0")


def fake_workbench(builder: FakeBuilder, runner: FakeRunner) -> Callable:
    """A stand-in for what makes the workbench (``tune._workbench``)."""

    @contextlib.contextmanager
    def made(target, remote, devices, given):
        yield FakeWorkbench(builder, runner)

    return made
