"""Branches of products that each end in a row operator: softmax, a norm or a sum over the product's columns."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph, Operator
from .branches import Branch
from .growth import grow_epilogue
from .vertical import is_over_last_axis

#: Row operators that can work on the rows of several members at once.
STACKABLE_ROWS = ("layer_norm", "rms_norm", "softmax", "log_softmax", "sum", "mean", "max", "min")


def stacked_rows(
    graph: DataflowGraph, config: FusionConfig, heads: Sequence[Operator]
) -> list[Branch]:
    """Follow products through pointwise operators to a row operator over their columns, and on.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    config : FusionConfig
        Limits.
    heads : sequence of Operator
        Operators of one type.

    Returns
    -------
    list of Branch
        One for each head that such an operator follows, with the pointwise operators after it; empty if the heads are
        no products.
    """
    found = []
    for head in heads:
        if head.op == "matmul":
            branch = _through_row(graph, config, head)
            if branch is not None:
                found.append(branch)
    return found


def _through_row(graph: DataflowGraph, config: FusionConfig, head: Operator) -> Branch | None:
    for names in grow_epilogue(graph, (head.name,), max_operators=config.max_operators):
        results = graph.external_outputs(names)
        if len(results) != 1 or results[0] in graph.outputs:
            continue
        readers = graph.consumers[results[0]]
        row = readers[0] if len(readers) == 1 else None
        if row is None or row.op not in STACKABLE_ROWS or not is_over_last_axis(graph, row):
            continue
        whole = graph.sort((*names, row.name))
        largest = grow_epilogue(graph, whole, max_operators=config.max_operators)[-1]
        results = graph.external_outputs(largest)
        return Branch(head.name, largest, results[0]) if len(results) == 1 else None
    return None
