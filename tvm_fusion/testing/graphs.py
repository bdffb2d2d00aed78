"""Random dataflow graphs without any compiler's types."""

from __future__ import annotations

import random

from ..graph.dataflow import DataflowGraph, Operator, Tensor
from ..graph.operators import PATTERNS

#: Few shapes, so that neighbours often agree; ``None`` is a symbolic extent.
_SHAPES: tuple[tuple[int | None, ...], ...] = ((4, 8), (4, 8), (4, 1), (2, 4, 8), (None, 8))


def random_graph(rng: random.Random, operators: int) -> DataflowGraph:
    """Make a graph of operators of any pattern, mostly pointwise ones.

    Operators read one to three tensors (sometimes one twice), constants among them, and sometimes
    write two; some tensors are read by nobody, and some results are read, too.

    Parameters
    ----------
    rng : random.Random
        Source of randomness.
    operators : int
        Number of operators.
    """
    tensors = {
        name: Tensor(name, rng.choice(_SHAPES), "float32", None, name.startswith("w"))
        for name in ("x", "y", "w0", "w1")
    }
    made: list[Operator] = []
    for i in range(operators):
        # Recent values are likelier, so that chains form.
        known = [*tensors, *list(tensors)[-3:], *list(tensors)[-3:]]
        inputs = tuple(rng.choice(known) for _ in range(rng.choice((1, 1, 2, 2, 3))))
        outputs = tuple(f"t{i}.{k}" for k in range(rng.choice((1, 1, 1, 1, 1, 2))))
        like = tensors[inputs[0]].shape if rng.random() < 0.8 else rng.choice(_SHAPES)
        for name in outputs:
            tensors[name] = Tensor(name, like, rng.choice(("float32", "float16")))
        pattern = rng.choice(("elementwise",) * 6 + ("broadcast",) * 4 + PATTERNS)
        made.append(Operator(f"o{i}", pattern, (f"o{i}",), inputs, outputs, {}, pattern, 1, 1, 1))
    results = [t for o in made for t in o.outputs]
    outputs = tuple(t for t in results if rng.random() < 0.1) or tuple(results[-1:])
    return DataflowGraph(tuple(made), tensors, ("x", "y"), outputs)
