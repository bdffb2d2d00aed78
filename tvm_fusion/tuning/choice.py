"""The fusion depth by measured time: the planner chooses again with what the clock says.

Nothing here measures: the times come from a callable, so a choice is a pure function of them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence

from ..build.resources import KernelCompiler
from ..compat import tirx
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..guards import Resources, Verdict
from ..planner.candidates import Timing
from ..planner.compare import Kernel, kernel_of
from ..strategies.base import Proposal
from .candidates import floor_microseconds
from .trials import Trial
from .tuned_kernel import NewKernel, TunedKernel
from .tuner import Tuner

#: Smallest noise of a time (relative): clocks of a GPU drift by this much between two measurements.
LEAST_NOISE = 0.01

#: Outcome and reason code of what most often comes of a kernel's candidates; others have no template that works.
_REASONS = {
    "wrong": ("illegal", "numerics"),
    "spills": ("unprofitable", "spill"),
    "shared_memory": ("unsupported", "shared_memory"),
}


class Times:
    """Times of proposals, from the kernels that were tuned for them.

    Parameters
    ----------
    graph : DataflowGraph
        The model.
    device : DeviceSpec
        Where it will run.
    compiler : KernelCompiler
        Lowers proposals.
    tuner : Tuner
        Has the kernels.
    measure : callable
        Measures kernels of which nothing is known.

    Attributes
    ----------
    asked : list of (Proposal, TunedKernel or None)
        Every proposal that was ever asked about, with its kernel.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        device: DeviceSpec,
        compiler: KernelCompiler,
        tuner: Tuner,
        measure: Callable[[Iterable[TunedKernel]], None],
    ) -> None:
        self._graph, self._device = graph, device
        self._compiler, self._tuner, self._measure = compiler, tuner, measure
        self._kernels: dict[Kernel, TunedKernel | None] = {}
        self._no_kernel: dict[Kernel, Verdict] = {}
        self.asked: list[tuple[Proposal, TunedKernel | None]] = []

    def kernels_of(self, proposals: Sequence[Proposal]) -> list[TunedKernel | None]:
        """The kernel of each proposal (disjoint or not), None where it is no kernel."""
        unknown = {kernel_of(p): p for p in proposals if kernel_of(p) not in self._kernels}
        lowered: list[tuple[Proposal, NewKernel | None]] = []
        for batch in _lowered_together(self._graph, list(unknown.values())):
            for proposal, func in zip(batch, self._compiler.lower(batch), strict=True):
                lowered.append((proposal, self._new(proposal, func)))
        added = iter(self._tuner.add([new for _, new in lowered if new is not None]))
        for proposal, new in lowered:
            kernel = next(added) if new is not None else None
            self._kernels[kernel_of(proposal)] = kernel
            self.asked.append((proposal, kernel))
        return [self._kernels[kernel_of(p)] for p in proposals]

    def known(self, proposals: Sequence[Proposal]) -> list[TunedKernel | None]:
        """The kernel of each proposal that was asked about before."""
        return [self._kernels.get(kernel_of(p)) for p in proposals]

    def _new(self, proposal: Proposal, func: object) -> NewKernel | None:
        if not isinstance(func, tirx.PrimFunc):
            message = getattr(func, "error", "") or "it cannot be lowered"
            self._no_kernel[kernel_of(proposal)] = Verdict(
                "unsupported", "no_template", {}, message
            )
            return None
        floor = floor_microseconds(self._graph, proposal, self._device)
        kinds = [self._graph.by_name[name].op for name in proposal.operators]
        return NewKernel(func, kinds, floor)

    def __call__(self, proposals: Sequence[Proposal]) -> list[Timing | None]:
        """Times of proposals; measures those that nothing is known of."""
        kernels = self.kernels_of(proposals)
        self._measure({k.digest: k for k in kernels if k is not None}.values())
        return self._times(kernels)

    def recall(self, proposals: Sequence[Proposal]) -> list[Timing | None]:
        """Times of proposals as far as they are known."""
        return self._times(self.known(proposals))

    def failed(self) -> dict[Kernel, Verdict]:
        """Proposals that are no right kernel so far, and why: not one of the candidates that were tried is right."""
        found = dict(self._no_kernel)
        for key, kernel in self._kernels.items():
            if kernel is None or self._tuner.best(kernel) is not None:
                continue
            if kernel.progress.best or kernel.problem:
                tried = self._tuner.records.trials(kernel.digest, self._tuner.device.name)
                found[key] = verdict_of(tried, kernel.problem)
        return found

    def _times(self, kernels: Sequence[TunedKernel | None]) -> list[Timing | None]:
        best = [self._tuner.best(kernel) if kernel is not None else None for kernel in kernels]
        return [timing_of(trial) if trial is not None else None for trial in best]


def timing_of(trial: Trial) -> Timing:
    """Median of a trial's samples, and how far another measurement may be from it."""
    middle = trial.microseconds
    return Timing(middle, max(trial.error_us, LEAST_NOISE * middle))


def resources_of(trial: Trial) -> Resources:
    """What a trial's kernel takes; its number of threads is not on record."""
    shared = trial.shared_bytes
    return Resources(
        trial.registers,
        trial.spill_bytes,
        shared,
        None,
        trial.template,
        dynamic_shared=bool(shared),
    )


def verdict_of(trials: Sequence[Trial], problem: str = "") -> Verdict:
    """Why there is no right kernel.

    Parameters
    ----------
    trials : sequence of Trial
        What was tried, all in vain.
    problem : str
        Why nothing can be tried, if so.
    """
    if not trials:
        detail = problem or "nothing could be tried"
        return Verdict("unsupported", "no_template", {}, detail)
    counts = collections.Counter(trial.verdict for trial in trials)
    most = counts.most_common(1)[0][0]
    outcome, reason = _REASONS.get(most, ("unsupported", "no_template"))
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    last = next((t.message for t in trials if t.verdict == most and t.message), "")
    detail = f"of {len(trials)} kernels that were tried none is right ({told})"
    return Verdict(outcome, reason, dict(counts), f"{detail}: {last}" if last else detail)


def _lowered_together(graph: DataflowGraph, proposals: Sequence[Proposal]) -> list[list[Proposal]]:
    """Divide proposals into sets that are disjoint and jointly acyclic."""
    batches: list[tuple[set[str], list[Proposal]]] = []
    for proposal in proposals:
        for taken, batch in batches:
            if taken.isdisjoint(proposal.operators) and (
                len(proposal.operators) == 1
                or graph.is_jointly_acyclic([p.operators for p in [*batch, proposal]])
            ):
                break
        else:
            taken, batch = set(), []
            batches.append((taken, batch))
        taken.update(proposal.operators)
        batch.append(proposal)
    return [batch for _, batch in batches]
