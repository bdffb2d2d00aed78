"""Attention in a graph: two matrix products around a softmax, with what stands between, before and behind.

From the softmax upwards to the product of queries and keys there may be any elementwise operators (scale, masks,
biases, casts) and views; downwards to the product with values views, casts, and the selection that gives rows without
any key zeros. Transposes, reshapes, repetitions of heads and constant factors of queries, keys and values belong to the
group where a kernel can read through them, and so do the transposes of the result. What stops a group is named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from ..config import FusionConfig
from ..graph.dataflow import CAUSAL, POINTWISE, DataflowGraph, Operator
from .attention_operands import NARROW, Operands, Stopped, factor_of, scale_of
from .attention_rows import ZeroedRows
from .base import Proposal, depth_of
from .strided import StridedView


@dataclasses.dataclass(frozen=True)
class AttentionGroup:
    """Attention around one softmax.

    Attributes
    ----------
    scores, softmax, mixed : str
        The product of queries and keys, the softmax, the product with values; one may be empty where ``stray`` is set.
    operators : tuple of str
        The group, in topological order.
    stray : str
        The operator that stops it; empty if none does.
    why : str
        What is wrong with the stray operator.
    heads, rows, keys, width, value_width : int
        Elements of the batch, queries and keys of each, places of a query and of a value.
    is_scored : bool
        Whether anything but constant factors and a causal mask stands between the first product and the softmax, or
        their product is not positive.
    shift : int or None
        How much further than its own position a row sees, where a constant mask hides all behind that.
    dtype : str
        Type of the result.
    """

    scores: str
    softmax: str
    mixed: str
    operators: tuple[str, ...]
    stray: str = ""
    why: str = ""
    heads: int = 1
    rows: int = 1
    keys: int = 1
    width: int = 1
    value_width: int = 1
    is_scored: bool = False
    shift: int | None = None
    dtype: str = ""


def attention_proposals(graph: DataflowGraph, config: FusionConfig) -> Iterator[Proposal]:
    """Attention around every softmax, also where something stops it: a guard says what."""
    for softmax in graph.operators:
        group = read_attention(graph, softmax)
        if group is None or not 3 <= len(group.operators) <= config.max_operators:
            continue
        depth = depth_of(graph, group.operators)
        if depth > config.max_depth or not graph.is_convex(group.operators):
            continue
        anchors = tuple(name for name in (group.scores, softmax.name, group.mixed) if name)
        options = (("form", "attention"),)
        names = group.operators
        yield Proposal("vertical", names, anchors, (names,), depth, (), options)


def attention_of(graph: DataflowGraph, proposal: Proposal) -> AttentionGroup | None:
    """What a proposal of the form ``attention`` is."""
    softmax = next((n for n in proposal.anchors if graph.by_name[n].op == "softmax"), None)
    return None if softmax is None else read_attention(graph, graph.by_name[softmax])


def read_attention(graph: DataflowGraph, softmax: Operator) -> AttentionGroup | None:
    """Read the group around a softmax; None where no two products stand around it."""
    if softmax.op != "softmax":
        return None
    key = ("attention", softmax.name)
    if key not in graph.memo:
        graph.memo[key] = _Reader(graph, softmax).read()
    return graph.memo[key]


class _Reader:
    """Reads one group."""

    def __init__(self, graph: DataflowGraph, softmax: Operator) -> None:
        self.graph, self.softmax = graph, softmax
        self.members: dict[str, None] = {softmax.name: None}
        self.is_scored = False
        self.shift: int | None = None
        self.scale = 1.0

    def read(self) -> AttentionGroup | None:
        graph, softmax = self.graph, self.softmax
        shape = graph.tensors[softmax.inputs[0]].shape
        if None in shape or len(shape) < 2:
            return None
        axis = softmax.attrs.get("axis", -1)
        if int(axis) % len(shape) != len(shape) - 1:
            return None
        scores = self._first_product()
        mixed = self._last_product()
        if scores is None or mixed is None:
            return None
        try:
            if shape[-1] == 1:
                raise Stopped(softmax, "a row has one score only")
            self._connect(scores, mixed)
            self._check_readers(mixed)
            places = ((scores, 0), (scores, 1), (mixed, 1))
            operands = Operands(graph, softmax, places)
            self.members.update(operands.read(self.members))
            dtype = self._follow(mixed)
            operands.check(dtype)
        except Stopped as stopped:
            stray = stopped.operator
            return AttentionGroup(
                scores.name, softmax.name, mixed.name, self._with_stray(scores, stray, mixed), stray.name, stopped.why
            )  # fmt: skip
        out = graph.tensors[mixed.outputs[0]].shape
        return AttentionGroup(
            scores.name, softmax.name, mixed.name, graph.sort(self.members),
            heads=math.prod(out[:-2]), rows=out[-2], keys=shape[-1],
            width=graph.tensors[scores.inputs[0]].shape[-1], value_width=out[-1],
            is_scored=self.is_scored or self.scale * operands.scale <= 0, shift=self.shift, dtype=dtype,
        )  # fmt: skip

    # -- between the products ----------------------------------------------------------------------------

    def _first_product(self) -> Operator | None:
        """The nearest product above the softmax of as many values; of any number where there is none."""
        size = self.graph.tensors[self.softmax.inputs[0]].size
        return self._product_above({size}) or self._product_above(None)

    def _product_above(self, sizes: set[int] | None) -> Operator | None:
        todo, seen = [self.softmax.inputs[0]], set()
        while todo:
            tensor = todo.pop()
            operator = self.graph.producer.get(tensor)
            if operator is None or tensor in seen:
                continue
            if sizes is not None and self.graph.tensors[tensor].size not in sizes:
                continue
            seen.add(tensor)
            if operator.op == "matmul":
                return operator
            if len(seen) > 32:
                return None
            if operator.pattern in (*POINTWISE, "view", "injective"):
                todo += reversed(operator.inputs)
        return None

    def _last_product(self) -> Operator | None:
        """The nearest product below the softmax that multiplies its values from the left."""
        todo, seen = [self.softmax.outputs[0]], set()
        while todo and len(seen) < 32:
            tensor = todo.pop(0)
            for reader in self.graph.consumers[tensor]:
                if reader.op == "matmul" and reader.inputs[0] == tensor != reader.inputs[1]:
                    return reader
                if reader.name not in seen and reader.pattern in (*POINTWISE, "view", "injective"):
                    seen.add(reader.name)
                    todo.append(reader.outputs[0])
        return None

    def _connect(self, scores: Operator, mixed: Operator) -> None:
        """Take in what stands between the products."""
        self.members.update({scores.name: None, mixed.name: None})
        for operator in self._between(scores, self.softmax):
            if operator.pattern not in (*POINTWISE, "view"):
                raise Stopped(operator, "it moves scores before the softmax")
            if operator.op == "multiply" and factor_of(operator) == 0:
                raise Stopped(operator, "of scores times 0 TVM keeps no products")
            factor = scale_of(operator)
            plain = operator.op == "astype" or operator.pattern == "view" or factor is not None
            self.scale *= 1.0 if factor is None else factor
            if CAUSAL in operator.attrs and self.shift is None:
                self.shift, plain = operator.attrs[CAUSAL], True
            self.is_scored |= not plain
            self.members[operator.name] = None
        below = self._between(self.softmax, mixed)
        for operator in below:
            if operator.op == "where":
                rows = ZeroedRows(self.graph, operator, self.softmax).read()
                self.members.update(dict.fromkeys(rows))
        for operator in below:
            known = operator.name in self.members or operator.op == "astype"
            if not known and operator.pattern != "view":
                raise Stopped(operator, "it stands between the softmax and the product with values")
            self.members[operator.name] = None

    def _between(self, first: Operator, last: Operator) -> list[Operator]:
        """Operators on paths from one to another, both excluded."""
        graph, low, high = self.graph, self.graph.index[first.name], self.graph.index[last.name]
        return [
            o
            for o in graph.operators[low + 1 : high]
            if graph.depends(o.name, first.name) and graph.depends(last.name, o.name)
        ]

    def _with_stray(self, scores: Operator, stray: Operator, mixed: Operator) -> tuple[str, ...]:
        """The products, what stands between them, and the operator in the way."""
        graph = self.graph
        inside = {scores.name, mixed.name, *(o.name for o in self._between(scores, mixed))}
        if graph.depends(mixed.name, stray.name):
            wide = {stray.name, *inside, *(o.name for o in self._between(stray, mixed))}
            if graph.is_convex(graph.sort(wide)):
                inside = wide
        return graph.sort(inside)

    def _check_readers(self, mixed: Operator) -> None:
        """No value inside is read outside."""
        for name in self.members:
            if name == mixed.name:
                continue
            for tensor in self.graph.by_name[name].outputs:
                if tensor in self.graph.outputs:
                    raise Stopped(self.graph.by_name[name], "its result is a result of the model")
                for reader in self.graph.consumers[tensor]:
                    if reader.name not in self.members:
                        raise Stopped(reader, "it reads a value that would never be written")

    # -- behind ------------------------------------------------------------------------------------------

    def _follow(self, mixed: Operator) -> str:
        """Take in transposes of the result, its rounding, and the views before them; the type that is stored."""
        graph, tensor, chain = self.graph, mixed.outputs[0], []
        first = graph.tensors[tensor]
        view, dtype = StridedView.of(first.shape), first.dtype
        while tensor not in graph.outputs and len(graph.consumers[tensor]) == 1:
            (reader,) = graph.consumers[tensor]
            shape = graph.tensors[reader.outputs[0]].shape if reader.outputs else ()
            narrowed = graph.tensors[reader.outputs[0]].dtype if reader.op == "astype" else ""
            if reader.op == "permute_dims":
                axes = reader.attrs.get("axes") or range(len(shape))[::-1]
                view = view.permuted([int(a) for a in axes])
            elif reader.pattern == "view":
                view = view.reshaped(shape)
            elif dtype != "float32" or narrowed not in NARROW:
                break
            if view is None:
                break
            chain.append(reader)
            if narrowed or (reader.op == "permute_dims" and _keeps_rows(view, first.shape[-1])):
                self.members.update({o.name: None for o in chain})
                chain, dtype = [], narrowed or dtype
            tensor = reader.outputs[0]
        return dtype


def _keeps_rows(view: StridedView, width: int) -> bool:
    """Whether rows of the product stay together: the last places run along a row."""
    size, step = view.dims[-1][-1]
    return step == 1 and size % width == 0
