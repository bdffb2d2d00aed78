"""Questions about a dataflow graph that planning asks thousands of times, answered by the native core.

Reachability and convexity come from bit rows (``csrc/reachability.cc``), the growth, traffic and
depth of sets of operators from the graph as numbers (``csrc/dataflow.cc``), the choice of groups from
an exact search (``csrc/search.cc``).
"""

from __future__ import annotations

import array
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

# Loads libtvm_ffi, which the native core needs, before the core itself is loaded.
import tvm_ffi

LIBRARY = Path(__file__).resolve().parent.parent / "_core.so"


@functools.cache
def _core() -> dict[str, type]:
    """Load the library once and return the classes that it registers, by name.

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
        return {name: _register(name) for name in ("Reachability", "Dataflow")}
    except (RuntimeError, ValueError, OSError) as error:
        raise ImportError(
            f"the native core {LIBRARY} does not load with the installed tvm-ffi; {repair}"
        ) from error


def _register(name: str) -> type:
    members = {"__doc__": "The native object."}
    return tvm_ffi.register_object(f"tvm_fusion.{name}")(
        type(f"_{name}", (tvm_ffi.Object,), members)
    )


def pack(numbers: Iterable[int]) -> bytes:
    """Integers as the native core takes them in bulk: int64, native byte order.

    Raises
    ------
    ValueError
        If a number does not fit 64 bits.
    TypeError
        If one is not an integer.
    """
    try:
        return array.array("q", numbers).tobytes()
    except OverflowError as error:
        raise ValueError("a number does not fit 64 bits") from error


def unpack(data: bytes) -> array.array[int]:
    """The inverse of `pack`."""
    out = array.array("q")
    out.frombytes(data)
    return out


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
        self._core = _core()["Reachability"](operator.index(num_nodes), flat)

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
        return self._core.is_convex(pack(nodes))

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

    def choose(
        self, groups: Sequence[Sequence[int]], savings: Sequence[int], max_states: int
    ) -> array.array[int]:
        """Choose disjoint, jointly acyclic groups of largest total saving.

        `planner.search` is the interface to this; it says what is promised.

        Returns
        -------
        array of int64
            Saving, upper bound, regions, exact regions, states, then the positions of the chosen
            groups, ascending.

        Raises
        ------
        ValueError
            If a group is empty, not convex, names an operator twice or one that does not exist, or
            the numbers are out of range.
        """
        return unpack(self._core.choose(*_flatten(groups), pack(savings), max_states))


class Dataflow:
    """Operators and tensors as numbers.

    Operators are numbered in topological order, tensors in any order.

    Parameters
    ----------
    reachability : Reachability
        Of the operators.
    tensors : sequence of (int, int, int, bool, bool)
        For each tensor: bytes, elements, a number that tensors of equal shape share, whether it is a
        result of the graph, and whether it is constant.
    operators : sequence of (bool, bool, sequence of int, sequence of int)
        For each operator: whether it is pointwise, whether it does work, the tensors that it reads,
        and the tensors that it writes.

    Raises
    ------
    ValueError
        If a tensor does not exist or is written twice, or an operator reads what it or a later one
        writes.
    """

    def __init__(
        self,
        reachability: Reachability,
        tensors: Sequence[tuple[int, int, int, bool, bool]],
        operators: Sequence[tuple[bool, bool, Sequence[int], Sequence[int]]],
    ) -> None:
        reads = [operator[2] for operator in operators]
        writes = [operator[3] for operator in operators]
        self._core = _core()["Dataflow"](
            reachability._core,
            *(pack(tensor[i] for tensor in tensors) for i in range(3)),
            pack(int(result) + 2 * int(constant) for *_, result, constant in tensors),
            pack(int(pointwise) + 2 * int(works) for pointwise, works, *_ in operators),
            *_flatten(reads),
            *_flatten(writes),
        )

    def grow_epilogue(
        self, seed: Iterable[int], max_operators: int, allowed: Callable[[int], bool] | None = None
    ) -> array.array[int]:
        """Extend a set by the pointwise operators that follow it (`strategies.growth.grow_epilogue`).

        Returns
        -------
        array of int64
            For each operator that joins, in that order: twice its number, plus one if the set then
            has one result. Empty if the seed has not one result.
        """
        return unpack(self._core.grow_epilogue(pack(seed), operator.index(max_operators), allowed))

    def grow_prologue(
        self, anchor: int, max_operators: int, allowed: Callable[[int], bool] | None = None
    ) -> array.array[int]:
        """Extend an anchor by the pointwise operators that only it reads, in the order in which they join."""
        return unpack(
            self._core.grow_prologue(operator.index(anchor), operator.index(max_operators), allowed)
        )

    def external_inputs(self, nodes: Iterable[int]) -> array.array[int]:
        """Tensors that a set of operators reads and does not write, in first-use order."""
        return unpack(self._core.external_inputs(pack(nodes)))

    def external_outputs(self, nodes: Iterable[int]) -> array.array[int]:
        """Tensors that a set of operators writes and that are read outside it or returned."""
        return unpack(self._core.external_outputs(pack(nodes)))

    def traffic(self, groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Bytes read and bytes written by one kernel for each set of operators.

        Each distinct tensor from outside counts once, and each that is read outside or returned.
        """
        found = unpack(self._core.traffic(*_flatten(groups)))
        return list(zip(found[::2], found[1::2], strict=True))

    def depth(self, groups: Sequence[Sequence[int]]) -> array.array[int]:
        """Working operators on the longest path inside each set of operators."""
        return unpack(self._core.depth(*_flatten(groups)))


def _flatten(lists: Sequence[Sequence[int]]) -> tuple[bytes, bytes]:
    """Lengths of lists, and their elements one after another."""
    return pack(map(len, lists)), pack(itertools.chain.from_iterable(lists))
