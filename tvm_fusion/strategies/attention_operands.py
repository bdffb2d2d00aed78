"""Operands of attention: how queries, keys and values are read through views, conversions and constant factors."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ..graph.dataflow import DTYPE_BYTES, SLICE, DataflowGraph, Operator
from .strided import StridedView

#: Operators of an operand that a kernel reads through.
_VIEWS = (
    "permute_dims",
    "broadcast_to",
    "strided_slice",
    "split",
    "reshape",
    "expand_dims",
    "squeeze",
    "flatten",
)


#: Those that are kernels of their own.
MOVED = ("permute_dims", "broadcast_to", "strided_slice")

#: Types that a kernel multiplies; a conversion from one of them to float32 loses nothing.
NARROW = ("float16", "bfloat16")

#: The operands, in order.
_NAMES = ("queries", "keys", "values")

#: A product, and which of its operands.
Place = tuple[Operator, int]

#: An operator that an operand is read through, and which of its results is read.
Step = tuple[Operator, str]


class Stopped(Exception):
    """An operator that the group cannot have."""

    def __init__(self, operator: Operator, why: str) -> None:
        super().__init__(why)
        self.operator, self.why = operator, why


class Operands:
    """Reads queries, keys and values.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    softmax : Operator
        The softmax between the products.
    places : sequence of Place
        Where queries, keys and values are multiplied.
    """

    def __init__(self, graph: DataflowGraph, softmax: Operator, places: Sequence[Place]) -> None:
        self.graph, self.softmax, self.places = graph, softmax, places
        self.found: list[tuple[str, StridedView]] = []
        #: What queries and keys are multiplied by on their way.
        self.scale = 1.0

    def read(self, members: Collection[str]) -> dict[str, None]:
        """Follow operands up through views, as far as that saves kernels.

        Parameters
        ----------
        members : collection of str
            Names of the operators that belong to the group already.

        Returns
        -------
        dict of str to None
            Names of the operators that operands are read through.
        """
        places = self.places
        chains = [self._chain(product, place) for product, place in places]
        while True:
            # Operators that several operands are read through belong to the group with all of their readers.
            inside = {*members, *(o.name for chain in chains for o, _ in chain)}
            kept = [self._closed(chain, inside) for chain in chains]
            kept = [self._saving(c, *place) for c, place in zip(kept, places, strict=True)]
            if kept == chains:
                break
            chains = kept
        for (product, place), chain in zip(places, chains, strict=True):
            tensor = chain[-1][0].inputs[0] if chain else product.inputs[place]
            self.found.append((tensor, self._through(tensor, chain)))
        factors = [scale_of(o) for chain in chains[:2] for o, _ in chain]
        self.scale = math.prod(factor for factor in factors if factor is not None)
        return {o.name: None for chain in chains for o, _ in chain}

    def _chain(self, product: Operator, place: int) -> list[Step]:
        """Operators that an operand could be read through, the nearest first."""
        tensor, chain = product.inputs[place], []
        while (operator := self.graph.producer.get(tensor)) is not None:
            known = operator.op in _VIEWS or is_scaling(operator) or self._is_widening(operator)
            if not known:
                break
            chain.append((operator, tensor))
            tensor = operator.inputs[0]
            if self._through(tensor, chain) is None:
                return chain[:-1]
        return chain

    def _is_widening(self, operator: Operator) -> bool:
        if operator.op != "astype":
            return False
        source, result = (
            self.graph.tensors[t].dtype for t in (operator.inputs[0], operator.outputs[0])
        )
        return source in NARROW and result == "float32"

    def _closed(self, chain: list[Step], inside: set[str]) -> list[Step]:
        """A chain up to the first operator of which something outside reads a result."""
        for number, (operator, _) in enumerate(chain):
            for result in operator.outputs:
                readers = self.graph.consumers[result]
                if result in self.graph.outputs or any(r.name not in inside for r in readers):
                    return chain[:number]
        return chain

    def _saving(self, chain: list[Step], product: Operator, place: int) -> list[Step]:
        """A chain up to its last kernel behind which rows are contiguous; views before that cost nothing outside."""
        for number in range(len(chain), 0, -1):
            operator = chain[number - 1][0]
            tensor = operator.inputs[0]
            view = self._through(tensor, chain[:number])
            if operator.does_work and self._is_row_wise(tensor, view, product, place):
                return chain[:number]
        return []

    def _through(self, tensor: str, chain: Sequence[Step]) -> StridedView | None:
        """How a tensor is read through operators, the last of which comes first."""
        view: StridedView | None = StridedView.of(self.graph.tensors[tensor].shape)
        for operator, result in reversed(chain):
            shape = self.graph.tensors[result].shape
            if operator.op == "permute_dims":
                axes = operator.attrs.get("axes") or range(len(shape))[::-1]
                view = view.permuted([int(a) for a in axes])
            elif operator.op == "broadcast_to":
                view = view.broadcast(shape)
            elif operator.op == "strided_slice":
                view = _sliced(view, operator, shape)
            elif operator.op == "split":
                view = self._part(view, operator, result)
            elif operator.pattern == "view":
                view = view.reshaped(shape)
            if view is None:
                return None
        return view

    def _part(self, view: StridedView, operator: Operator, result: str) -> StridedView | None:
        """One result of a split."""
        axis = int(operator.attrs.get("axis", 0)) % len(view.shape)
        number = operator.outputs.index(result)
        before = [self.graph.tensors[t].shape[axis] for t in operator.outputs[:number]]
        return view.sliced(axis, sum(before), self.graph.tensors[result].shape[axis])

    def _is_row_wise(self, tensor: str, view: StridedView, product: Operator, place: int) -> bool:
        return not self._fault(tensor, view, product, place)

    def _fault(self, tensor: str, view: StridedView, product: Operator, place: int) -> str:
        """What is wrong with an operand: its rows are contiguous, and begin at whole pieces of 16 bytes."""
        keys = place == 1 and not self.graph.depends(product.name, self.softmax.name)
        width, sequence = (-2, -1) if keys else (-1, -2)
        piece = 16 // DTYPE_BYTES.get(self.graph.tensors[tensor].dtype, 4)
        if view.shape[width] % piece:
            return f"of {view.shape[width]} places a head, which is no multiple of {piece}"
        if view.step(width) != 1:
            return "whose rows are not contiguous"
        steps = [step for dim in view.dims[:-2] for extent, step in dim if extent > 1]
        steps.append(view.offset)
        if view.shape[sequence] > 1:
            steps.append(view.step(sequence))
        if None in steps:
            return "whose rows are not at equal distances"
        if any(step % piece for step in steps):
            return f"whose rows do not begin at multiples of {piece} places"
        return ""

    def before(self) -> tuple[tuple[str, str], ...]:
        """Operators that move an operand and stay kernels of their own, each with the reason.

        To be called after `read`.
        """
        found: dict[str, str] = {}
        for name, (product, place), (tensor, _) in zip(
            _NAMES, self.places, self.found, strict=True
        ):
            source = self._source(tensor)
            if source is None or source.op not in _VIEWS:
                continue
            if sum(len(self.graph.consumers[t]) for t in source.outputs) > 1:
                why = "its result is read elsewhere, too"
            else:
                why = f"through it attention would read {name} {self._fault_through(source, product, place)}"
            found.setdefault(source.name, why)
        return tuple(found.items())

    def _fault_through(self, source: Operator, product: Operator, place: int) -> str:
        """What would be wrong with an operand that is read through an operator."""
        tensor, chain = product.inputs[place], []
        while (operator := self.graph.producer.get(tensor)) is not None:
            chain.append((operator, tensor))
            tensor = operator.inputs[0]
            if operator is source:
                break
        view = self._through(tensor, chain)
        known = view is not None and self._fault(tensor, view, product, place)
        return known or "whose rows are not at equal distances"

    def check(self, dtype: str) -> None:
        """Every operand can be read as it is, in the type of the result.

        Raises
        ------
        Stopped
            If one cannot.
        """
        for name, (product, place), (tensor, view) in zip(
            _NAMES, self.places, self.found, strict=True
        ):
            source = self._source(tensor) or product
            verb = "reads" if source is product else "gives"
            if self.graph.tensors[tensor].dtype != dtype:
                raise Stopped(source, f"it {verb} {name} of another type than the result")
            if fault := self._fault(tensor, view, product, place):
                raise Stopped(source, f"it {verb} {name} {fault}")

    def _source(self, tensor: str) -> Operator | None:
        """The operator that made a tensor, whatever views of its result there are; None for parameters."""
        operator = self.graph.producer.get(tensor)
        while operator is not None and operator.pattern == "view":
            operator = self.graph.producer.get(operator.inputs[0])
        return operator


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


def scale_of(operator: Operator) -> float | None:
    """The finite number other than 0 that an operator multiplies a tensor by; None for another operator."""
    number = factor_of(operator)
    if operator.op == "divide" and number is not None:
        number = 1 / number if number else None
    return number if number and math.isfinite(number) else None


def factor_of(operator: Operator) -> float | None:
    """The number in a multiplication by one, or a division by one; None for another operator."""
    if operator.op not in ("multiply", "divide") or len(operator.inputs) != 1:
        return None
    number = operator.attrs.get("arg1")
    if operator.op == "multiply" and number is None:
        number = operator.attrs.get("arg0")
    return number if isinstance(number, int | float) else None


def is_scaling(operator: Operator) -> bool:
    """Whether an operator multiplies a tensor by a number, or divides it by one."""
    return scale_of(operator) is not None
