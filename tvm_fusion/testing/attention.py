"""Attention as models write it, one builder a form, with kernels run on the CPU and the values expected of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..compat import BlockBuilder, relax, te, tirx
from ..guards.attention_tiles import AttentionTile
from ..schedules.cuda.attention.kernel import attention_kernel
from ..schedules.cuda.attention.recognition import attention
from ..strategies.softmax_forms import Sink
from ..targets import parse_target
from ..transform.rewrite_attention import softmax_beside
from . import cuda_emulation
from .groups import group_function, group_module

op = relax.op

#: Largest error over the largest value: weights and the output are rounded once each.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}


def number(value: float, like: relax.Expr) -> relax.Expr:
    """A scalar of the type of another value."""
    return relax.const(value, str(like.ty.dtype))


def scores_of(emit: Callable, q: relax.Expr, k: relax.Expr, scale: float = 0.125) -> relax.Expr:
    """Scaled products of queries and keys, ``[..., rows, keys]``."""
    axes = [*range(k.ty.ndim - 2), k.ty.ndim - 1, k.ty.ndim - 2]
    product = emit(op.matmul(q, emit(op.permute_dims(k, axes))))
    return emit(op.multiply(product, number(scale, q)))


def plain(builder: BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
    """Scale and softmax."""
    emit = builder.emit
    return emit(op.matmul(emit(op.nn.softmax(scores_of(emit, q, k))), v))


def scaled(
    builder: BlockBuilder,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    *,
    scale: float = 0.125,
    queries: float = 1.0,
    keys: float = 1.0,
    values: float = 1.0,
    shift: int | None = None,
) -> relax.Expr:
    """Factors of scores, queries, keys and values, and a causal mask where ``shift`` is given."""
    emit = builder.emit

    def times(x: relax.Expr, factor: float) -> relax.Expr:
        return x if factor == 1.0 else emit(op.multiply(x, number(factor, x)))

    scores = scores_of(emit, times(q, queries), times(k, keys), scale)
    if shift is not None:
        scores = emit(builder.call_te(_hidden, scores, shift, -np.inf))
    return emit(op.matmul(emit(op.nn.softmax(scores)), times(v, values)))


def added(
    builder: BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr, mask: relax.Expr
) -> relax.Expr:
    """An additive mask."""
    emit = builder.emit
    scores = emit(op.add(scores_of(emit, q, k), mask))
    return emit(op.matmul(emit(op.nn.softmax(scores)), v))


def causal(
    builder: BlockBuilder,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    shift: int = 0,
    hidden: float = -np.inf,
) -> relax.Expr:
    """Keys up to the row's own position and ``shift`` further."""
    emit = builder.emit
    scores = emit(builder.call_te(_hidden, scores_of(emit, q, k), shift, hidden))
    return emit(op.matmul(emit(op.nn.softmax(scores)), v))


def _hidden(scores: te.Tensor, shift: int, hidden: float) -> te.Tensor:
    def element(*index: tirx.Expr) -> tirx.Expr:
        keep = index[-1] - index[-2] <= shift
        return tirx.if_then_else(keep, scores(*index), tirx.const(hidden, scores.dtype))

    return te.compute(scores.shape, element, name="causal")


def sunk(
    builder: BlockBuilder,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    *held: relax.Expr,
    score: float = 0.0,
    share: float = 0.0,
    counts: bool = True,
    shift: int | None = None,
    mask: bool = False,
) -> relax.Expr:
    """A softmax with a sink, as its group is lowered: the last operand, or a number, or a share of the largest.

    Without ``counts`` the sink is not among what the largest is of. ``shift`` is a causal mask's; with ``mask`` the
    operand before is added to the scores.
    """
    emit, held = builder.emit, list(held)
    scores = scores_of(emit, q, k)
    if shift is not None:
        scores = emit(builder.call_te(_hidden, scores, shift, -np.inf))
    if mask:
        scores = emit(op.add(scores, held.pop(0)))
    sink = Sink("held" if held else "", score, share, counts)

    def weights(scores: te.Tensor, *held: te.Tensor) -> te.Tensor:
        return softmax_beside(scores, held, sink, str(q.ty.dtype))

    return emit(op.matmul(emit(builder.call_te(weights, scores, *held)), v))


def gated(
    builder: BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr, gate: relax.Expr
) -> relax.Expr:
    """The result times a gate."""
    emit = builder.emit
    return emit(op.multiply(plain(builder, q, k, v), emit(op.sigmoid(gate))))


def zeroed(
    builder: BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr, mask: relax.Expr
) -> relax.Expr:
    """An additive mask, and zeros for rows without any key, as PyTorch decomposes its own attention."""
    emit = builder.emit
    scores = emit(op.add(scores_of(emit, q, k), mask))
    weights = emit(op.nn.softmax(scores))
    some = emit(op.logical_not(emit(op.equal(scores, number(-np.inf, q)))))
    some = emit(op.max(emit(op.astype(some, "int8")), [-1], True))
    none = emit(op.logical_not(emit(op.astype(some, "bool"))))
    weights = emit(op.where(none, emit(op.full_like(weights, number(0, q))), weights))
    return emit(op.matmul(weights, v))


def undefined(
    builder: BlockBuilder,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    mask: relax.Expr,
    swapped: bool = False,
) -> relax.Expr:
    """An additive mask, and zeros for weights that are NaN, as ONNX files have PyTorch's own attention."""
    emit = builder.emit
    weights = emit(op.nn.softmax(emit(op.add(scores_of(emit, q, k), mask))))
    return emit(op.matmul(_zeroed(emit, weights, emit(op.isnan(weights)), swapped), v))


def masked_rows(
    builder: BlockBuilder,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    mask: relax.Expr,
    swapped: bool = False,
    bound: float = -np.inf,
    factor: float = 1.0,
) -> relax.Expr:
    """An additive mask, and zeros for rows whose largest mask is minus infinity, as ONNX defines its own attention."""
    emit = builder.emit
    added = mask if factor == 1.0 else emit(op.multiply(mask, number(factor, q)))
    weights = emit(op.nn.softmax(emit(op.add(scores_of(emit, q, k), added))))
    hidden = emit(op.equal(emit(op.max(mask, [-1], True)), number(bound, q)))
    return emit(op.matmul(_zeroed(emit, weights, hidden, swapped), v))


def _zeroed(
    emit: Callable[[relax.Expr], relax.Expr], weights: relax.Expr, hidden: relax.Expr, swapped: bool
) -> relax.Expr:
    """Zeros for weights that are hidden; ``swapped`` asks for those that are not."""
    zero = emit(op.full_like(weights, number(0, weights)))
    if swapped:
        return emit(op.where(emit(op.logical_not(hidden)), weights, zero))
    return emit(op.where(hidden, zero, weights))


def chosen_rows(
    builder: BlockBuilder,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    kept: relax.Expr,
    swapped: bool = False,
) -> relax.Expr:
    """Zeros for rows that are not kept."""
    emit = builder.emit
    weights = emit(op.nn.softmax(scores_of(emit, q, k)))
    zero = emit(op.full_like(weights, number(0, q)))
    kept = emit(op.greater(kept, number(0, q)))
    if swapped:
        weights = emit(op.where(kept, weights, zero))
    else:
        weights = emit(op.where(emit(op.logical_not(kept)), zero, weights))
    return emit(op.matmul(weights, v))


def heads(
    builder: BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr, count: int = 4
) -> relax.Expr:
    """Heads split off ``[batch, rows, hidden]`` and merged again."""
    emit = builder.emit
    batch, _, hidden = (int(e) for e in q.ty.shape)

    def split(x):
        parts = op.reshape(x, (batch, int(x.ty.shape[1]), count, hidden // count))
        return emit(op.permute_dims(emit(parts), (0, 2, 1, 3)))

    mixed = plain(builder, split(q), split(k), split(v))
    mixed = emit(op.permute_dims(mixed, (0, 2, 1, 3)))
    return emit(op.reshape(mixed, q.ty.shape))


def flattened(builder: BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
    """Half of the scale on each operand, batch and heads as one axis: PyTorch's decomposition."""
    emit = builder.emit

    def flat(x):
        batch, count, *rest = (int(e) for e in x.ty.shape)
        return emit(op.reshape(x, (batch * count, *rest)))

    half = 0.125**0.5
    q2 = flat(emit(op.multiply(q, number(half, q))))
    k2 = emit(op.multiply(emit(op.permute_dims(k, (0, 1, 3, 2))), number(half, q)))
    scores = emit(op.matmul(q2, flat(k2)))
    shape = (*(int(q.ty.shape[axis]) for axis in range(3)), int(k.ty.shape[2]))
    weights = flat(emit(op.nn.softmax(emit(op.reshape(scores, shape)))))
    return emit(op.reshape(emit(op.matmul(weights, flat(v))), q.ty.shape))


def grouped(builder: BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
    """Heads of keys and values that several heads of queries share."""
    emit = builder.emit
    batch, count, _, width = (int(e) for e in q.ty.shape)

    def repeat(x):
        own, keys = int(x.ty.shape[1]), int(x.ty.shape[2])
        one = emit(op.reshape(x, (batch, own, 1, keys, width)))
        many = emit(op.broadcast_to(one, (batch, own, count // own, keys, width)))
        return emit(op.reshape(many, (batch, count, keys, width)))

    return plain(builder, q, repeat(k), repeat(v))


def expected(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    bias: np.ndarray | None = None,
    scale: float = 0.125,
    zero: bool = False,
    sink: np.ndarray | float | None = None,
) -> np.ndarray:
    """Attention in float64.

    Parameters
    ----------
    q, k, v : ndarray
        ``[batch, heads, length, width]``; keys and values may have fewer heads.
    bias : ndarray, optional
        Is added to the scores.
    scale : float
        Of the scores.
    zero : bool
        Whether rows of NaN become 0.
    sink : ndarray or float, optional
        One more score, without a value.
    """
    q, k, v = (np.asarray(a, "float64") for a in (q, k, v))
    if k.shape[:-2] != q.shape[:-2]:
        k, v = (np.repeat(a, q.shape[1] // k.shape[1], axis=1) for a in (k, v))
    scores = q @ k.swapaxes(-1, -2) * scale
    if bias is not None:
        scores = scores + np.asarray(bias, "float64")
    with np.errstate(invalid="ignore"):
        largest = scores.max(-1, keepdims=True)
        if sink is not None:
            sink = np.asarray(sink, "float64")
            largest = np.maximum(largest, sink)
        weights = np.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        weights /= total if sink is None else total + np.exp(sink - largest)
    out = weights @ v
    return np.nan_to_num(out, nan=0.0) if zero else out


def attention_function(
    make: Callable, shapes: Sequence[Sequence[int]], dtype: str = "float16", **attrs: Any
) -> tirx.PrimFunc:
    """One of the forms of this module as one unscheduled function."""
    return group_function(
        group_module(shapes, dtype, lambda builder, *inputs: make(builder, *inputs, **attrs))
    )


def emulate(
    func: tirx.PrimFunc, tile: AttentionTile, arrays: Sequence[np.ndarray], **options: Any
) -> np.ndarray:
    """Run the kernel of one tile on the CPU; its result in float64."""
    made = attention_kernel(attention(func), tile).without_attr("global_symbol")
    bits = [a.view("uint16") if a.dtype == ml_dtypes.bfloat16 else a for a in arrays]
    (result,) = cuda_emulation.run(made, bits, parse_target("cuda:sm_90"), **options)
    narrow = str(func.params[-1].ty.dtype) == "bfloat16"
    return (result.view(ml_dtypes.bfloat16) if narrow else result).astype("float64")


def random_arrays(
    shapes: Sequence[Sequence[int]], dtype: str = "float16", seed: int = 0
) -> list[np.ndarray]:
    """Normally distributed arrays."""
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return [rng.standard_normal(shape).astype(kind) for shape in shapes]


def error_of(found: np.ndarray, want: np.ndarray) -> float:
    """Largest error over the largest value (1 at least); infinite where only one of them is NaN."""
    if (np.isnan(found) != np.isnan(want)).any():
        return float("inf")
    largest = max(1.0, float(np.nan_to_num(np.abs(want)).max()))
    return float(np.nan_to_num(np.abs(found - want)).max()) / largest
