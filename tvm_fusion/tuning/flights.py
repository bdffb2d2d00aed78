"""Candidates on their way: while some are measured, those of the next batches are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from ..schedules.registry import Space
from .cost_model import Candidate
from .measure import (
    BuildFailure,
    BuildRequest,
    Built,
    Inputs,
    KernelSource,
    Runner,
    RunRequest,
    RunResult,
)

if TYPE_CHECKING:
    from .tuned_kernel import TunedKernel

#: A candidate, what the compiler made of it, and what came of it.
Tried = tuple[Candidate, "Built | BuildFailure", RunResult]


class BuildsCandidates(Protocol):
    """Compiles candidates, such as `builder.Builder`."""

    def submit(self, requests: Sequence[BuildRequest]) -> Sequence[Future[Built | BuildFailure]]:
        """Build them in the background; results in order."""

    def find_spaces(
        self, sources: Sequence[KernelSource]
    ) -> Sequence[Future[Sequence[Space] | str]]:
        """Ask the templates in the background what may be decided about kernels; a message of what fails."""


class MakesReferences(Protocol):
    """Makes inputs and reference results, such as `reference.References`."""

    def submit(self, sources: Sequence[KernelSource]) -> Sequence[Future[Inputs | str]]:
        """Make them in the background, in order; a message where there are none."""


@dataclasses.dataclass
class Flight:
    """A batch of one kernel's candidates that is being compiled.

    Attributes
    ----------
    kernel : TunedKernel
        The kernel.
    candidates : list of Candidate
        What is tried.
    inputs : Future
        Its inputs with reference results, or why there are none.
    built : sequence of Future
        What the compiler makes of each candidate.
    tried : list of Tried
        What came of the candidates so far; of those that nobody measured, nothing.
    """

    kernel: TunedKernel
    candidates: list[Candidate]
    inputs: Future[Inputs | str]
    built: Sequence[Future[Built | BuildFailure]]
    tried: list[Tried] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(
        kernel: TunedKernel, candidates: list[Candidate], builder: BuildsCandidates,
        references: MakesReferences,
    ) -> Flight:  # fmt: skip
        """Begin to compile candidates."""
        (inputs,) = references.submit([kernel.source])
        requests = [BuildRequest(kernel.source, c.template, c.decision) for c in candidates]
        return Flight(kernel, candidates, inputs, builder.submit(requests))

    def is_ready(self, number: int) -> bool:
        """Whether a candidate can be measured without a wait."""
        return self.inputs.done() and self.built[number].done()

    def cancel(self) -> None:
        """Compile no more of it."""
        for future in self.built:
            future.cancel()


def measured(flights: Sequence[Flight], runner: Runner) -> Iterator[list[tuple[Flight, Tried]]]:
    """Measure what was compiled, in order, as it comes; identical code of a kernel once.

    Parameters
    ----------
    flights : sequence of Flight
        What is being compiled. A kernel without inputs gets its ``problem``.
    runner : Runner
        Measures.

    Yields
    ------
    list of (Flight, Tried)
        What came of the next candidates. When and how many is a matter of speed; what and in which order is not.
    """
    turn = [(flight, n) for flight in flights for n in range(len(flight.candidates))]
    while turn:
        count = len(turn)
        if runner.in_parts:
            waiting = (i for i, (flight, n) in enumerate(turn) if not flight.is_ready(n))
            count = max(1, next(waiting, count))
        some = [(flight, n) for flight, n in turn[:count] if _has_inputs(flight)]
        turn = turn[count:]
        _run(some, runner)
        yield list(_results(some))


def _has_inputs(flight: Flight) -> bool:
    inputs = flight.inputs.result()
    if isinstance(inputs, str):
        flight.kernel.problem = inputs
        flight.cancel()
        return False
    return True


def _run(some: Sequence[tuple[Flight, int]], runner: Runner) -> None:
    """Measure candidates whose code was not measured yet."""
    requests: dict[tuple[str, str], RunRequest] = {}
    kernels = {flight.kernel.digest: flight.kernel for flight, _ in some}
    for flight, number in some:
        kernel, found, inputs = flight.kernel, flight.built[number].result(), flight.inputs.result()
        if isinstance(found, Built) and found.code_digest not in kernel.codes:
            request = RunRequest(found, inputs, kernel.source.kind)
            requests.setdefault((kernel.digest, found.code_digest), request)
    if not requests:
        return
    results = runner.run(list(requests.values()))
    for (digest, code), result in zip(requests, results, strict=True):
        if result.verdict != "lost":
            kernels[digest].codes[code] = result


def _results(some: Sequence[tuple[Flight, int]]) -> Iterator[tuple[Flight, Tried]]:
    for flight, number in some:
        candidate, found = flight.candidates[number], flight.built[number].result()
        if isinstance(found, Built):
            result = flight.kernel.codes.get(found.code_digest)
        else:
            result = RunResult(found.verdict, (), found.message)
        if result is not None:
            flight.tried.append((candidate, found, result))
            yield flight, flight.tried[-1]
