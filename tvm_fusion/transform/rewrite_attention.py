"""Attention with constants that become part of its kernel: causal masks, and numbers that are selected; and softmax
that a model writes out, perhaps with a sink, in one form.

A constant mask that hides what is behind a row's own position becomes a condition: a kernel that knows it reads no mask
and leaves out the keys that no row of a block sees. A number that ``where`` selects becomes an immediate, not a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..compat import Constant, relax, te, tirx
from ..graph.causal import causal_mask
from ..strategies.softmax_forms import Sink, SoftmaxForm, read_softmax
from .rewrite_members import GroupBody


def changes_attention(group: GroupBody) -> bool:
    """Whether a group has a causal mask or a number that becomes part of its kernel, or a split that becomes slices."""
    splits = any(operator.op == "split" for operator in group.graph.operators)
    calls = group.calls.values()
    written = _written(group) is not None
    return splits or written or any(causal_mask(c) is not None or _numbers(c) for c in calls)


def emit_attention(group: GroupBody) -> None:
    """Keep the operators, but for causal masks, selected numbers, and what a softmax is written out by."""
    form = _written(group)
    inside = () if form is None else form.operators
    for operator in group.graph.operators:
        if form is not None and operator is form.last:
            group.bind(operator.name, _emit_softmax(group, form))
        if operator.name in inside:
            continue
        call = group.calls[operator.name]
        mask = causal_mask(call)
        if mask is not None:
            scores = group.values[mask.data]
            made = group.builder.call_te(_masked, scores, mask.shift, mask.hidden)
        elif _numbers(call):
            made = relax.op.where(*_with_tensor(group, call))
        else:
            group.replay([operator.name])
            continue
        group.bind(operator.name, group.builder.emit(made, name_hint=operator.name))


def _written(group: GroupBody) -> SoftmaxForm | None:
    """The softmax of a group that is more than one operator, unless the result of each of them is to be rounded."""
    if group.is_strict:
        return None
    found = (read_softmax(group.graph, operator) for operator in group.graph.operators)
    return next((form for form in found if form is not None and not form.is_operator), None)


def _emit_softmax(group: GroupBody, form: SoftmaxForm) -> relax.Expr:
    """Weights of a written softmax: exponentials of what scores are below the largest of their row, over their sum."""
    builder, result = group.builder, group.var_of[form.last.name].ty
    scores = _operand(group, form.scores)
    if [int(n) for n in scores.ty.shape] != [int(n) for n in result.shape]:
        scores = builder.emit(relax.op.reshape(scores, result.shape))
    sink = form.sink
    held = [_operand(group, sink.tensor)] if sink is not None and sink.tensor else []

    def weights(scores: te.Tensor, *held: te.Tensor) -> te.Tensor:
        return softmax_beside(scores, held, sink, str(result.dtype))

    made = builder.call_te(weights, scores, *held)
    return builder.emit(made, name_hint=group.var_of[form.last.name].name)


def _operand(group: GroupBody, tensor: str) -> relax.Expr:
    """What stands in the new body for a tensor of the graph, which may be a constant."""
    reader = next(o for o in group.graph.operators if tensor in o.inputs)
    args = group.calls[reader.name].args
    single = [a for arg in args for a in (arg.fields if isinstance(arg, relax.Tuple) else (arg,))]
    read = [
        a for a in single if isinstance(a, relax.Var) or (isinstance(a, Constant) and a.ty.ndim)
    ]
    found = read[reader.inputs.index(tensor)]
    return found if isinstance(found, Constant) else group.values[found]


def softmax_beside(
    scores: te.Tensor, held: Sequence[te.Tensor], sink: Sink | None, dtype: str
) -> te.Tensor:
    """Softmax over the last axis in float32, beside a sink.

    Parameters
    ----------
    scores : Tensor
        ``[..., keys]``.
    held : sequence of Tensor
        The sink's score, of as many axes, the last of extent 1; empty where it is a number, or there is none.
    sink : Sink or None
        See `Sink`.
    dtype : str
        Type of the result.
    """
    *batch, keys = scores.shape

    def over(kind, value, name: str) -> te.Tensor:
        key = te.reduce_axis((0, keys), "key")
        return te.compute(batch, lambda *row: kind(value(*row, key), axis=key), name=name)

    def score(*index: tirx.Expr) -> tirx.Expr:
        return scores(*index).astype("float32")

    def beside(*row: tirx.Expr) -> tirx.Expr | None:
        if held:
            (tensor,) = held
            own = (*row, 0)[len(row) + 1 - len(tensor.shape) :]
            places = [0 if int(n) == 1 else i for n, i in zip(tensor.shape, own, strict=True)]
            return tensor(*places).astype("float32")
        return None if sink is None or sink.share else tirx.const(sink.score, "float32")

    largest = over(te.max, score, "largest")

    def bound(*row: tirx.Expr) -> tirx.Expr:
        other = beside(*row)
        counts = other is not None and sink is not None and sink.counts
        return te.max(largest(*row), other) if counts else largest(*row)

    powers = te.compute(scores.shape, lambda *i: te.exp(score(*i) - bound(*i[:-1])), name="powers")
    total = over(te.sum, powers, "total")

    def weight(*index: tirx.Expr) -> tirx.Expr:
        row = index[:-1]
        whole, other = total(*row), beside(*row)
        if other is not None:
            whole = whole + te.exp(other - bound(*row))
        elif sink is not None:
            whole = whole + tirx.const(sink.share, "float32")
        return (powers(*index) / whole).astype(dtype)

    return te.compute(scores.shape, weight, name="weights")


def _numbers(call: relax.Call) -> list[int]:
    """Which operands of a selection are numbers, if another one is a variable of the result's type."""
    if getattr(call.op, "name", "") != "relax.where":
        return []
    found = [i for i in (1, 2) if isinstance(call.args[i], Constant) and call.args[i].ty.ndim == 0]
    return found if len(found) == 1 and isinstance(call.args[3 - found[0]], relax.Var) else []


def _with_tensor(group: GroupBody, call: relax.Call) -> list[relax.Expr]:
    """Operands of a selection with a filled tensor where a number was."""
    args = [group.values.get(arg, arg) if isinstance(arg, relax.Var) else arg for arg in call.args]
    (place,) = _numbers(call)
    number = float(args[place].value.numpy())
    args[place] = group.builder.emit(group.builder.call_te(_full, args[3 - place], number))
    return args


def _full(like: te.Tensor, number: float) -> te.Tensor:
    """TVM's own ``full`` fails where the number is infinite."""
    filling = tirx.const(number, str(like.dtype))
    return te.compute(like.shape, lambda *index: filling, name="filled")


def _masked(scores: te.Tensor, shift: int, hidden: float) -> te.Tensor:
    def element(*index: tirx.Expr) -> tirx.Expr:
        hides = tirx.const(hidden, str(scores.dtype))
        return tirx.if_then_else(index[-1] - index[-2] <= shift, scores(*index), hides)

    return te.compute(scores.shape, element, name="causal_mask")
