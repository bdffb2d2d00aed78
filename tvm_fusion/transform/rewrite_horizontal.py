"""Horizontal groups → bodies that compute what the members share once.

``collapsed`` becomes one convolution with the added weights, ``merged`` one with concatenated or
stacked weights; a ``partitioned`` group's concat becomes one store per member. The other forms keep
their bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..compat import BlockBuilder, Constant, ir, relax, tvm, update_type, with_functions
from ..errors import LoweringError
from ..graph.relax import RelaxGraph, from_function
from ..strategies.branches import Branch
from ..strategies.decompose import Decomposition, decompose
from ..strategies.horizontal import same_structure
from .legalize import NARROW_TYPES
from .legalize_horizontal import emit_concat_stores, emit_split_store, merged_conv2d, select_branch
from .rename import LiftConstants, Substitute


def rewrite_horizontal(
    mod: tvm.IRModule, gv: ir.GlobalVar, call: relax.Call
) -> tuple[tvm.IRModule, relax.Call]:
    """Rewrite one horizontal group.

    Parameters
    ----------
    mod : tvm.IRModule
        Annotated module; it is left untouched.
    gv : GlobalVar
        The group.
    call : relax.Call
        The call of the group; its constant operands are the weights.

    Returns
    -------
    mod : tvm.IRModule
        The module with the new function under the same name (and the kernels' definitions that it
        calls).
    call : relax.Call
        The new call.
    """
    func = mod[gv]
    form = str(dict(func.attrs["tvm_fusion.options"]).get("form", ""))
    emit = _FORMS.get(form)
    if emit is None:
        return mod, call
    bound = _bind_constants(func, call.args)
    group = _Group(bound)
    builder = BlockBuilder(mod)
    name = f"{gv.name_hint}_rewritten"
    with builder.function(name, list(bound.params), private=True):
        with builder.dataflow():
            group.builder = builder
            emit(group)
            results = [group.values[v] for v in group.results]
            out = builder.emit_output(results[0] if len(results) == 1 else relax.Tuple(results))
        builder.emit_func_output(out)
    result = builder.get()
    made = result.get_global_var(name)
    lifted, constants = _lift(result[made], func.attrs)
    inputs = [a for a in call.args if not isinstance(a, Constant)]
    kept = {
        g: f
        for g, f in result.functions.items()
        if not g.same_as(made) and g.name_hint != gv.name_hint
    }
    out_gv = ir.GlobalVar(gv.name_hint)
    update_type(out_gv, lifted.ty)
    new = with_functions(mod, {**kept, out_gv: lifted})
    return new, relax.Call(out_gv, [*inputs, *constants])


def _bind_constants(func: relax.Function, args: Sequence[Any]) -> relax.Function:
    """Put the constant operands of a call back into the function's body."""
    names = {p: a for p, a in zip(func.params, args, strict=True) if isinstance(a, Constant)}
    rename = Substitute(names)
    bindings = []
    for binding in func.body.blocks[0].bindings:
        bindings.append(relax.VarBinding(binding.var, rename.visit_expr(binding.value)))
    params = [p for p in func.params if p not in names]
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], func.body.body)
    return relax.Function(params, body, func.ret_ty, func.is_pure)


def _lift(func: relax.Function, attrs: ir.DictAttrs) -> tuple[relax.Function, list[Constant]]:
    """Turn tensor constants into parameters and put the group's attributes on."""
    rename = LiftConstants({})
    bindings = [
        relax.VarBinding(b.var, rename.visit_expr(b.value)) for b in func.body.blocks[0].bindings
    ]
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], func.body.body)
    params = [*func.params, *(p for _, p in rename.lifted)]
    return relax.Function(params, body, func.ret_ty, attrs=attrs), [c for c, _ in rename.lifted]


class _Group:
    """A group's body, its decomposition, and the values emitted so far."""

    builder: BlockBuilder

    def __init__(self, func: relax.Function) -> None:
        self.found: RelaxGraph = from_function(func)
        self.graph = self.found.graph
        self.shape: Decomposition = decompose(self.graph, [o.name for o in self.graph.operators])
        self.calls = {name: b[0].value for name, b in self.found.bindings.items()}
        self.var_of = {name: b[0].var for name, b in self.found.bindings.items()}
        self.values: dict[Any, Any] = {p: p for p in func.params}
        returned = func.body.body
        last = {b.var: b.value for b in func.body.blocks[0].bindings}.get(returned)
        self.results = list(last.fields) if isinstance(last, relax.Tuple) else [returned]

    def replay(self, names: Sequence[str]) -> None:
        """Emit operators as they are, on the values emitted so far."""
        for name in self.graph.sort(names):
            call = Substitute(self.values).visit_expr(self.calls[name])
            self.values[self.var_of[name]] = self.builder.emit(
                call, name_hint=self.var_of[name].name
            )

    def weight(self, branch: Branch) -> np.ndarray:
        """The constant weight of a branch's anchor."""
        return as_float(self.calls[branch.head].args[1])

    def steps(self, branch: Branch) -> list[str]:
        """Operators of a branch after its anchor."""
        return [name for name in branch.operators if name != branch.head]


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


def _emit_collapsed(group: _Group) -> None:
    """Σᵢ (x ∗ Wᵢ + bᵢ) = x ∗ ΣWᵢ + Σbᵢ, with the sums taken in float64 ahead of time."""
    branches = group.shape.branches
    head = group.calls[branches[0].head]
    dtype = str(head.args[1].ty.dtype)
    weight = make_constant(sum(group.weight(b) for b in branches), dtype)
    conv = relax.Call(head.op, [group.values[head.args[0]], weight], head.attrs)
    value = group.builder.emit(conv, name_hint=branches[0].head)
    addends = [_constant_addend(group, n) for b in branches for n in group.steps(b)]
    if addends:
        total = addends[0]
        for addend in addends[1:]:
            total = total + addend
        value = group.builder.emit(relax.op.add(value, make_constant(total, str(value.ty.dtype))))
    joins = group.shape.join.operators
    group.values[group.var_of[joins[-1]]] = value
    group.replay(group.shape.tail)


def _constant_addend(group: _Group, name: str) -> np.ndarray:
    return next(as_float(a) for a in group.calls[name].args if isinstance(a, Constant))


def _emit_merged(group: _Group) -> None:
    join = group.shape.join
    if join is None or join.kind == "concat":
        _emit_concatenated(group)
    else:
        _emit_stacked(group)


def _channel_axis(call: relax.Call) -> int:
    """Axis of the output channels in an anchor's result."""
    if call.op.name == "relax.matmul":
        return call.ty.ndim - 1
    return str(call.attrs.out_layout or call.attrs.data_layout).index("C")


def _emit_concatenated(group: _Group) -> None:
    """One anchor with the weights concatenated along output channels; the result split by one block."""
    join = group.shape.join
    branches = join.branches if join else group.shape.branches
    head = group.calls[branches[0].head]
    axis = _channel_axis(head)
    is_conv = head.op.name != "relax.matmul"
    weight_axis = str(head.attrs.kernel_layout).index("O") if is_conv else 1
    weights = np.concatenate([group.weight(b) for b in branches], axis=weight_axis)
    weight = make_constant(weights, str(head.args[1].ty.dtype))
    merged = group.builder.emit(
        relax.Call(head.op, [group.values[head.args[0]], weight], head.attrs),
        name_hint=branches[0].head,
    )
    sizes = [int(group.calls[b.head].ty.shape[axis]) for b in branches]

    def combined(constants: list[Constant]) -> Constant:
        return _concatenate_operands(constants, sizes, axis, merged.ty.ndim)

    steps = [group.steps(b) for b in branches]
    value = _emit_steps(group, merged, steps, combined)
    if join is not None:
        if int(group.calls[join.operators[0]].attrs.axis) % merged.ty.ndim != axis:
            raise LoweringError(
                "members are concatenated along another axis than their channels; leave them apart"
            )
        group.values[group.var_of[join.operators[0]]] = value
        group.replay(group.shape.tail)
        return
    parts = group.builder.emit(emit_split_store(group.builder, value, sizes, axis))
    for k, branch in enumerate(branches):
        var = group.var_of[branch.operators[-1]]
        group.values[var] = group.builder.emit(relax.TupleGetItem(parts, k), name_hint=var.name)


def _concatenate_operands(
    constants: list[Constant], sizes: Sequence[int], axis: int, ndim: int
) -> Constant:
    """Concatenate per-channel operands; one that broadcasts over channels is repeated for its member's channels."""
    arrays = []
    for constant, size in zip(constants, sizes, strict=True):
        array = as_float(constant)
        array = array.reshape((1,) * (ndim - array.ndim) + array.shape)
        arrays.append(np.repeat(array, size, axis) if array.shape[axis] == 1 else array)
    return make_constant(np.concatenate(arrays, axis), str(constants[0].ty.dtype))


def _emit_steps(
    group: _Group,
    value: Any,
    steps: Sequence[Sequence[str]],
    combined: Callable[[list[Constant]], Constant],
) -> Any:
    """Emit the operators that all members run, once, with combined constant operands."""
    for names in zip(*steps, strict=True):
        calls = [group.calls[name] for name in names]
        args = []
        for k, arg in enumerate(calls[0].args):
            if isinstance(arg, Constant) and arg.ty.ndim > 0:
                args.append(combined([call.args[k] for call in calls]))
            elif isinstance(arg, relax.Var):
                args.append(value)
            else:
                args.append(arg)
        value = group.builder.emit(
            relax.Call(calls[0].op, args, calls[0].attrs), name_hint=names[0]
        )
    return value


def _emit_stacked(group: _Group) -> None:
    """One convolution with a branch axis; the join reads it at constant branch indices, all in registers.

    The operators that every member runs are applied to all branches at once, in float32; what
    follows (the join, an operand from outside, the tail) is replayed on the branches.
    """
    branches = group.shape.branches
    head = group.calls[branches[0].head]
    dtype = str(head.ty.dtype)
    weights = np.stack([group.weight(b) for b in branches])
    weight = make_constant(weights, str(head.args[1].ty.dtype))
    value = group.builder.emit(
        group.builder.call_te(merged_conv2d, group.values[head.args[0]], weight, head.attrs)
    )
    channels_last = str(head.attrs.data_layout) == "NHWC"
    branch_axis = 3 if channels_last else 1

    def combined(constants: list[Constant]) -> Constant:
        arrays = [as_float(c) for c in constants]
        arrays = [a.reshape((1,) * (4 - a.ndim) + a.shape) for a in arrays]
        return make_constant(np.stack(arrays, axis=branch_axis), "float32")

    prefix = _common_prefix(group, branches)
    steps = [group.steps(b)[:prefix] for b in branches]
    value = _emit_steps(group, value, steps, combined)
    done = {b.head for b in branches} | {name for names in steps for name in names}
    for k, branch in enumerate(branches):
        last = group.steps(branch)[prefix - 1] if prefix else branch.head
        part = group.builder.emit(group.builder.call_te(select_branch, value, k, branch_axis))
        group.values[group.var_of[last]] = part
    rest = [o.name for o in group.graph.operators if o.name not in done]
    if dtype in NARROW_TYPES:
        _replay_wide(group, rest, dtype)
    else:
        group.replay(rest)


def _replay_wide(group: _Group, names: Sequence[str], dtype: str) -> None:
    """Replay in float32: the joined sums of narrow types lose accuracy. The group's result is rounded once."""
    read = {v for name in names for v in relax.analysis.free_vars(group.calls[name])}
    for var in [v for v in group.values if v in read and str(v.ty.dtype) == dtype]:
        value = group.values[var]
        if str(value.ty.dtype) == dtype:
            group.values[var] = group.builder.emit(relax.op.astype(value, "float32"))
    for name in group.graph.sort(names):
        call = group.calls[name]
        args = [_wide(group, arg, dtype) for arg in call.args]
        group.values[group.var_of[name]] = group.builder.emit(relax.Call(call.op, args, call.attrs))
    for var in group.results:
        group.values[var] = group.builder.emit(relax.op.astype(group.values[var], dtype))


def _wide(group: _Group, arg: Any, dtype: str) -> Any:
    """The float32 form of an operand."""
    if isinstance(arg, relax.Var):
        return group.values[arg]
    if isinstance(arg, relax.Tuple):
        return relax.Tuple([_wide(group, field, dtype) for field in arg.fields])
    if isinstance(arg, Constant) and str(arg.ty.dtype) == dtype:
        return make_constant(as_float(arg), "float32")
    return arg


def _emit_joined(group: _Group) -> None:
    """Keep the members; for narrow types compute what follows the anchors, the join above all, in float32."""
    dtype = str(group.results[0].ty.dtype)
    names = [o.name for o in group.graph.operators]
    if dtype not in NARROW_TYPES:
        group.replay(names)
        return
    group.replay(group.shape.anchors)
    _replay_wide(group, [n for n in names if n not in group.shape.anchors], dtype)


def _common_prefix(group: _Group, branches: Sequence[Branch]) -> int:
    """Number of operators after the anchor that all branches run alike, on their predecessor and constants alone."""
    shortest = min(len(group.steps(b)) for b in branches)
    for length in range(shortest, 0, -1):
        cut = [
            Branch(b.head, (b.head, *group.steps(b)[:length]), group.steps(b)[length - 1])
            for b in branches
        ]
        if same_structure(group.graph, cut):
            return length
    return 0


def _emit_partitioned(group: _Group) -> None:
    """Keep the members as they are; a concat becomes one store per member, so that they stay independent."""
    join = group.shape.join
    if join is None or join.kind != "concat":
        group.replay([o.name for o in group.graph.operators])
        return
    group.replay([name for b in join.branches for name in b.operators])
    concat = group.calls[join.operators[0]]
    members = [group.values[group.var_of[b.operators[-1]]] for b in join.branches]
    value = group.builder.emit(emit_concat_stores(group.builder, members, int(concat.attrs.axis)))
    group.values[group.var_of[join.operators[0]]] = value
    group.replay(group.shape.tail)


#: How the body of each form is emitted.
_FORMS = {
    "collapsed": _emit_collapsed,
    "merged": _emit_merged,
    "joined": _emit_joined,
    "elementwise": _emit_joined,
    "partitioned": _emit_partitioned,
}
