"""Write a split as slices where each of them becomes part of the kernel that reads it."""

from __future__ import annotations

import itertools

from ...compat import ir, relax, tvm
from .elementwise import BINARY, UNARY
from .rewrite import BindingRewriter, bindings_of, op_name, static_shape, variables

#: Operators whose kernels may read a slice as well as a whole tensor.
_READERS = frozenset((*BINARY, *UNARY, "concat", "nn.gelu", "nn.gelu_tanh", "nn.silu", "where"))


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.SliceSplits")
class SliceSplits:
    """split(x) -> a slice for each part, if each is read once, by an elementwise operator or a concatenation.

    An operator with several results stays a kernel of its own; a slice is an index in its reader's. The halves that a
    rotary embedding swaps, and those of a gated linear unit, are split like this. Parts that anything else reads would
    have to be copied one by one, so such a split stays.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter(mod["main"]).transform(mod)


class _Rewriter(BindingRewriter):
    def __init__(self, func: relax.Function) -> None:
        super().__init__()
        self._sliced = _sliceable(func)  # names of splits
        self._splits: dict[relax.Var, ir.Call] = {}

    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if op_name(value) == "split" and self.visiting in self._sliced:
            whole = self.emit(name, value)  # dead as soon as its parts are slices
            self._splits[whole] = value
            return whole
        split = self._splits.get(getattr(value, "tuple_value", None))
        if split is None:
            return value
        axis = int(split.attrs.axis) % len(static_shape(split.args[0]))
        widths = [int(field.shape.values[axis]) for field in self.typed(split).ty.fields]
        begin, end = list(itertools.pairwise((0, *itertools.accumulate(widths))))[value.index]
        return relax.op.strided_slice(split.args[0], [axis], [begin], [end])


def _sliceable(func: relax.Function) -> set[relax.Var]:
    """Results of splits all of whose parts are read once, by an operator of ``_READERS``."""
    readers: dict[relax.Var, list[ir.Expr]] = {}
    bindings = bindings_of(func)
    for binding in bindings:
        for var in variables(binding.value):
            readers.setdefault(var, []).append(binding)
    returned = set(variables(func.body.body))

    def is_sliced(var: relax.Var) -> bool:
        found = readers.get(var, [])
        return len(found) == 1 and op_name(found[0].value) in _READERS and var not in returned

    out = set()
    for binding in bindings:
        if op_name(binding.value) != "split" or static_shape(binding.value.args[0]) is None:
            continue
        parts = readers.get(binding.var, [])
        whole = all(isinstance(p.value, relax.TupleGetItem) for p in parts)
        if whole and binding.var not in returned and all(is_sliced(p.var) for p in parts):
            out.add(binding.var)
    return out
