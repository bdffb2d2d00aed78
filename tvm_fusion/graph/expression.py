"""How large the expression becomes that a kernel computes for each result.

Pointwise operators of a kernel are inlined into one another, and a value that is read twice stands
twice in the code. A chain of ``x * sigmoid(x)`` so doubles with every link, and compilers take
seconds, minutes, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .dataflow import DataflowGraph

#: How often the lowered form of an operator reads its operand, where that is more than once.
OPERAND_USES: Mapping[str, int] = {
    "silu": 2, "gelu": 2, "gelu_tanh": 4, "softplus": 3, "hardswish": 2, "square": 2, "selu": 2, "elu": 2,
    "leakyrelu": 2, "prelu": 2,
}  # fmt: skip

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
    size: dict[str, int] = {}
    inside = graph.sort(operators)
    total = 0
    for name in inside:
        operator = graph.by_name[name]
        if operator.pattern not in _INLINED:
            size[name] = 1
            total += 1
            continue
        reads = (graph.producer.get(tensor) for tensor in operator.inputs)
        repeats = OPERAND_USES.get(operator.op, 1)
        size[name] = 1 + repeats * sum(size.get(p.name, 0) for p in reads if p is not None)
    read = {p.name for name in inside for p in graph.predecessors(graph.by_name[name])}
    return total + sum(size[name] for name in inside if name not in read)


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
    size = expression_size(graph, operators)
    return _ANY + _PER_ANCHOR * anchors + _PER_SQUARE * size * size
