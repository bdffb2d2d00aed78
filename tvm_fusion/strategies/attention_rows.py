"""Rows without any key: the selection behind a softmax that gives them zeros instead of NaN."""

from __future__ import annotations

import math

from ..graph.dataflow import DataflowGraph, Operator
from .attention_operands import Stopped
from .softmax_forms import SoftmaxForm

#: Operators that fill a tensor with one number.
_FILLED = ("full_like", "zeros_like", "full", "zeros")


class ZeroedRows:
    """Reads one selection behind a softmax.

    Its condition is one of four. A weight is NaN, which holds for all of its row or for none: ONNX's form of PyTorch's
    attention. The largest of "is not minus infinity" over a row's scores is false: PyTorch's own form. The largest of a
    mask that is added to the scores is minus infinity: ONNX's own attention. Any other condition on rows, which the
    kernel reads.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    where : Operator
        The selection.
    form : SoftmaxForm
        The softmax before it.
    """

    def __init__(self, graph: DataflowGraph, where: Operator, form: SoftmaxForm) -> None:
        self.graph, self.where = graph, where
        self.scores, self.weights = form.scores, form.last.outputs[0]
        self.members: list[str] = [where.name]

    def read(self) -> list[str]:
        """Return the names of the operators that belong to the selection.

        Raises
        ------
        Stopped
            If it is another one.
        """
        left = iter(self.where.inputs)
        attrs = self.where.attrs
        condition, one, other = (
            attrs[f"arg{i}"] if f"arg{i}" in attrs else next(left, None) for i in range(3)
        )
        swapped = not self._is_zero(one)
        zero, kept = (other, one) if swapped else (one, other)
        if not self._is_zero(zero) or not self._is(kept, self.weights):
            raise Stopped(self.where, "it selects something else than zeros and the softmax")
        if not self._holds(condition, swapped):
            raise Stopped(
                self.where, "its condition is none on whole rows, of weights, scores or inputs"
            )
        return self.members

    def _is_zero(self, value: object) -> bool:
        if not isinstance(value, str):
            return value == 0
        operator = self.graph.producer.get(value)
        if operator is None or operator.op not in _FILLED:
            return False
        if "zeros" not in operator.op and operator.attrs.get("arg1") != 0:
            return False
        self.members.append(operator.name)
        return True

    def _is(self, value: object, wanted: str) -> bool:
        """Whether two tensors are one, but for conversions of types and views."""
        return isinstance(value, str) and self._core(value) == self._core(wanted)

    def _core(self, tensor: str) -> str:
        operator = self.graph.producer.get(tensor)
        while operator is not None and (operator.op == "astype" or operator.pattern == "view"):
            tensor = operator.inputs[0]
            operator = self.graph.producer.get(tensor)
        return tensor

    def _truth(self, tensor: object) -> tuple[Operator | None, bool]:
        """What makes a condition, without conversions and negations, and whether it is negated."""
        negated = False
        operator = self.graph.producer.get(tensor) if isinstance(tensor, str) else None
        while operator is not None and operator.op in ("astype", "logical_not"):
            self.members.append(operator.name)
            negated ^= operator.op == "logical_not"
            operator = self.graph.producer.get(operator.inputs[0])
        if operator is not None:
            self.members.append(operator.name)
        return operator, negated

    def _holds(self, condition: object, swapped: bool) -> bool:
        before = list(self.members)
        if self._is_known(condition, swapped):
            return True
        self.members = before
        return isinstance(condition, str) and self._is_of_rows(condition)

    def _is_known(self, condition: object, swapped: bool) -> bool:
        operator, negated = self._truth(condition)
        if operator is None:
            return False
        if operator.op == "isnan":
            return negated is swapped and self._is(operator.inputs[0], self.weights)
        if operator.op in ("equal", "not_equal"):
            return negated is ((operator.op == "equal") is swapped) and self._is_of_mask(operator)
        scores = self.scores
        if not self._is_largest(operator) or negated is swapped:
            return False
        known, negated = self._truth(operator.inputs[0])
        if known is None or known.op not in ("equal", "not_equal"):
            return False
        infinite = known.attrs.get("arg1") == -math.inf
        return infinite and negated is (known.op == "equal") and self._is(known.inputs[0], scores)

    def _is_of_mask(self, comparison: Operator) -> bool:
        """Whether the largest of an added mask is compared with minus infinity, and nothing else reads it."""
        largest = self.graph.producer.get(self._core(comparison.inputs[0]))
        if comparison.attrs.get("arg1") != -math.inf or largest is None:
            return False
        if not self._is_largest(largest) or not self._is_added(largest.inputs[0]):
            return False
        tensor = comparison.inputs[0]
        while (operator := self.graph.producer[tensor]) is not largest:
            self.members.append(operator.name)
            tensor = operator.inputs[0]
        self.members.append(largest.name)
        own = [self.graph.by_name[name] for name in self.members if name != self.where.name]
        results = [tensor for operator in own for tensor in operator.outputs]
        readers = [reader.name for tensor in results for reader in self.graph.consumers[tensor]]
        return set(readers) <= set(self.members) and not set(results) & set(self.graph.outputs)

    def _is_added(self, mask: str) -> bool:
        """Whether scores are the sum of a mask and others."""
        todo = [self.scores]
        while todo:
            core = self._core(todo.pop())
            if core == self._core(mask):
                return True
            operator = self.graph.producer.get(core)
            if operator is not None and operator.op == "add":
                todo += operator.inputs
        return False

    def _is_of_rows(self, condition: str) -> bool:
        """Whether a condition is the same for all keys of a row."""
        shape = self.graph.tensors[condition].shape
        return bool(shape) and shape[-1] == 1

    def _is_largest(self, operator: Operator) -> bool:
        """Whether an operator is the largest of rows."""
        if operator.op != "max":
            return False
        rank = len(self.graph.tensors[operator.inputs[0]].shape)
        return [int(axis) % rank for axis in operator.attrs.get("axis") or ()] == [rank - 1]
