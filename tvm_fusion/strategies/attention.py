"""Attention in a graph: two matrix products around a softmax, with what stands between, before and behind.

The softmax is one operator or a chain that a model writes out, perhaps with a sink (`softmax_forms`).

From the softmax upwards to the product of queries and keys there may be any elementwise operators (scale, masks,
biases, casts) and views; downwards to the product with values views, casts, and the selection that gives rows without
any key zeros. Transposes, reshapes, repetitions of heads and constant factors of queries, keys and values belong to the
group where a kernel can read through them, and so do the transposes of the result. What stops a group is named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from ..graph.dataflow import CAUSAL, POINTWISE, DataflowGraph, Operator
from .attention_operands import MOVED, NARROW, Operands, Stopped, factor_of, scale_of
from .attention_rows import ZeroedRows
from .base import Proposal, depth_of
from .softmax_forms import Sink, SoftmaxForm, read_softmax
from .strided import StridedView


@dataclasses.dataclass(frozen=True)
class AttentionGroup:
    """Attention around one softmax.

    Attributes
    ----------
    scores, softmax, mixed : str
        The product of queries and keys, the softmax (the last operator of one that is written out), the product with
        values.
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
    sink : Sink or None
        One more score of each row.
    before : tuple of (str, str)
        Transposes, slices and the like that stay kernels in front of it, and why each does.
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
    sink: Sink | None = None
    before: tuple[tuple[str, str], ...] = ()


def attention_proposals(graph: DataflowGraph) -> Iterator[Proposal]:
    """Attention around every softmax, also where something stops it: a guard says what."""
    for softmax in graph.operators:
        told: list[tuple[str, ...]] = []
        for whole in (False, True):
            group = read_attention(graph, softmax, whole)
            if group is None or len(group.operators) < 3 or group.operators in told:
                continue
            told.append(names := group.operators)
            depth = depth_of(graph, names)
            anchors = (group.scores, softmax.name, group.mixed)
            options = (("form", "attention"),)
            yield Proposal("vertical", names, anchors, (names,), depth, (), options)


def attention_of(graph: DataflowGraph, proposal: Proposal) -> AttentionGroup | None:
    """What a proposal of the form ``attention`` is."""
    anchors = [graph.by_name[name] for name in proposal.anchors]
    found = [read_attention(graph, anchor, whole) for anchor in anchors for whole in (False, True)]
    groups = [group for group in found if group is not None]
    same = (group for group in groups if group.operators == graph.sort(proposal.operators))
    return next(same, groups[0] if groups else None)


def read_attention(
    graph: DataflowGraph, softmax: Operator, whole: bool = False
) -> AttentionGroup | None:
    """Read the group around a softmax, or its last operator; None where no two products stand around one.

    With ``whole`` the elementwise operators behind it, and what they read beside it, belong to the group, too.
    """
    key = ("attention", softmax.name, whole)
    if key not in graph.memo:
        form = read_softmax(graph, softmax)
        graph.memo[key] = None if form is None else _Reader(graph, form, whole).read()
    return graph.memo[key]


class _Reader:
    """Reads one group."""

    def __init__(self, graph: DataflowGraph, form: SoftmaxForm, whole: bool) -> None:
        self.graph, self.form, self.softmax, self.whole = graph, form, form.last, whole
        self.members: dict[str, None] = dict.fromkeys(form.operators)
        self.is_scored = False
        self.shift: int | None = None
        self.scale = 1.0

    def read(self) -> AttentionGroup | None:
        graph, softmax = self.graph, self.softmax
        shape = graph.tensors[self.form.scores].shape
        if None in shape or len(shape) < 2:
            return None
        scores = self._first_product()
        mixed, place = self._last_product()
        if scores is None or mixed is None:
            return None
        try:
            if place:
                raise Stopped(mixed, "it multiplies weights from the right")
            if self.form.stray is not None:
                raise Stopped(self.form.stray, self.form.why)
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
            sink=self.form.sink, before=operands.before(),
        )  # fmt: skip

    # -- between the products ----------------------------------------------------------------------------

    def _first_product(self) -> Operator | None:
        """The nearest product above the softmax of as many values; of any number where there is none."""
        size = self.graph.tensors[self.form.scores].size
        return self._product_above({size}) or self._product_above(None)

    def _product_above(self, sizes: set[int] | None) -> Operator | None:
        todo, seen = [self.form.scores], set()
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

    def _last_product(self) -> tuple[Operator | None, int]:
        """The nearest product below the softmax that multiplies its weights, from the left (0) if there is one."""
        todo, seen = [self.softmax.outputs[0]], set()
        other = None
        while todo and len(seen) < 32:
            tensor = todo.pop(0)
            for reader in self.graph.consumers[tensor]:
                if reader.op == "matmul" and reader.inputs[0] == tensor != reader.inputs[1]:
                    return reader, 0
                if reader.op == "matmul":
                    other = other or reader
                if reader.name not in seen and reader.pattern in (*POINTWISE, "view", "injective"):
                    seen.add(reader.name)
                    todo.append(reader.outputs[0])
        return other, 1

    def _connect(self, scores: Operator, mixed: Operator) -> None:
        """Take in what stands between the products."""
        self.members.update({scores.name: None, mixed.name: None})
        own = set(self.members)
        for operator in self._between(scores, self.softmax):
            if operator.name in own:
                continue
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
                rows = ZeroedRows(self.graph, operator, self.form).read()
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
            elif dtype == "float32" and narrowed in NARROW:
                dtype = narrowed
            elif self._is_ending(reader, tensor, dtype):
                chain += beside_ending(graph, reader, tensor)
            else:
                break
            if view is None:
                break
            chain.append(reader)
            moved = reader.op == "permute_dims" and _keeps_rows(view, first.shape[-1])
            if moved or reader.pattern in POINTWISE:
                self.members.update({o.name: None for o in chain})
                chain = []
            tensor = reader.outputs[0]
        return dtype

    def _is_ending(self, reader: Operator, tensor: str, dtype: str) -> bool:
        """Whether an operator behind is elementwise, of results in their type and of what attention has no part in."""
        graph = self.graph
        result = graph.tensors[reader.outputs[0]]
        if not self.whole or reader.pattern not in POINTWISE or dtype not in NARROW:
            return False
        if (result.dtype, result.size) != (dtype, graph.tensors[tensor].size):
            return False
        makers = [graph.producer.get(t) for t in reader.inputs if t != tensor]
        return not any(m and graph.depends(m.name, self.softmax.name) for m in makers)


def beside_ending(graph: DataflowGraph, reader: Operator, tensor: str) -> list[Operator]:
    """Elementwise operators and views that nothing but an operator behind attention needs, its own operand excluded."""
    above: dict[str, Operator] = {}
    todo = [t for t in reader.inputs if t != tensor]
    while todo:
        made = graph.producer.get(todo.pop())
        if made is None or made.name in above or len(made.outputs) != 1:
            continue
        if made.pattern in (*POINTWISE, "view") or made.op in MOVED:
            above[made.name] = made
            todo += made.inputs
    found: list[Operator] = []
    inside = {reader.name}
    for name in reversed(graph.sort(above)):
        (result,) = above[name].outputs
        readers = {o.name for o in graph.consumers[result]}
        if readers <= inside and result not in graph.outputs:
            inside.add(name)
            found.append(above[name])
    # Views alone save nothing: what they are of is read as it is.
    return found if any(o.does_work for o in found) else []


def _keeps_rows(view: StridedView, width: int) -> bool:
    """Whether rows of the product stay together: the last places run along a row."""
    size, step = view.dims[-1][-1]
    return step == 1 and size % width == 0
