"""Groups → bodies that compute what the members share once.

By the group's option ``form``, whatever its strategy: ``collapsed`` becomes one convolution with
the added weights, ``merged`` one with concatenated or stacked weights; ``joined`` and
``elementwise`` keep their operators and compute the join in float32; a ``partitioned`` group's
concat becomes one store per member; a constant causal mask of ``attention`` becomes a condition, and a
split of queries, keys and values three slices.
``back_to_back``, ``anchor_row`` and groups without a form keep their bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..compat import BlockBuilder, Constant, ir, relax, tvm, update_type, with_functions
from ..frontend.rename import LiftConstants, Substitute
from ..strategies.attributes import NUMERICS
from .rewrite_attention import changes_attention, emit_attention
from .rewrite_concat import emit_partitioned
from .rewrite_members import GroupBody
from .rewrite_merged import emit_collapsed, emit_merged


def rewrite_group(
    mod: tvm.IRModule, gv: ir.GlobalVar, call: relax.Call
) -> tuple[tvm.IRModule, relax.Call]:
    """Rewrite one group by its form.

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

    Raises
    ------
    LoweringError
        If the group does not have the form that its options name.
    """
    func = mod[gv]
    options = {str(k): str(v) for k, v in dict(func.attrs["tvm_fusion.options"]).items()}
    emit = _FORMS.get(options.get("form", ""))
    if emit is None:
        return mod, call
    bound = _bind_constants(func, call.args)
    builder = BlockBuilder(mod)
    group = GroupBody(bound, options, builder, is_strict=func.attrs.get(NUMERICS) == "strict")
    if emit is emit_joined and not _changes_when_joined(group):
        return mod, call
    if emit is emit_attention and not changes_attention(group):
        return mod, call
    name = f"{gv.name_hint}_rewritten"
    with builder.function(name, list(bound.params), private=True):
        with builder.dataflow():
            emit(group)
            results = [group.rounded(group.values[v], v) for v in group.results]
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


def _changes_when_joined(group: GroupBody) -> bool:
    """Whether joined members have sums to widen, or a split of which some parts may not be read."""
    return group.widens or any(o.op == "split" for o in group.graph.operators)


def emit_joined(group: GroupBody) -> None:
    """Keep the operators; for narrow types compute what follows the anchors, the join above all, in float32.

    What an anchor reads (its prologue, or an earlier anchor of its branch with its epilogue) keeps
    the type of the model: the anchors multiply narrow operands.
    """
    names = [o.name for o in group.graph.operators]
    anchors = group.shape.anchors
    before = [n for n in names if any(n == a or group.graph.depends(a, n) for a in anchors)]
    group.replay(before)
    group.replay_wide([n for n in names if n not in before])


#: How the body of each form is emitted; other forms keep their body.
_FORMS: dict[str, Callable[[GroupBody], None]] = {
    "collapsed": emit_collapsed,
    "merged": emit_merged,
    "joined": emit_joined,
    "elementwise": emit_joined,
    "partitioned": emit_partitioned,
    "attention": emit_attention,
}
