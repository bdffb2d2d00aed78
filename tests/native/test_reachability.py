"""The native reachability core against a slow Python twin."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_fusion.graph import _native
from tvm_fusion.graph._native import Reachability

DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3)]


class SlowReachability:
    """The same queries by depth-first search over Python sets."""

    def __init__(self, num_nodes: int, edges: list[tuple[int, int]]) -> None:
        self.edges = edges
        self.below = {node: self._search(node, edges) for node in range(num_nodes)}

    @staticmethod
    def _search(start: int, edges: list[tuple[int, int]]) -> set[int]:
        seen: set[int] = set()
        stack = [start]
        while stack:
            node = stack.pop()
            for end in (end for begin, end in edges if begin == node):
                if end not in seen:
                    seen.add(end)
                    stack.append(end)
        return seen

    def reaches(self, start: int, end: int) -> bool:
        return end in self.below[start]

    def is_convex(self, nodes: list[int]) -> bool:
        inside = set(nodes)
        return not any(
            self.reaches(a, other) and self.reaches(other, b)
            for other in self.below.keys() - inside
            for a in inside
            for b in inside
        )

    def is_acyclic_contracted(self, groups: list[list[int]]) -> bool:
        unit = {node: -1 - i for i, group in enumerate(groups) for node in group}
        edges = [(unit.get(a, a), unit.get(b, b)) for a, b in self.edges]
        edges = [(a, b) for a, b in edges if a != b]
        return not any(a in self._search(a, edges) for a, _ in edges)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Random DAGs whose numbering is not a topological order, with repeated edges."""
    count = draw(st.integers(1, 12))
    label = draw(st.permutations(range(count)))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=30)) if pairs else []
    return count, [(label[a], label[b]) for a, b in edges]


@settings(max_examples=200, deadline=None)
@given(graph=graphs(), data=st.data())
def test_agrees_with_the_slow_twin(graph, data) -> None:
    count, edges = graph
    fast, slow = Reachability(count, edges), SlowReachability(count, edges)
    assert [[fast.reaches(a, b) for b in range(count)] for a in range(count)] == [
        [slow.reaches(a, b) for b in range(count)] for a in range(count)
    ]
    nodes = data.draw(st.lists(st.integers(0, count - 1), max_size=6))
    assert fast.is_convex(nodes) == slow.is_convex(nodes)
    owner = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    # Owner 4 means "in no group".
    groups = [[node for node in range(count) if owner[node] == group] for group in range(4)]
    assert fast.is_acyclic_contracted(groups) == slow.is_acyclic_contracted(groups)


def test_many_words_per_row() -> None:
    """Bits beyond the first 64-bit word, in both directions."""
    chain = Reachability(300, [(i, i + 1) for i in range(299)])
    assert chain.reaches(0, 299)
    assert not chain.reaches(299, 0)
    assert chain.is_convex(range(10, 290))
    assert not chain.is_convex([0, 299])


def test_a_node_does_not_reach_itself() -> None:
    assert not Reachability(2, [(0, 1)]).reaches(0, 0)


def test_convexity_of_a_diamond() -> None:
    diamond = Reachability(4, DIAMOND)
    assert diamond.is_convex([1, 2])
    assert diamond.is_convex([])
    assert not diamond.is_convex([0, 1, 3])


def test_two_convex_groups_can_form_a_cycle() -> None:
    """Each group alone is convex, but each waits for the other."""
    crossed = Reachability(4, [(0, 1), (2, 3)])
    assert crossed.is_convex([0, 3])
    assert crossed.is_convex([1, 2])
    assert crossed.is_acyclic_contracted([[0, 3]])
    assert not crossed.is_acyclic_contracted([[0, 3], [1, 2]])


def test_empty_graph() -> None:
    empty = Reachability(0, [])
    assert empty.num_nodes == 0
    assert empty.is_convex([])
    assert empty.is_acyclic_contracted([])


def test_numpy_integers_are_accepted() -> None:
    edges = np.array(DIAMOND, dtype="int32")
    assert Reachability(np.int64(4), edges).reaches(np.int64(0), np.int64(3))


@pytest.mark.parametrize(
    ("count", "edges"), [(2, [(0, 2)]), (2, [(-1, 0)]), (0, [(0, 0)]), (-1, []), (10**9, [])]
)
def test_bad_indices_and_sizes(count, edges) -> None:
    with pytest.raises(ValueError, match="node"):
        Reachability(count, edges)


@pytest.mark.parametrize("edges", [[(0, 0)], [(0, 1), (1, 0)], [(0, 1), (1, 2), (2, 1)]])
def test_cycles(edges) -> None:
    with pytest.raises(ValueError, match="cycle"):
        Reachability(3, edges)


@pytest.mark.parametrize(
    "query",
    [
        lambda graph: graph.reaches(0, 4),
        lambda graph: graph.reaches(-1, 0),
        lambda graph: graph.is_convex([0, 4]),
        lambda graph: graph.is_acyclic_contracted([[0], [9]]),
    ],
)
def test_queries_check_their_indices(query) -> None:
    with pytest.raises(ValueError, match="not in the graph"):
        query(Reachability(4, DIAMOND))


def test_overlapping_groups() -> None:
    with pytest.raises(ValueError, match="two groups"):
        Reachability(4, DIAMOND).is_acyclic_contracted([[0, 1], [1, 2]])


def test_non_integers_are_type_errors() -> None:
    with pytest.raises(TypeError):
        Reachability(2, [(0, 1.5)])


def test_large_graph_builds_quickly() -> None:
    rng = random.Random(0)
    edges = [tuple(sorted(rng.sample(range(5000), 2))) for _ in range(20000)]
    started = time.process_time()
    graph = Reachability(5000, edges)
    assert graph.is_acyclic_contracted([[i] for i in range(5000)])
    # Processor time, about 0.03 s: a busy machine may take a few times as long.
    assert time.process_time() - started < 1.0


def test_missing_library_is_one_sentence(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(_native, "LIBRARY", tmp_path / "_core.so")
    _native._core.cache_clear()
    try:
        with pytest.raises(ImportError, match="is missing; install the package again") as info:
            Reachability(1, [])
    finally:
        _native._core.cache_clear()
    assert "\n" not in str(info.value)


def test_foreign_library_is_one_sentence(monkeypatch, tmp_path) -> None:
    (tmp_path / "_core.so").write_bytes(b"not a library")
    monkeypatch.setattr(_native, "LIBRARY", tmp_path / "_core.so")
    _native._core.cache_clear()
    try:
        with pytest.raises(ImportError, match="does not load with the installed tvm-ffi"):
            Reachability(1, [])
    finally:
        _native._core.cache_clear()
