"""Growth in the native core against the slow form in Python."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_fusion.graph.dataflow import DataflowGraph, Operator, Tensor
from tvm_fusion.strategies.growth import POINTWISE, grow_epilogue, grow_prologue
from tvm_fusion.testing.graphs import random_graph


def slow_epilogue(graph, seed, *, max_operators, allowed=None):
    """The rule as `grow_epilogue` states it, one operator at a time."""
    results = graph.external_outputs(seed)
    if len(results) != 1:
        return [seed]
    shape = graph.tensors[results[0]].shape
    current, refused, found = list(seed), set(), [seed]
    while len(current) < max_operators:
        waiting = (
            c
            for name in current
            for tensor in graph.by_name[name].outputs
            for c in graph.consumers[tensor]
            if c.name not in current and c.name not in refused
        )
        candidate = min(waiting, key=lambda c: graph.index[c.name], default=None)
        if candidate is None:
            break
        fits = (
            candidate.pattern in POINTWISE
            and len(candidate.outputs) == 1
            and graph.tensors[candidate.outputs[0]].shape == shape
            and (allowed is None or allowed(candidate))
            and graph.is_convex([*current, candidate.name])
        )
        if not fits:
            refused.add(candidate.name)
            continue
        current.append(candidate.name)
        if len(graph.external_outputs(current)) == 1:
            found.append(graph.sort(current))
    return found


def slow_prologue(graph, anchor, *, max_operators, allowed=None):
    """The rule as `grow_prologue` states it, one operator at a time."""
    current, found = [], []
    while len(current) < max_operators:
        inside = {anchor.name, *current}
        reads = [t for name in inside for t in graph.by_name[name].inputs]
        producers = {graph.producer[t].name for t in reads if t in graph.producer} - inside
        fitting = [
            name
            for name in sorted(producers, key=graph.index.__getitem__, reverse=True)
            if is_prologue(graph, graph.by_name[name], inside)
            and (allowed is None or allowed(graph.by_name[name]))
        ]
        if not fitting:
            break
        current.append(fitting[0])
        found.append(graph.sort(current))
    return found


def is_prologue(graph: DataflowGraph, operator: Operator, inside: set[str]) -> bool:
    if operator.pattern not in POINTWISE or len(operator.outputs) != 1:
        return False
    result = operator.outputs[0]
    if result in graph.outputs or any(c.name not in inside for c in graph.consumers[result]):
        return False
    operands = [graph.tensors[t] for t in operator.inputs if not graph.tensors[t].is_constant]
    return graph.tensors[result].size <= max((t.size for t in operands), default=0)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), limit=st.integers(1, 12))
def test_growth_agrees_with_the_slow_form(seed, limit) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, operators=rng.randint(1, 24))
    barred = {o.name for o in graph.operators if rng.random() < 0.15}
    for allowed in (None, lambda o: o.name not in barred):
        for operator in graph.operators:
            options = {"max_operators": limit, "allowed": allowed}
            start = (operator.name,)
            assert grow_epilogue(graph, start, **options) == slow_epilogue(graph, start, **options)
            assert grow_prologue(graph, operator, **options) == slow_prologue(
                graph, operator, **options
            )
        several = tuple(
            rng.sample([o.name for o in graph.operators], rng.randint(1, min(4, len(graph))))
        )
        assert grow_epilogue(graph, several, **options) == slow_epilogue(graph, several, **options)


def chain(*patterns: str, size: int = 8) -> DataflowGraph:
    """Operators o0, o1, … of the given patterns, each reading the one before it."""
    tensors = {f"t{i}": Tensor(f"t{i}", (size,), "float32") for i in range(len(patterns) + 1)}
    operators = tuple(
        Operator(f"o{i}", "op", (f"o{i}",), (f"t{i}",), (f"t{i + 1}",), {}, pattern, 1, 1, 1)
        for i, pattern in enumerate(patterns)
    )
    return DataflowGraph(operators, tensors, ("t0",), (f"t{len(patterns)}",))


def test_an_epilogue_ends_before_what_is_not_pointwise() -> None:
    graph = chain("anchor", "elementwise", "broadcast", "reduction", "elementwise")
    assert grow_epilogue(graph, ("o0",), max_operators=9) == [
        ("o0",), ("o0", "o1"), ("o0", "o1", "o2"),
    ]  # fmt: skip
    assert grow_epilogue(graph, ("o0",), max_operators=2) == [("o0",), ("o0", "o1")]
    assert grow_epilogue(graph, ("o3",), max_operators=9) == [("o3",), ("o3", "o4")]


def test_a_prologue_ends_before_what_is_not_pointwise() -> None:
    graph = chain("reduction", "elementwise", "elementwise", "anchor")
    anchor = graph.by_name["o3"]
    assert grow_prologue(graph, anchor, max_operators=9) == [("o2",), ("o1", "o2")]
    assert grow_prologue(graph, anchor, max_operators=1) == [("o2",)]
    assert grow_prologue(graph, graph.by_name["o1"], max_operators=9) == []


def test_an_error_of_the_condition_is_passed_on() -> None:
    def allowed(operator: Operator) -> bool:
        raise ValueError(operator.name)

    with pytest.raises(ValueError, match="o1"):
        grow_epilogue(chain("anchor", "elementwise"), ("o0",), max_operators=4, allowed=allowed)


def test_unknown_operators_are_errors() -> None:
    graph = chain("anchor", "elementwise")
    with pytest.raises(KeyError):
        grow_epilogue(graph, ("nothing",), max_operators=4)
