"""The native graph against slow twins in Python: outside tensors, traffic, depth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_fusion.graph._native import Dataflow, Reachability
from tvm_fusion.graph.dataflow import DataflowGraph
from tvm_fusion.testing.graphs import random_graph


def slow_inputs(graph: DataflowGraph, names: list[str]) -> tuple[str, ...]:
    made = {t for name in names for t in graph.by_name[name].outputs}
    reads = (t for name in graph.sort(names) for t in graph.by_name[name].inputs)
    return tuple(dict.fromkeys(t for t in reads if t not in made))


def slow_outputs(graph: DataflowGraph, names: list[str]) -> tuple[str, ...]:
    outside = [o for o in graph.operators if o.name not in names]
    return tuple(
        t
        for name in graph.sort(names)
        for t in graph.by_name[name].outputs
        if t in graph.outputs or any(t in o.inputs for o in outside)
    )


def slow_depth(graph: DataflowGraph, names: list[str]) -> int:
    depth: dict[str, int] = {}
    for name in graph.sort(names):
        operator = graph.by_name[name]
        before = [depth[p] for p in depth if set(graph.by_name[p].outputs) & set(operator.inputs)]
        depth[name] = max(before, default=0) + int(operator.does_work)
    return max(depth.values(), default=0)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_agrees_with_the_slow_twins(seed) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, operators=rng.randint(1, 20))
    everything = [o.name for o in graph.operators]
    groups = [rng.sample(everything, rng.randint(0, len(everything))) for _ in range(4)]
    groups.append(rng.choices(everything, k=3))  # repeats count once
    groups += [(name,) for name in everything]  # answered without the native core
    traffic = []
    for names in groups:
        inputs, outputs = slow_inputs(graph, names), slow_outputs(graph, names)
        assert graph.external_inputs(names) == inputs
        assert graph.external_outputs(names) == outputs
        read, written = (sum(graph.tensors[t].nbytes for t in part) for part in (inputs, outputs))
        assert graph.traffic(names) == (read, written)
        traffic.append((read, written))
        assert graph.depth(names) == slow_depth(graph, names)
    numbers = [[graph.index[name] for name in names] for names in groups]
    assert graph.core.traffic(numbers) == traffic
    assert list(graph.core.depth(numbers)) == [slow_depth(graph, names) for names in groups]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_neighbours(seed) -> None:
    graph = random_graph(random.Random(seed), operators=12)
    for operator in graph.operators:
        before = [o.name for o in graph.predecessors(operator)]
        assert len(before) == len(set(before))
        assert set(before) == {
            o.name for o in graph.operators if set(o.outputs) & set(operator.inputs)
        }
        assert {o.name for o in graph.successors(operator)} == {
            o.name for o in graph.operators if set(operator.outputs) & set(o.inputs)
        }


def test_an_empty_graph() -> None:
    graph = DataflowGraph((), {}, (), ())
    assert graph.traffic([]) == (0, 0) and graph.depth([]) == 0
    assert graph.core.traffic([]) == []


TENSORS = [(4, 1, 0, False, False)] * 3


@pytest.mark.parametrize(
    ("nodes", "operators", "message"),
    [
        (1, [(True, True, [0], [3])], "tensor 3 is not among the 3"),
        (1, [(True, True, [-1], [1])], "tensor -1 is not among"),
        (2, [(True, True, [0], [1]), (True, True, [0], [1])], "written twice"),
        (2, [(True, True, [2], [1]), (True, True, [0], [2])], "not topological"),
        (1, [(True, True, [1], [1])], "not topological"),
        (2, [(True, True, [0], [1])], "2 nodes, not 1 operators"),
    ],
)
def test_broken_graphs_are_one_sentence(nodes, operators, message) -> None:
    with pytest.raises(ValueError, match=message) as info:
        Dataflow(Reachability(nodes, []), TENSORS, operators)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "query",
    [
        lambda core: core.traffic([[0], [7]]),
        lambda core: core.depth([[-1]]),
        lambda core: core.external_inputs([5]),
        lambda core: core.external_outputs([5]),
        lambda core: core.grow_epilogue([5], 4),
        lambda core: core.grow_prologue(-2, 4),
    ],
)
def test_queries_check_their_indices(query) -> None:
    core = Dataflow(Reachability(1, []), TENSORS, [(True, True, [0], [1])])
    with pytest.raises(ValueError, match="not in the graph"):
        query(core)


def test_non_integers_are_type_errors() -> None:
    core = Dataflow(Reachability(1, []), TENSORS, [(True, True, [0], [1])])
    with pytest.raises(TypeError):
        core.external_inputs([0.5])
