"""How large the expression becomes that a kernel computes for each result.

Pointwise operators of a kernel are inlined into one another, and a value that is read twice stands
twice in the code. A chain of ``x * sigmoid(x)`` so doubles with every link, and compilers take
seconds, minutes, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from .dataflow import DataflowGraph

#: How often the lowered form of an operator reads its operand, where that is more than once (on CPUs, which have no
#: instruction for tanh: chains of ``tanh(x) * c`` compile 15 to 25 times as long with each further link).
OPERAND_USES: Mapping[str, int] = {
    "tanh": 5, "sign": 3, "silu": 2, "gelu": 2, "gelu_tanh": 4, "softplus": 3, "hardswish": 2, "square": 2, "selu": 2,
    "elu": 2, "leakyrelu": 2, "prelu": 2,
}  # fmt: skip

#: How many operations a comparison costs the compiler as much as. TVM looks into what it compares wherever a choice is
#: made by it: chains of ``where(x > 0, x, x * c)`` took 0.1 s (13 comparisons), 1.1 s (40) and over half a minute (364)
#: for CPUs, and as long for CUDA.
_COMPARISON = 45
_COMPARING = ("less", "less_equal", "greater", "greater_equal", "sign")

#: Patterns whose operators are inlined into the ones that read them.
_INLINED = ("elementwise", "broadcast", "injective", "view")


def expression_size(graph: DataflowGraph, operators: Iterable[str]) -> int:
    """Count the operations in the expressions of a group's results after inlining.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    operators : iterable of str
        The group.

    Returns
    -------
    int
        Operations, repeated ones each time; values behind an anchor, a reduction or a row operator
        are loaded, and count one.
    """
    return _counted(graph, operators)[0]


def _counted(graph: DataflowGraph, operators: Iterable[str]) -> tuple[int, int]:
    """Operations of a group, and what they cost the compiler, as a number of operations."""
    key = ("expression_size", tuple(operators))
    if key not in graph.memo:  # strategies and guards ask for the same groups
        inside = {graph.index[name] for name in key[1]}
        weights = {i: _COMPARISON for i in inside if graph.operators[i].op in _COMPARING}
        steps = _steps(graph)
        size = _size(steps, inside, {})
        graph.memo[key] = size, _size(steps, inside, weights) if weights else size
    return graph.memo[key]


#: Repeats of the operands (0: the operator is not inlined), and the operators that make them.
_Step = tuple[int, tuple[int, ...]]


def _steps(graph: DataflowGraph) -> list[_Step]:
    """What counting needs of each operator, by position."""
    if "expression_steps" not in graph.memo:
        graph.memo["expression_steps"] = [
            (
                OPERAND_USES.get(o.op, 1) if o.pattern in _INLINED else 0,
                tuple(
                    graph.index[graph.producer[tensor].name]
                    for tensor in o.inputs
                    if tensor in graph.producer
                ),
            )
            for o in graph.operators
        ]
    return graph.memo["expression_steps"]


def _size(steps: Sequence[_Step], inside: Set[int], weights: Mapping[int, int]) -> int:
    """Operations of the expressions of some operators, given by position; each counts 1, or its weight."""
    size: dict[int, int] = {}
    read: set[int] = set()
    total = 0
    for i in sorted(inside):
        repeats, makers = steps[i]
        read.update(makers)
        if not repeats:
            size[i] = 1
            total += 1
            continue
        operands = 0
        for maker in makers:
            operands += size.get(maker, 0)
        size[i] = weights.get(i, 1) + repeats * operands
    return total + sum(size[i] for i in inside - read)


#: Seconds that nvcc 13 takes for any kernel, for each anchor, and for each squared operation of the
#: expressions. From chains of ``erf(x) + sigmoid(x)`` (765 operations: 0.6 s, 1,533: 1.1 s,
#: 3,069: 2.9 s, 12,285: over a minute) and 1 to 8 convolutions joined in registers (0.4 to 1.1 s).
_ANY, _PER_ANCHOR, _PER_SQUARE = 0.35, 0.1, 3e-7


def build_seconds(graph: DataflowGraph, operators: Iterable[str], anchors: int = 0) -> float:
    """Estimate the time that a compiler needs for one kernel, in seconds.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    operators : iterable of str
        The group.
    anchors : int
        Anchors that are compiled, merged ones once.
    """
    _, size = _counted(graph, operators)
    return _ANY + _PER_ANCHOR * anchors + _PER_SQUARE * size * size
