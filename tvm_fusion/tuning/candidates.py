"""Which groups are worth measuring: the planner's choices at several depths and with several strategies."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..planner.candidates import Candidate
from ..planner.compare import Kernel, kernel_of
from ..planner.cost import fused_cost
from ..planner.planner import solve
from ..strategies.base import Proposal

#: Depths of chains that are tried beside the limit of the configuration: pairs, and three or four operators.
DEPTHS = (2, 4)

#: Further groupings of the operators of one chosen group, of those that the model ranks best.
_OTHERS = 3


@dataclasses.dataclass(frozen=True)
class Variation:
    """One way to plan a model.

    Attributes
    ----------
    name : str
        What is varied.
    proposals : tuple of Proposal
        The groups that it takes.
    """

    name: str
    proposals: tuple[Proposal, ...]


def explore(graph: DataflowGraph, device: DeviceSpec, config: FusionConfig) -> list[Variation]:
    """Plan a graph in several ways.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    device : DeviceSpec
        Where it will run.
    config : FusionConfig
        Strategies and limits. Nothing goes beyond them but joins of branches of unequal work: what
        ``max_work_ratio`` says of them is a rule of thumb, which measured times replace.

    Returns
    -------
    list of Variation
        First the plan of ``config`` itself, then plans of less depth and of fewer strategies, then one of other
        groupings of its groups. No kernel is in two of them.
    """
    taken: dict[str, list[Candidate]] = {}
    for name, varied in _variations(config):
        solution = solve(graph, device, varied)
        taken[name] = solution.chosen
        if name == "all":
            others = list(_others(solution.chosen, solution.considered))
    taken["others"] = others
    known: set[Kernel] = set()
    found = []
    for name, candidates in taken.items():
        fresh = {kernel_of(c.proposal): c.proposal for c in candidates}
        found.append(Variation(name, tuple(p for key, p in fresh.items() if key not in known)))
        known |= fresh.keys()
    return [v for v in found if v.proposals or v.name == "all"]


def _variations(config: FusionConfig) -> Iterator[tuple[str, FusionConfig]]:
    yield "all", config
    if config.balance == "refuse" and {"cross", "compound"} & set(config.strategies):
        yield "any work ratio", dataclasses.replace(config, max_work_ratio=sys.float_info.max)
    for depth in DEPTHS:
        if depth < config.max_depth:
            yield f"depth {depth}", dataclasses.replace(config, max_depth=depth)
    if len(config.strategies) > 1:
        for strategy in config.strategies:
            if strategy != "compound":  # built from parts of the others
                yield strategy, dataclasses.replace(config, strategies=(strategy,))


def _others(chosen: list[Candidate], considered: list[Candidate]) -> Iterator[Candidate]:
    """Groups inside the chosen ones that the model ranks next, and those around them."""
    usable = sorted(
        (c for c in considered if c.verdict.accepted), key=lambda c: (-c.saving, c.operators)
    )
    for group in chosen:
        whole = set(group.operators)
        close = (c for c in usable if c.key != group.key and whole & set(c.operators))
        yield from (c for c, _ in zip(close, range(_OTHERS), strict=False))


def floor_microseconds(graph: DataflowGraph, proposal: Proposal, device: DeviceSpec) -> float:
    """Least time of a kernel: that of its arithmetic, or of its bytes where they do not fit into the cache.

    Tensors that fit may come from the cache, which has no documented rate.
    """
    cost = fused_cost(graph, proposal, device)
    dtype = graph.tensors[graph.by_name[proposal.operators[0]].outputs[0]].dtype
    moved = max(0, cost.nbytes - device.cache_bytes) / device.memory_bandwidth
    return 1e6 * max(moved, cost.flops / device.peak_flops(dtype))
