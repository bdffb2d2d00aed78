"""Reachability and convexity of a dataflow graph, computed by the native core.

Planning asks these questions for every candidate group, thousands of times on a large network, so
they are answered from bit rows in C++ (``csrc/reachability.cc``).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from pathlib import Path

# Loads libtvm_ffi, which the native core needs, before the core itself is loaded.
import tvm_ffi

LIBRARY = Path(__file__).resolve().parent.parent / "_core.so"


@functools.cache
def _core() -> type:
    """Load the library once and return the class that it registers.

    Raises
    ------
    ImportError
        If the library is missing or does not fit the installed tvm-ffi.
    """
    repair = "install the package again, or in a checkout run: pip install -e ."
    if not LIBRARY.exists():
        raise ImportError(f"the native core {LIBRARY} is missing; {repair}")
    try:
        tvm_ffi.load_module(LIBRARY)
        return tvm_ffi.register_object("tvm_fusion.Reachability")(
            type("_Reachability", (tvm_ffi.Object,), {"__doc__": "The native object."})
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise ImportError(
            f"the native core {LIBRARY} does not load with the installed tvm-ffi; {repair}"
        ) from error


class Reachability:
    """Transitive closure of a directed acyclic graph.

    Building takes O(edges * num_nodes / 64) time and ``num_nodes ** 2 / 4`` bytes.

    Parameters
    ----------
    num_nodes : int
        Number of nodes, at most 100,000; nodes are ``0 .. num_nodes - 1``.
    edges : iterable of (int, int)
        Directed edges ``(from, to)``; repeated edges are allowed.

    Raises
    ------
    ValueError
        If an edge names a node that does not exist, or the edges form a cycle.
    ImportError
        If the native core is missing.
    """

    def __init__(self, num_nodes: int, edges: Iterable[tuple[int, int]]) -> None:
        flat = [operator.index(node) for start, end in edges for node in (start, end)]
        self._core = _core()(operator.index(num_nodes), flat)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the graph."""
        return self._core.num_nodes()

    def reaches(self, start: int, end: int) -> bool:
        """Whether a path of at least one edge leads from ``start`` to ``end``.

        Raises
        ------
        ValueError
            If a node does not exist.
        """
        return self._core.reaches(operator.index(start), operator.index(end))

    def is_convex(self, nodes: Iterable[int]) -> bool:
        """Whether every path between two of ``nodes`` stays inside ``nodes``.

        Raises
        ------
        ValueError
            If a node does not exist.
        """
        return self._core.is_convex([operator.index(node) for node in nodes])

    def is_acyclic_contracted(self, groups: Iterable[Iterable[int]]) -> bool:
        """Whether the graph stays acyclic when every group is contracted to one node.

        Parameters
        ----------
        groups : iterable of iterables of int
            Disjoint sets of nodes; nodes in no group stay as they are.

        Raises
        ------
        ValueError
            If a node does not exist or is in two groups.
        """
        return self._core.is_acyclic_contracted(
            [[operator.index(node) for node in group] for group in groups]
        )
