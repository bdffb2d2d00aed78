"""What a strategy yields: proposals, nothing else."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph

#: What a group's options may say, and their values: how its members share a kernel (``form``), what
#: combines their results (``join``), how unequal branches were balanced, that one branch is empty
#: (``shortcut``), and that results go through shared memory before the epilogue (``stage``).
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "form": (
        "collapsed", "merged", "joined", "elementwise", "partitioned", "back_to_back", "anchor_row",
        "attention",
    ),
    "join": ("apart", "add", "maximum", "minimum", "multiply", "mixed", "concat"),
    "balance": ("pad", "warps"),
    "shortcut": ("identity",),
    "stage": ("shared",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A set of operators that one kernel could compute.

    Attributes
    ----------
    strategy : str
        One of ``config.STRATEGIES``.
    operators : tuple of str
        Operator names in topological order.
    anchors : tuple of str
        The operators among them that decide the kernel's loops (empty for purely elementwise
        groups).
    members : tuple of tuple of str
        The operators of each parallel branch; one branch for a vertical group.
    depth : int
        Working operators on the longest path.
    parts : tuple of (str, tuple of str)
        Strategy and operators of each proposal that this one is made of, or replaces.
    options : tuple of (str, str)
        How the group is to be lowered, such as ``("form", "merged")``, sorted by key.
    """

    strategy: str
    operators: tuple[str, ...]
    anchors: tuple[str, ...] = ()
    members: tuple[tuple[str, ...], ...] = ()
    depth: int = 1
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def option(self, key: str, default: str = "") -> str:
        """Value of one option.

        Parameters
        ----------
        key : str
            One of ``OPTIONS``.
        default : str
            What is returned where the proposal does not have it.
        """
        for name, value in self.options:
            if name == key:
                return value
        return default


class Strategy(abc.ABC):
    """Finds groups of one kind in a graph."""

    #: Name used in attributes, plans and the command line.
    name: str

    @abc.abstractmethod
    def propose(self, graph: DataflowGraph, config: FusionConfig) -> Iterator[Proposal]:
        """Yield every proposal worth judging, legal or not, in a deterministic order.

        Parameters
        ----------
        graph : DataflowGraph
            The model, in canonical form. It is not changed.
        config : FusionConfig
            Limits, which may cut a search short; the guards ask about them anyway.
        """


def depth_of(graph: DataflowGraph, names: tuple[str, ...]) -> int:
    """Count the working operators on the longest path inside a set of operators."""
    return graph.depth(names)
