"""The softmax of attention as models write it: one operator, a chain of exponentials, beside a sink.

A *sink* is one more score of each row that has no value: it takes part in the sum of exponentials alone. Models
concatenate it to the scores and slice its weight off, or add its exponential to the sum of a chain that they write out
(softmax1, whose sink is 0).
"""

from __future__ import annotations

import dataclasses
import math

from ..graph.dataflow import SLICE, DataflowGraph, Operator


@dataclasses.dataclass(frozen=True)
class Sink:
    """What a row's sum of exponentials has beside those of its scores.

    Attributes
    ----------
    tensor : str
        Holds the score of the sink, one for each row or for all of a head; empty where that is a number.
    score : float
        The score where it is a number; minus infinity where ``share`` is given.
    share : float
        What is added to the sum of ``exp(score - largest)``, where the model adds a number to that; else 0.
    counts : bool
        Whether weights of a row without any key are 0, as the sink is among what the largest is of; else they are NaN.
    """

    tensor: str = ""
    score: float = -math.inf
    share: float = 0.0
    counts: bool = True


@dataclasses.dataclass(frozen=True)
class SoftmaxForm:
    """A softmax over the last axis.

    Attributes
    ----------
    scores : str
        The tensor that it is of.
    last : Operator
        What gives the weights.
    operators : tuple of str
        Its operators, ``last`` among them.
    sink : Sink or None
        One more score.
    is_operator : bool
        Whether it is one operator.
    stray : Operator or None
        What keeps it from being a softmax over the last axis, and ``why``.
    """

    scores: str
    last: Operator
    operators: tuple[str, ...]
    sink: Sink | None = None
    is_operator: bool = True
    stray: Operator | None = None
    why: str = ""


def read_softmax(graph: DataflowGraph, operator: Operator) -> SoftmaxForm | None:
    """Read the softmax that an operator is, or whose last operator it is; None for anything else."""
    if operator.op == "softmax":
        return _Reader(graph).operator(operator)
    if operator.op in ("divide", "multiply") and len(operator.inputs) == 2:
        return _Reader(graph).chain(operator)
    return None


class _Reader:
    """Reads one softmax."""

    def __init__(self, graph: DataflowGraph) -> None:
        self.graph = graph
        self.members: dict[str, None] = {}

    # -- one operator ------------------------------------------------------------------------------------

    def operator(self, softmax: Operator) -> SoftmaxForm:
        (scores,) = softmax.inputs
        alone = SoftmaxForm(scores, softmax, (softmax.name,))
        rank = len(self.graph.tensors[scores].shape)
        axis = int(softmax.attrs.get("axis", -1)) % max(rank, 1)
        if axis != rank - 1:
            why = f"its rows run along axis {axis} of {rank}, the keys along the last one"
            return dataclasses.replace(alone, stray=softmax, why=why)
        return self._beside(softmax) or alone

    def _beside(self, softmax: Operator) -> SoftmaxForm | None:
        """Scores with one more place, whose weight is sliced off."""
        graph = self.graph
        joined = self._maker(softmax.inputs[0])
        if joined is None or joined.op != "concat" or len(joined.inputs) != 2:
            return None
        shapes = [graph.tensors[t].shape for t in joined.inputs]
        rank = len(shapes[0])
        if int(joined.attrs.get("axis", 0)) % rank != rank - 1:
            return None
        places = [number for number in (0, 1) if shapes[number][-1] == 1]
        if len(places) != 1:
            return None
        (place,) = places
        cut = self._only_reader(softmax.outputs[0])
        kept = None if cut is None else self._kept(cut, shapes[1 - place][-1] or 0)
        if cut is None or kept != (1 if place == 0 else 0):
            return None
        self.members.update(dict.fromkeys((joined.name, softmax.name, cut.name)))
        sink = Sink(self._followed(joined.inputs[place]))
        return self._form(joined.inputs[1 - place], cut, sink)

    def _only_reader(self, tensor: str) -> Operator | None:
        """What alone reads a tensor, conversions passed over."""
        while len(self.graph.consumers[tensor]) == 1 and tensor not in self.graph.outputs:
            (reader,) = self.graph.consumers[tensor]
            if reader.op != "astype":
                return reader
            self.members[reader.name] = None
            tensor = reader.outputs[0]
        return None

    def _kept(self, cut: Operator, keys: int) -> int | None:
        """First of the neighbouring keys, all but one, that a slice of the last axis keeps; None for another one."""
        if cut.op != "strided_slice":
            return None
        axes, begins, _, *steps = cut.attrs.get(SLICE, ((), (), ()))
        shape = self.graph.tensors[cut.outputs[0]].shape
        if len(axes) != 1 or axes[0] % len(shape) != len(shape) - 1 or shape[-1] != keys:
            return None
        if any(step != 1 for numbers in steps for step in numbers):
            return None
        begin = begins[0] + keys + 1 if begins[0] < 0 else begins[0]
        return begin if begin in (0, 1) else None

    def _followed(self, tensor: str) -> str:
        """The tensor that a sink is a repetition of; operators that make it belong to the group."""
        while (operator := self.graph.producer.get(tensor)) is not None:
            plain = operator.op in ("astype", "broadcast_to") or operator.pattern == "view"
            if not plain or len(self.graph.consumers[tensor]) > 1 or tensor in self.graph.outputs:
                break
            source = self.graph.tensors[operator.inputs[0]].shape
            aligned = len(source) == len(self.graph.tensors[tensor].shape) and source[-1] == 1
            if not aligned:
                break
            self.members[operator.name] = None
            tensor = operator.inputs[0]
        return tensor

    # -- a chain that is written out ---------------------------------------------------------------------

    def chain(self, last: Operator) -> SoftmaxForm | None:
        one, other = last.inputs
        pairs = [(one, other)]
        if last.op == "multiply":
            pairs = [(a, t) for a, b in ((one, other), (other, one)) if (t := self._inverted(b))]
        for power, total in pairs:
            exp = self._maker(power)
            if exp is None or exp.op != "exp":
                continue
            added = self._maker(total)
            sums = None if added is None else self._sum_in(added, exp)
            if added is not None and sums is not None:
                return self._chain(last, exp, added, sums)
        self.members.clear()
        return None

    def _inverted(self, tensor: str) -> str:
        """``x`` of 1 / x; empty for anything else."""
        inverse = self.graph.producer.get(tensor)
        if inverse is None or inverse.op != "divide" or inverse.attrs.get("arg0") != 1:
            return ""
        self.members[inverse.name] = None
        return inverse.inputs[0]

    def _sum_in(self, added: Operator, exp: Operator) -> Operator | None:
        """The sum of exponentials that a total is, or has as a term."""
        makers = [added] if added.op == "sum" else []
        if added.op == "add":
            makers = [m for t in added.inputs if (m := self._maker(t)) is not None]
        for maker in makers:
            if maker.op == "sum" and self._maker(maker.inputs[0]) is exp:
                return maker
        return None

    def _chain(self, last: Operator, exp: Operator, added: Operator, sums: Operator) -> SoftmaxForm:
        members = dict.fromkeys((last.name, exp.name, added.name, sums.name))
        self.members.update(members)
        scores, shift = self._shifted(exp)
        if not self._is_over_keys(sums):
            return self._form(
                scores, last, None, sums, "it adds up along another axis than the keys'"
            )
        if added is sums:
            return self._form(scores, last, None)
        sink = self._sink(added, sums, shift)
        if sink is None:
            why = "it adds something else than one exponential to those of the scores"
            return self._form(scores, last, None, added, why)
        return self._form(scores, last, sink)

    def _shifted(self, exp: Operator) -> tuple[str, str]:
        """The scores whose exponentials are taken, and what is subtracted from them for that (empty: nothing)."""
        difference = self._maker(exp.inputs[0])
        if difference is None or difference.op != "subtract" or len(difference.inputs) != 2:
            return exp.inputs[0], ""
        scores, shift = difference.inputs
        largest = self._largest(shift, scores)
        if largest is None:
            return exp.inputs[0], ""
        self.members.update(dict.fromkeys((difference.name, *largest)))
        return scores, shift

    def _largest(self, shift: str, scores: str) -> list[str] | None:
        """Operators that find a row's largest score, and compare it with a sink or a number; None for others."""
        bound = self._maker(shift)
        if bound is not None and bound.op == "maximum":
            found = [self._maker(t) for t in bound.inputs]
            makers = [m for m in found if m is not None and m.op == "max"]
        else:
            makers = [bound] if bound is not None and bound.op == "max" else []
        for maker in makers:
            same = self._core(maker.inputs[0]) == self._core(scores)
            if same and self._is_over_keys(maker):
                return [bound.name, maker.name]
        return None

    def _is_over_keys(self, reduction: Operator) -> bool:
        rank = len(self.graph.tensors[reduction.inputs[0]].shape)
        axes = [int(axis) % rank for axis in reduction.attrs.get("axis") or ()]
        return axes == [rank - 1]

    def _sink(self, added: Operator, sums: Operator, shift: str) -> Sink | None:
        """What is added to the sum: the exponential of a score less the shift, or a number."""
        others = [t for t in added.inputs if self._maker(t) is not sums]
        if not others:
            number = added.attrs.get("arg1", added.attrs.get("arg0"))
            if not isinstance(number, int | float) or not 0 < number < math.inf:
                return None
            if not shift:
                return Sink(score=math.log(number))
            is_largest = (bound := self._maker(shift)) is not None and bound.op == "max"
            return Sink(share=float(number), counts=False) if is_largest else None
        power = self._maker(others[0])
        if power is None or power.op != "exp":
            return None
        less = self._maker(power.inputs[0]) if shift else None
        own = [power.name]
        if not shift:
            tensor, score = power.inputs[0], -math.inf
        elif less is not None and less.op == "negative" and self._is(less.inputs[0], shift):
            tensor, score = "", 0.0
        elif less is not None and less.op == "subtract" and self._is(less.inputs[-1], shift):
            number = less.attrs.get("arg0")
            tensor = less.inputs[0] if len(less.inputs) == 2 else ""
            score = -math.inf if tensor else float(number)
        else:
            return None
        if tensor and (self.graph.tensors[tensor].shape or (0,))[-1] != 1:
            return None
        self.members.update(dict.fromkeys(own if less is None else [*own, less.name]))
        bound = self._maker(shift) if shift else None
        counts = bound is None or bound.op == "maximum"
        return Sink(self._followed(tensor) if tensor else "", score, counts=counts)

    # -- tensors -----------------------------------------------------------------------------------------

    def _form(
        self,
        scores: str,
        last: Operator,
        sink: Sink | None,
        stray: Operator | None = None,
        why: str = "",
    ) -> SoftmaxForm:
        names = self.graph.sort(self._with_passed(last))
        return SoftmaxForm(scores, last, names, sink, False, stray, why)

    def _with_passed(self, last: Operator) -> list[str]:
        """The members, and conversions and views between two of them."""
        graph = self.graph
        found = list(self.members)
        for name in self.members:
            for tensor in graph.by_name[name].inputs:
                passed, operator = [], graph.producer.get(tensor)
                while (
                    operator is not None
                    and operator.name not in self.members
                    and _is_passed(operator)
                ):
                    passed.append(operator.name)
                    operator = graph.producer.get(operator.inputs[0])
                if operator is not None and operator.name in self.members:
                    found += passed
        return [name for name in found if name == last.name or graph.depends(last.name, name)]

    def _is(self, one: str, other: str) -> bool:
        return self._core(one) == self._core(other)

    def _core(self, tensor: str) -> str:
        """A tensor before conversions of types and views."""
        operator = self.graph.producer.get(tensor)
        while operator is not None and _is_passed(operator):
            tensor = operator.inputs[0]
            operator = self.graph.producer.get(tensor)
        return tensor

    def _maker(self, tensor: str) -> Operator | None:
        """What makes a tensor, conversions of types and views passed over."""
        return self.graph.producer.get(self._core(tensor))


def _is_passed(operator: Operator) -> bool:
    return operator.op == "astype" or operator.pattern == "view"
