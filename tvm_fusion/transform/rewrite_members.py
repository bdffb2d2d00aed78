"""The body of a group while it is rewritten: its parts, its operators' calls, the values emitted so far."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..compat import BlockBuilder, Constant, relax
from ..frontend.rename import Substitute
from ..graph.relax import RelaxGraph, from_function
from ..strategies.branches import Branch
from ..strategies.decompose import Decomposition, decompose
from .legalize import NARROW_TYPES


class GroupBody:
    """A group's body, its decomposition, and the values emitted so far.

    Parameters
    ----------
    func : relax.Function
        The group with its constant operands in the body.
    options : mapping of str to str
        The group's options.
    builder : BlockBuilder
        Where the new body is emitted, with the parameters of ``func``.
    is_strict : bool
        Whether every operator's result is rounded to its type, inside the kernel too.

    Attributes
    ----------
    graph : DataflowGraph
        The graph of the body.
    shape : Decomposition
        Its anchors, branches, join and tail.
    calls : dict of str to relax.Call
        Call of each operator.
    var_of : dict of str to relax.Var
        Variable of the old body that each operator binds.
    values : dict of relax.Var to relax.Expr
        What stands in the new body for a variable of the old one.
    results : list of relax.Var
        Variables of the old body that it returns.
    """

    def __init__(
        self,
        func: relax.Function,
        options: Mapping[str, str],
        builder: BlockBuilder,
        is_strict: bool = False,
    ) -> None:
        found: RelaxGraph = from_function(func)
        self.builder = builder
        self.options = dict(options)
        self.is_strict = is_strict
        self.graph = found.graph
        names = [o.name for o in self.graph.operators]
        self.shape: Decomposition = decompose(self.graph, names, self.options)
        self.calls = {name: b[0].value for name, b in found.bindings.items()}
        self.var_of = {name: b[0].var for name, b in found.bindings.items()}
        self.tensor_of = found.tensors
        self._items = {name: b[1:] for name, b in found.bindings.items()}
        self.values: dict[Any, Any] = {p: p for p in func.params}
        self._widened: dict[Any, Any] = {}
        returned = func.body.body
        last = {b.var: b.value for b in func.body.blocks[0].bindings}.get(returned)
        self.results = list(last.fields) if isinstance(last, relax.Tuple) else [returned]

    @property
    def widens(self) -> bool:
        """Whether the group computes something in float16 or bfloat16 that may keep float32's precision."""
        if self.is_strict:
            return False
        made = (t for o in self.graph.operators for t in o.outputs)
        return any(self.graph.tensors[t].dtype in NARROW_TYPES for t in made)

    def value_of(self, tensor: str) -> Any:
        """What stands in the new body for a tensor of the graph."""
        return next(v for var, v in self.values.items() if self.tensor_of.get(var) == tensor)

    def read(self, operand: Any) -> Any:
        """What stands in the new body for an operand of a call; a stored tensor stands for itself."""
        return operand if isinstance(operand, Constant) else self.values[operand]

    def depends(self, name: str, others: Sequence[str]) -> bool:
        """Whether an operator is one of ``others`` or reads, directly or not, a result of one."""
        return any(name == other or self.graph.depends(name, other) for other in others)

    def bind(self, name: str, value: Any) -> None:
        """Let a value stand for the result of an operator."""
        self.values[self.var_of[name]] = value

    def replay(self, names: Sequence[str], needed: Collection[str] | None = None) -> None:
        """Emit operators as they are, on the values emitted so far.

        Parameters
        ----------
        names : sequence of str
            The operators.
        needed : collection of str, optional
            Tensors that something will read; parts of a split that are not among them are left
            out. By default what the group's operators read, and its results.
        """
        for name in self.graph.sort(names):
            self._emit(name, Substitute(self.values).visit_expr(self.calls[name]), needed)

    def replay_wide(self, names: Sequence[str]) -> None:
        """Emit operators in float32 where they are narrow: sums of narrow types lose accuracy."""
        for name in self.graph.sort(names):
            call = self.calls[name]
            args = [self.wide(arg) for arg in call.args]
            if self._items[name]:
                self._emit(name, relax.Call(call.op, args, call.attrs), None)
            else:
                self.bind(name, self.emit_wide(call, args))

    def _emit(self, name: str, call: relax.Call, needed: Collection[str] | None) -> None:
        hint = self.var_of[name].name
        if not self._items[name]:
            self.bind(name, self.builder.emit(call, name_hint=hint))
        elif call.op.name == "relax.split":
            # One kernel per part: TVM's split would also compute the parts that nothing reads.
            self._emit_slices(name, call.args[0], needed)
        else:
            packed = self.builder.emit(call, name_hint=hint)
            self.bind(name, packed)
            for item in self._items[name]:
                taken = relax.TupleGetItem(packed, item.value.index)
                self.values[item.var] = self.builder.emit(taken, name_hint=item.var.name)

    def _emit_slices(self, name: str, source: Any, needed: Collection[str] | None) -> None:
        if needed is None:
            needed = {*self.graph.outputs, *(t for o in self.graph.operators for t in o.inputs)}
        axis = int(self.calls[name].attrs.axis) % source.ty.ndim
        sizes = [int(field.shape[axis]) for field in self.var_of[name].ty.fields]
        ends = list(accumulate(sizes))
        for item in self._items[name]:
            if self.tensor_of[item.var] in needed:
                k = item.value.index
                part = slice_of(source, axis, ends[k] - sizes[k], ends[k])
                self.values[item.var] = self.builder.emit(part, name_hint=item.var.name)

    def emit_wide(self, call: relax.Call, args: Sequence[Any]) -> Any:
        """Emit an operator on operands that are wide already; a rounding in between is left out."""
        if call.op.name == "relax.astype":
            source, target = str(args[0].ty.dtype), str(call.attrs.dtype)
            if source == "float32" and target in (*NARROW_TYPES, "float32"):
                return args[0]
        return self.builder.emit(relax.Call(call.op, list(args), call.attrs))

    def wide(self, arg: Any) -> Any:
        """The float32 form of an operand of the old body."""
        if isinstance(arg, relax.Var):
            return self.widen(self.values[arg])
        if isinstance(arg, relax.Tuple):
            return relax.Tuple([self.wide(field) for field in arg.fields])
        if isinstance(arg, Constant) and str(arg.ty.dtype) in NARROW_TYPES:
            return make_constant(as_float(arg), "float32")
        return arg

    def widen(self, value: Any) -> Any:
        """The float32 form of a value of the new body, cast once."""
        if not isinstance(value.ty, relax.TensorType) or str(value.ty.dtype) not in NARROW_TYPES:
            return value
        if value not in self._widened:
            self._widened[value] = self.builder.emit(relax.op.astype(value, "float32"))
        return self._widened[value]

    def rounded(self, value: Any, like: Any) -> Any:
        """A value in the element type of a variable of the old body."""
        if not isinstance(like.ty, relax.TensorType) or value.ty.dtype == like.ty.dtype:
            return value
        return self.builder.emit(relax.op.astype(value, str(like.ty.dtype)))

    def steps(self, branch: Branch) -> list[str]:
        """Operators of a branch that depend on its head, without the head."""
        return [
            n for n in branch.operators if n != branch.head and self.graph.depends(n, branch.head)
        ]


def slice_of(source: Any, axis: int, begin: int, end: int) -> relax.Call:
    """Take a range of a tensor along one axis."""
    return relax.op.strided_slice(source, axes=[axis], begin=[begin], end=[end])


def as_float(constant: Constant) -> np.ndarray:
    """Read a constant as float64 (bfloat16 included), so that folding rounds once."""
    return constant.value.numpy().astype("float64")


def make_constant(array: np.ndarray, dtype: str) -> Constant:
    """Round a float64 array to a constant of an element type."""
    if dtype == "bfloat16":
        import ml_dtypes  # numpy has no bfloat16; TVM depends on this package for it

        return relax.const(array.astype(ml_dtypes.bfloat16), dtype)
    with np.errstate(over="ignore"):  # beyond the type's range is infinite, as in the model
        return relax.const(array.astype(dtype), dtype)
