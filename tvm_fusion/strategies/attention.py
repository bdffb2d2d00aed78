"""Attention in a graph: two matrix products around a softmax, with what stands between, before and behind.

From the softmax upwards to the product of queries and keys there may be any elementwise operators (scale, masks,
biases, casts) and views; downwards to the product with values views, casts, and the selection that gives rows without
any key zeros. Transposes, reshapes, repetitions of heads and constant factors of queries, keys and values belong to the
group where a kernel can read through them, and so do the transposes of the result. What stops a group is named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from ..config import FusionConfig
from ..graph.dataflow import DTYPE_BYTES, POINTWISE, SLICE, DataflowGraph, Operator
from .base import Proposal, depth_of
from .strided import StridedView

#: Operators that say which rows have no key at all.
_MASKED_ROWS = (
    "equal",
    "not_equal",
    "logical_not",
    "astype",
    "max",
    "full_like",
    "zeros_like",
    "isinf",
)

#: Operators of an operand that a kernel reads through.
_VIEWS = (
    "permute_dims",
    "broadcast_to",
    "strided_slice",
    "reshape",
    "expand_dims",
    "squeeze",
    "flatten",
)


#: A product, and which of its operands.
Place = tuple[Operator, int]


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
        Whether anything but constant factors stands between the first product and the softmax.
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


class _Stopped(Exception):
    """An operator that the group cannot have."""

    def __init__(self, operator: Operator, why: str) -> None:
        super().__init__(why)
        self.operator, self.why = operator, why


class _Reader:
    """Reads one group."""

    def __init__(self, graph: DataflowGraph, softmax: Operator) -> None:
        self.graph, self.softmax = graph, softmax
        self.members: dict[str, None] = {softmax.name: None}
        self.is_scored = False

    def read(self) -> AttentionGroup | None:
        graph, softmax = self.graph, self.softmax
        shape = graph.tensors[softmax.inputs[0]].shape
        if None in shape or len(shape) < 2 or shape[-1] == 1:
            return None
        axis = softmax.attrs.get("axis", -1)
        if int(axis) % len(shape) != len(shape) - 1:
            return None
        scores = self._first_product()
        mixed = self._last_product()
        if scores is None or mixed is None:
            return None
        try:
            self._connect(scores, mixed)
            self._check_readers(mixed)
            places = ((scores, 0), (scores, 1), (mixed, 1))
            self._check_operands(mixed, places, self._operands(places))
        except _Stopped as stopped:
            inside = (o.name for o in self._between(scores, mixed))
            names = graph.sort((scores.name, *inside, mixed.name))
            return AttentionGroup(
                scores.name, softmax.name, mixed.name, names, stopped.operator.name, stopped.why
            )
        self._follow(mixed)
        out = graph.tensors[mixed.outputs[0]].shape
        return AttentionGroup(
            scores.name, softmax.name, mixed.name, graph.sort(self.members),
            heads=math.prod(out[:-2]), rows=out[-2], keys=shape[-1],
            width=graph.tensors[scores.inputs[0]].shape[-1], value_width=out[-1],
            is_scored=self.is_scored,
        )  # fmt: skip

    # -- between the products ----------------------------------------------------------------------------

    def _first_product(self) -> Operator | None:
        """The nearest product above the softmax of as many values."""
        size = self.graph.tensors[self.softmax.inputs[0]].size
        todo, seen = [self.softmax.inputs[0]], set()
        while todo:
            tensor = todo.pop()
            operator = self.graph.producer.get(tensor)
            if operator is None or tensor in seen or self.graph.tensors[tensor].size != size:
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
                raise _Stopped(operator, "it moves scores before the softmax")
            plain = operator.op == "astype" or operator.pattern == "view" or is_scaling(operator)
            self.is_scored |= not plain
            self.members[operator.name] = None
        below = self._between(self.softmax, mixed)
        for operator in below:
            if operator.op == "where":
                self.members[operator.name] = None
                self._masked_rows(operator)
        for operator in below:
            known = operator.name in self.members or operator.op == "astype"
            if not known and operator.pattern != "view":
                raise _Stopped(
                    operator, "it stands between the softmax and the product with values"
                )
            self.members[operator.name] = None

    def _between(self, first: Operator, last: Operator) -> list[Operator]:
        """Operators on paths from one to another, both excluded."""
        graph, low, high = self.graph, self.graph.index[first.name], self.graph.index[last.name]
        return [
            o
            for o in graph.operators[low + 1 : high]
            if graph.depends(o.name, first.name) and graph.depends(last.name, o.name)
        ]

    def _masked_rows(self, where: Operator) -> None:
        """Take in what says which rows have no key."""
        todo = [self.graph.producer.get(t) for t in where.inputs]
        while todo:
            operator = todo.pop()
            if operator is None or operator.name in self.members or operator.op not in _MASKED_ROWS:
                continue
            self.members[operator.name] = None
            todo += [self.graph.producer.get(t) for t in operator.inputs]

    def _check_readers(self, mixed: Operator) -> None:
        """No value inside is read outside."""
        for name in self.members:
            if name == mixed.name:
                continue
            for tensor in self.graph.by_name[name].outputs:
                if tensor in self.graph.outputs:
                    raise _Stopped(self.graph.by_name[name], "its result is a result of the model")
                for reader in self.graph.consumers[tensor]:
                    if reader.name not in self.members:
                        raise _Stopped(reader, "it reads a value that would never be written")

    # -- operands ----------------------------------------------------------------------------------------

    def _operands(self, places: Sequence[Place]) -> list[tuple[str, StridedView]]:
        """Follow operands up through views, as far as that saves kernels; their tensors, and how each is read."""
        chains = [self._chain(product, place) for product, place in places]
        while True:
            # Operators that several operands are read through belong to the group with all of their readers.
            inside = {*self.members, *(o.name for chain in chains for o in chain)}
            kept = [self._closed(chain, inside) for chain in chains]
            kept = [self._saving(c, *place) for c, place in zip(kept, places, strict=True)]
            if kept == chains:
                break
            chains = kept
        self.members.update({o.name: None for chain in chains for o in chain})
        found = []
        for (product, place), chain in zip(places, chains, strict=True):
            tensor = chain[-1].inputs[0] if chain else product.inputs[place]
            found.append((tensor, self._through(tensor, chain)))
        return found

    def _chain(self, product: Operator, place: int) -> list[Operator]:
        """Operators that an operand could be read through, the nearest first."""
        tensor, chain = product.inputs[place], []
        while (operator := self.graph.producer.get(tensor)) is not None:
            if operator.op not in _VIEWS and not is_scaling(operator):
                break
            chain.append(operator)
            tensor = operator.inputs[0]
            if self._through(tensor, chain) is None:
                return chain[:-1]
        return chain

    def _closed(self, chain: list[Operator], inside: set[str]) -> list[Operator]:
        """A chain up to the first operator that something outside reads."""
        for number, operator in enumerate(chain):
            result = operator.outputs[0]
            readers = self.graph.consumers[result]
            if result in self.graph.outputs or any(r.name not in inside for r in readers):
                return chain[:number]
        return chain

    def _saving(self, chain: list[Operator], product: Operator, place: int) -> list[Operator]:
        """A chain up to its last kernel behind which rows are contiguous; views before that cost nothing outside."""
        for number in range(len(chain), 0, -1):
            view = self._through(chain[number - 1].inputs[0], chain[:number])
            if chain[number - 1].does_work and self._is_row_wise(view, product, place):
                return chain[:number]
        return []

    def _through(self, tensor: str, chain: Sequence[Operator]) -> StridedView | None:
        """How a tensor is read through operators, the last of which comes first."""
        view: StridedView | None = StridedView.of(self.graph.tensors[tensor].shape)
        for operator in reversed(chain):
            shape = self.graph.tensors[operator.outputs[0]].shape
            if operator.op == "permute_dims":
                axes = operator.attrs.get("axes") or range(len(shape))[::-1]
                view = view.permuted([int(a) for a in axes])
            elif operator.op == "broadcast_to":
                view = view.broadcast(shape)
            elif operator.op == "strided_slice":
                view = _sliced(view, operator, shape)
            elif operator.pattern == "view":
                view = view.reshaped(shape)
            if view is None:
                return None
        return view

    def _is_row_wise(self, view: StridedView, product: Operator, place: int) -> bool:
        """Whether rows of an operand are contiguous, and begin at whole pieces of 16 bytes."""
        keys = place == 1 and not self.graph.depends(product.name, self.softmax.name)
        width, sequence = (-2, -1) if keys else (-1, -2)
        piece = 16 // DTYPE_BYTES.get(self.graph.tensors[product.outputs[0]].dtype, 4)
        if view.step(width) != 1 or view.shape[width] % piece:
            return False
        steps = [step for dim in view.dims[:-2] for extent, step in dim if extent > 1]
        steps.append(view.offset)
        if view.shape[sequence] > 1:
            steps.append(view.step(sequence))
        return not any(step is None or step % piece for step in steps)

    def _check_operands(
        self, mixed: Operator, places: Sequence[Place], operands: Sequence[tuple[str, StridedView]]
    ) -> None:
        """Every operand can be read as it is, in one type."""
        graph, names = self.graph, ("queries", "keys", "values")
        dtype = graph.tensors[mixed.outputs[0]].dtype
        for name, (product, place), (tensor, view) in zip(names, places, operands, strict=True):
            source = graph.producer.get(tensor) or product
            if graph.tensors[tensor].dtype != dtype:
                raise _Stopped(source, f"it gives {name} of another type than the result")
            if not self._is_row_wise(view, product, place):
                raise _Stopped(source, f"it gives {name} whose rows are not contiguous")

    # -- behind ------------------------------------------------------------------------------------------

    def _follow(self, mixed: Operator) -> None:
        """Take in transposes of the result, and the views before them."""
        graph, tensor, chain = self.graph, mixed.outputs[0], []
        view = StridedView.of(graph.tensors[tensor].shape)
        while tensor not in graph.outputs and len(graph.consumers[tensor]) == 1:
            (reader,) = graph.consumers[tensor]
            shape = graph.tensors[reader.outputs[0]].shape if reader.outputs else ()
            if reader.op == "permute_dims":
                axes = reader.attrs.get("axes") or range(len(shape))[::-1]
                view = view.permuted([int(a) for a in axes])
                chain.append(reader)
                if _keeps_rows(view, graph.tensors[mixed.outputs[0]].shape[-1]):
                    self.members.update({o.name: None for o in chain})
                    chain = []
            elif reader.pattern == "view":
                view = view.reshaped(shape)
                chain.append(reader)
            else:
                return
            if view is None:
                return
            tensor = reader.outputs[0]


def _sliced(
    view: StridedView, operator: Operator, shape: Sequence[int | None]
) -> StridedView | None:
    """What a slice takes of a view; None where it leaves places out, or its place is unknown."""
    axes, begins, _, *steps = operator.attrs.get(SLICE, ((), (), ()))
    if not axes or any(step != 1 for numbers in steps for step in numbers):
        return None
    for axis, begin in zip(axes, begins, strict=True):
        axis %= len(shape)
        if view is None:
            return None
        whole = view.shape[axis]
        first = max(0, begin + whole) if begin < 0 else min(begin, whole)
        view = view.sliced(axis, first, shape[axis])
    return view


def is_scaling(operator: Operator) -> bool:
    """Whether an operator multiplies a tensor by a number, or divides it by one."""
    if operator.op not in ("multiply", "divide") or len(operator.inputs) != 1:
        return False
    return "arg1" in operator.attrs or (operator.op == "multiply" and "arg0" in operator.attrs)


def _keeps_rows(view: StridedView, width: int) -> bool:
    """Whether rows of the product stay together: the last places run along a row."""
    size, step = view.dims[-1][-1]
    return step == 1 and size % width == 0
