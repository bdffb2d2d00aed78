"""What a strategy yields: proposals, nothing else."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A set of operators that one kernel could compute.

    Attributes
    ----------
    strategy : str
        ``"vertical"`` or ``"horizontal"``.
    operators : tuple of str
        Operator names in topological order.
    anchors : tuple of str
        The operators among them that decide the kernel's loops (empty for purely elementwise
        groups).
    members : tuple of tuple of str
        The operators of each parallel branch; one branch for a vertical group.
    depth : int
        Working operators on the longest path.
    parts : tuple of str
        Ids of groups that this one replaces.
    options : tuple of (str, str)
        How the group is to be lowered, such as ``("form", "merged")``, sorted by key.
    """

    strategy: str
    operators: tuple[str, ...]
    anchors: tuple[str, ...] = ()
    members: tuple[tuple[str, ...], ...] = ()
    depth: int = 1
    parts: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def option(self, key: str, default: str = "") -> str:
        """Value of one option."""
        return dict(self.options).get(key, default)


class Strategy(abc.ABC):
    """Finds groups of one kind in a graph."""

    #: Name used in attributes, plans and the command line.
    name: str

    @abc.abstractmethod
    def propose(self, graph: DataflowGraph, config: FusionConfig) -> Iterator[Proposal]:
        """Yield every proposal worth judging, legal or not, in a deterministic order."""


def depth_of(graph: DataflowGraph, names: tuple[str, ...]) -> int:
    """Count the working operators on the longest path inside a set of operators."""
    depth: dict[str, int] = {}
    for name in graph.sort(names):
        operator = graph.by_name[name]
        before = (depth.get(p.name, 0) for p in graph.predecessors(operator))
        depth[name] = max(before, default=0) + int(operator.does_work)
    return max(depth.values(), default=0)
