"""The exact search against exhaustive enumeration, and on large structured problems."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_fusion.graph._native import Reachability
from tvm_fusion.planner.search import SearchResult, choose

Candidates = list[tuple[tuple[int, ...], int]]


def feasible_sets(graph: Reachability, candidates: Candidates):
    """Every set of disjoint, jointly acyclic candidates that save something, by plain recursion."""
    useful = [i for i, (_, saving) in enumerate(candidates) if saving > 0]

    def extend(start: int, taken: tuple[int, ...], covered: frozenset[int]):
        if graph.is_acyclic_contracted([candidates[i][0] for i in taken]):
            yield taken
        # A cyclic set is no answer, and no larger set can be acyclic again, but the slow twin does
        # not rely on that.
        for at in range(start, len(useful)):
            group = frozenset(candidates[useful[at]][0])
            if not group & covered:
                yield from extend(at + 1, (*taken, useful[at]), covered | group)

    yield from extend(0, (), frozenset())


def slow_choose(graph: Reachability, candidates: Candidates) -> tuple[tuple[int, ...], int]:
    """The optimum by enumeration: most saving, then the lexicographically smallest set."""

    def saving(taken: tuple[int, ...]) -> int:
        return sum(candidates[i][1] for i in taken)

    best = min(feasible_sets(graph, candidates), key=lambda taken: (-saving(taken), taken))
    return best, saving(best)


def check_is_feasible(graph: Reachability, candidates: Candidates, result: SearchResult) -> None:
    groups = [candidates[i][0] for i in result.chosen]
    nodes = [node for group in groups for node in group]
    assert len(nodes) == len(set(nodes))
    assert graph.is_acyclic_contracted(groups)
    assert result.chosen == tuple(sorted(result.chosen))
    assert result.saving == sum(candidates[i][1] for i in result.chosen)
    assert result.saving <= result.upper_bound
    assert result.regions == result.exact_regions + result.bounded_regions
    assert result.exact == (result.bounded_regions == 0)


@st.composite
def problems(draw: st.DrawFn, max_nodes: int = 10, max_candidates: int = 12):
    """Random DAGs, whose numbering need not be topological, with convex candidates that also pair up in
    cycles; few distinct savings, so that ties are common."""
    count = draw(st.integers(1, max_nodes))
    label = draw(st.permutations(range(count)))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=2 * count)) if pairs else []
    graph = Reachability(count, [(label[a], label[b]) for a, b in edges])
    sets = draw(
        st.lists(
            st.sets(st.integers(0, count - 1), min_size=1, max_size=4), max_size=max_candidates
        )
    )
    largest = draw(st.sampled_from([2, 5, 1000]))
    groups = [tuple(draw(st.permutations(sorted(s)))) for s in sets if graph.is_convex(s)]
    return graph, [(group, draw(st.integers(-1, largest))) for group in groups]


@settings(max_examples=600, deadline=None)
@given(problem=problems())
def test_agrees_with_the_slow_twin(problem) -> None:
    graph, candidates = problem
    result = choose(graph, candidates)
    check_is_feasible(graph, candidates, result)
    assert (result.chosen, result.saving) == slow_choose(graph, candidates)
    assert result.exact
    assert result == choose(graph, candidates)


@settings(max_examples=300, deadline=None)
@given(problem=problems(), max_states=st.integers(1, 12))
def test_bounded_search_brackets_the_optimum(problem, max_states) -> None:
    graph, candidates = problem
    result = choose(graph, candidates, max_states=max_states)
    check_is_feasible(graph, candidates, result)
    _, optimum = slow_choose(graph, candidates)
    assert result.saving <= optimum <= result.upper_bound
    assert result == choose(graph, candidates, max_states=max_states)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_crossing_pairs(data, seed) -> None:
    """Many two-member groups over short parallel edges: most pairs of them close a cycle."""
    count = data.draw(st.integers(2, 5))
    graph = Reachability(2 * count, [(2 * i, 2 * i + 1) for i in range(count)])
    rng = np.random.default_rng(seed)
    pairs = [(2 * i, 2 * j + 1) for i, j in itertools.permutations(range(count), 2)]
    order = rng.permutation(len(pairs))[:10]
    candidates = [(pairs[i], int(rng.integers(1, 4))) for i in order]
    result = choose(graph, candidates)
    check_is_feasible(graph, candidates, result)
    assert (result.chosen, result.saving) == slow_choose(graph, candidates)


def test_a_cycle_across_regions() -> None:
    """Two groups that share no operator, each waiting for the other: the better one stays."""
    graph = Reachability(4, [(0, 1), (2, 3)])
    result = choose(graph, [((0, 3), 5), ((1, 2), 7)])
    assert result == SearchResult((1,), 7, 7, 1, 1, 0, result.states)
    # Without the second edge nothing is wrong with both.
    both = choose(Reachability(4, [(0, 1)]), [((0, 3), 5), ((1, 2), 7)])
    assert both == SearchResult((0, 1), 12, 12, 2, 2, 0, both.states)


def test_a_cycle_of_three() -> None:
    graph = Reachability(6, [(0, 1), (2, 3), (4, 5)])
    candidates = [((1, 2), 3), ((3, 4), 2), ((5, 0), 2)]
    # On a tie the earlier of the two smaller ones is kept.
    assert choose(graph, candidates).chosen == (0, 1)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([((0, 1), 4), ((0,), 2), ((1,), 2)], (0,)),
        ([((0,), 2), ((1,), 2), ((0, 1), 4)], (0, 1)),
        ([((0,), 2), ((0, 1), 4), ((1,), 2)], (0, 2)),
        ([((1,), 3), ((0,), 3), ((0,), 3)], (0, 1)),
        ([((0, 1), 5), ((0, 1), 5)], (0,)),
        ([((0, 1), 0), ((2,), -3)], ()),
    ],
)
def test_ties_go_to_the_earlier_candidate(candidates, chosen) -> None:
    assert choose(Reachability(3, [(0, 1), (1, 2)]), candidates).chosen == chosen


def test_nothing_to_choose() -> None:
    empty = SearchResult((), 0, 0, 0, 0, 0, 0)
    assert choose(Reachability(0, []), []) == empty
    assert choose(Reachability(3, [(0, 1)]), [((0, 1), -5)]) == empty
    assert empty.exact and empty.gap == 0.0


def test_numpy_integers_are_accepted() -> None:
    graph = Reachability(3, [(0, 1), (1, 2)])
    assert choose(graph, [(np.array([0, 1]), np.int64(4))], max_states=np.int32(10)).saving == 4


@pytest.mark.parametrize(
    ("candidates", "options", "message"),
    [
        ([((), 1)], {}, "candidate 0 has no operators"),
        ([((0,), 1), ((1, 3), 1)], {}, "node 3 is not in the graph"),
        ([((-1,), 1)], {}, "not in the graph"),
        ([((0, 0), 1)], {}, "candidate 0 names an operator twice"),
        ([((0,), 1), ((0, 2), 1)], {}, "candidate 1 is not convex"),
        ([((0,), 2**60), ((1,), 1)], {}, "add up to more than"),
        ([((0,), 2**80)], {}, "does not fit 64 bits"),
        ([((2**70,), 1)], {}, "does not fit 64 bits"),
        ([((0,), 1)], {"max_states": 0}, "max_states must be"),
        ([((0,), 1)], {"max_states": 10**12}, "max_states must be"),
    ],
)
def test_bad_input_is_one_sentence(candidates, options, message) -> None:
    with pytest.raises(ValueError, match=message) as info:
        choose(Reachability(3, [(0, 1), (1, 2)]), candidates, **options)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("candidates", [[((0,), 1.5)], [((0.5,), 1)], [(("a",), 1)]])
def test_non_integers_are_type_errors(candidates) -> None:
    with pytest.raises(TypeError):
        choose(Reachability(2, [(0, 1)]), candidates)


def chain_windows(count: int, longest: int) -> tuple[Reachability, Candidates]:
    """A chain and all its windows; savings without a pattern."""
    graph = Reachability(count, [(i, i + 1) for i in range(count - 1)])
    candidates = [
        (
            tuple(range(start, start + length)),
            (length - 1) * 100 + (start * 7919 + length * 31) % 53,
        )
        for start in range(count)
        for length in range(2, longest + 1)
        if start + length <= count
    ]
    return graph, candidates


def test_a_chain_of_5000() -> None:
    graph, candidates = chain_windows(5000, 6)
    started = time.process_time()
    result = choose(graph, candidates)
    # Processor time, about 0.1 s: a busy machine may take a few times as long.
    assert time.process_time() - started < 2.0
    check_is_feasible(graph, candidates, result)
    assert result.exact
    # The same by the textbook recurrence over prefixes.
    best = [0] * 5001
    by_end: dict[int, list[tuple[int, int]]] = {}
    for group, saving in candidates:
        by_end.setdefault(group[-1] + 1, []).append((group[0], saving))
    for end in range(1, 5001):
        ways = (best[start] + saving for start, saving in by_end.get(end, []))
        best[end] = max(best[end - 1], *ways) if end in by_end else best[end - 1]
    assert result.saving == best[5000]


def parallel_branches(depth_of_groups: range) -> tuple[Reachability, Candidates]:
    """12 branches of depth 4 from one producer: the prefixes of each, and groups over 2 to 6 of them."""
    edges = []
    for branch in range(12):
        nodes = [1 + 4 * branch + step for step in range(4)]
        edges += [(0, nodes[0]), *itertools.pairwise(nodes)]
    graph = Reachability(49, edges)
    candidates: Candidates = [
        (tuple(1 + 4 * b + s for s in range(length)), 40 * (length - 1))
        for b in range(12)
        for length in range(2, 5)
    ]
    for members in range(2, 7):
        for taken in itertools.combinations(range(12), members):
            for depth in depth_of_groups:
                group = tuple(1 + 4 * b + s for b in taken for s in range(depth))
                # Wider is better up to 5 members; the weights of the branches differ.
                worth = 40 * members * (depth - 1) + 30 * (members - 1) - 25 * (members == 6)
                candidates.append((group, worth + sum(taken) % 5))
    return graph, candidates


@pytest.mark.parametrize("depths", [range(4, 5), range(1, 5)], ids=["whole", "every depth"])
def test_twelve_branches(depths) -> None:
    graph, candidates = parallel_branches(depths)
    started = time.process_time()
    result = choose(graph, candidates)
    assert time.process_time() - started < 5.0
    check_is_feasible(graph, candidates, result)
    assert result.exact
    # Branches are alike up to the small bonus, so an optimum must cover all of them.
    assert len({node for i in result.chosen for node in candidates[i][0]}) >= 47


def test_many_regions_are_solved_apart() -> None:
    count = 1000
    graph = Reachability(
        3 * count, [(3 * i + a, 3 * i + a + 1) for i in range(count) for a in (0, 1)]
    )
    candidates = [
        (group, saving)
        for i in range(count)
        for group, saving in (((3 * i, 3 * i + 1), 5), ((3 * i + 1, 3 * i + 2), 5 + i % 2))
    ]
    result = choose(graph, candidates)
    assert (result.regions, result.exact_regions) == (count, count)
    assert result.saving == 5 * count + count // 2
    assert result.chosen == tuple(2 * i + i % 2 for i in range(count))
    assert result.states < 10 * count


def test_many_independent_cycles() -> None:
    """Two hundred copies of the two-region cycle: each costs one group, not a search over all."""
    count = 200
    graph = Reachability(
        4 * count, [(4 * i + a, 4 * i + a + 1) for i in range(count) for a in (0, 2)]
    )
    candidates = [
        (group, saving)
        for i in range(count)
        for group, saving in (
            ((4 * i, 4 * i + 3), 5 + i % 3),
            ((4 * i + 1, 4 * i + 2), 6),
        )
    ]
    result = choose(graph, candidates)
    check_is_feasible(graph, candidates, result)
    assert result.exact and result.saving == sum(max(5 + i % 3, 6) for i in range(count))


def test_cycles_along_one_region() -> None:
    """A ladder whose rungs cross: every pair of neighbouring groups can close a cycle."""
    count = 60
    edges = []
    for i in range(count - 1):
        edges += [
            (2 * i, 2 * i + 2),
            (2 * i + 1, 2 * i + 3),
            (2 * i, 2 * i + 3),
            (2 * i + 1, 2 * i + 2),
        ]
    graph = Reachability(2 * count, edges)
    candidates = []
    for i in range(count - 1):
        candidates += [((2 * i + a, 2 * i + 2 + a), 10 + i % 3 + a) for a in (0, 1)]
        candidates += [((2 * i + a, 2 * i + 3 - a), 9) for a in (0, 1)]
    candidates += [((2 * i, 2 * i + 1), 8) for i in range(count)]
    candidates = [c for c in candidates if graph.is_convex(c[0])]
    result = choose(graph, candidates)
    check_is_feasible(graph, candidates, result)
    assert result.exact
