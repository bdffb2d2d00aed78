"""Building blocks of transformers and of dense networks, with random weights.

As in ``blocks``: one binding per operator, sizes as arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compat import relax, tvm
from .modules import ModuleBuilder


def dense(b: ModuleBuilder, name: str, value: Any, width: int) -> Any:
    """Add a matrix product with a random weight, and a bias, to a module under construction."""
    inner = int(value.ty.shape[len(value.ty.shape) - 1])
    product = relax.op.matmul(value, b.const(inner, width, scale=inner**-0.5))
    return b.op(f"{name}_bias", relax.op.add(b.op(name, product), b.const(width, scale=0.1)))


def layer_norm(b: ModuleBuilder, name: str, value: Any) -> Any:
    """Add a layer norm over the last axis, with random scale and shift."""
    width = int(value.ty.shape[len(value.ty.shape) - 1])
    scale, shift = b.array(1 + 0.1 * np.sin(np.arange(width))), b.const(width, scale=0.1)
    return b.op(name, relax.op.nn.layer_norm(value, scale, shift, axes=[-1]))


def bert_block(
    *,
    batch: int = 1,
    sequence: int = 128,
    hidden: int = 768,
    heads: int = 12,
    inner: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> tvm.IRModule:
    """Transformer encoder block of BERT-base (Devlin et al., 2019): attention, then FFN with GELU.

    ``[batch, sequence, hidden]`` → the same shape. Q, K and V are products of their own, each with a
    bias; attention is matmul, scale, softmax, matmul on ``[batch, heads, sequence, hidden/heads]``;
    output projection and FFN (``inner`` wide, 4·hidden when absent) are each followed by the
    residual sum and a layer norm.
    """
    b = ModuleBuilder(dtype, seed=seed)
    x = b.input("x", (batch, sequence, hidden))
    width = hidden // heads

    def split_heads(name: str, axes: tuple[int, ...]) -> Any:
        y = dense(b, name, x, hidden)
        y = b.op(f"{name}_split", relax.op.reshape(y, (batch, sequence, heads, width)))
        return b.op(f"{name}_heads", relax.op.permute_dims(y, axes))

    q, k = split_heads("query", (0, 2, 1, 3)), split_heads("key", (0, 2, 3, 1))
    v = split_heads("value", (0, 2, 1, 3))
    scores = b.op("scores", relax.op.matmul(q, k))
    scores = b.op("scale", relax.op.multiply(scores, b.array(np.array(width**-0.5))))
    weights = b.op("softmax", relax.op.nn.softmax(scores, axis=-1))
    mixed = b.op("context", relax.op.matmul(weights, v))
    mixed = b.op("context_swap", relax.op.permute_dims(mixed, (0, 2, 1, 3)))
    mixed = b.op("context_merge", relax.op.reshape(mixed, (batch, sequence, hidden)))
    y = b.add("attention_sum", dense(b, "output", mixed, hidden), x)
    y = layer_norm(b, "attention_norm", y)
    grown = b.op("gelu", relax.op.nn.gelu(dense(b, "ffn1", y, inner or 4 * hidden)))
    y = b.add("ffn_sum", dense(b, "ffn2", grown, hidden), y)
    return b.finish(layer_norm(b, "ffn_norm", y))


def llama_layer(
    *,
    batch: int = 1,
    sequence: int = 128,
    hidden: int = 1024,
    heads: int = 8,
    kv_heads: int | None = None,
    inner: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> tvm.IRModule:
    """Decoder layer of LLaMA (Touvron et al., 2023): causal attention with rotary embedding, then SwiGLU.

    ``[batch, sequence, hidden]`` → the same shape. RMS norms stand before both halves, the residual
    is added after; ``kv_heads`` (all when absent) keys and values are shared by groups of queries;
    ``inner`` is 11/4·hidden when absent. No biases.
    """
    b = ModuleBuilder(dtype, seed=seed)
    x = b.input("x", (batch, sequence, hidden))
    width, shared = hidden // heads, kv_heads or heads
    angles = np.outer(np.arange(sequence), 10000.0 ** (-np.arange(0, width, 2) / width))
    cos, sin = (b.array(np.tile(f(angles), 2)) for f in (np.cos, np.sin))
    least = np.finfo(np.float16).min
    mask = b.array(np.triu(np.full((sequence, sequence), least), 1)[None, None])

    def norm(name: str, value: Any) -> Any:
        scale = b.array(1 + 0.1 * np.sin(np.arange(hidden)))
        return b.op(name, relax.op.nn.rms_norm(value, scale, axes=[-1]))

    def product(name: str, value: Any, columns: int) -> Any:
        return b.dense(name, value, columns, bias=False)

    def split_heads(name: str, value: Any, count: int) -> Any:
        y = product(name, value, count * width)
        y = b.op(f"{name}_split", relax.op.reshape(y, (batch, sequence, count, width)))
        return b.op(f"{name}_heads", relax.op.permute_dims(y, (0, 2, 1, 3)))

    def rotated(name: str, value: Any) -> Any:
        half = width // 2
        low = b.op(f"{name}_low", relax.op.strided_slice(value, [3], [0], [half]))
        high = b.op(f"{name}_high", relax.op.strided_slice(value, [3], [half], [width]))
        turned = b.concat(f"{name}_turn", [b.op(f"{name}_neg", relax.op.negative(high)), low], -1)
        direct = b.op(f"{name}_cos", relax.op.multiply(value, cos))
        return b.add(f"{name}_rotary", direct, b.op(f"{name}_sin", relax.op.multiply(turned, sin)))

    def repeated(name: str, value: Any) -> Any:
        if shared == heads:
            return value
        return b.op(f"{name}_repeat", relax.op.repeat(value, heads // shared, axis=1))

    y = norm("attention_norm", x)
    q = rotated("query", split_heads("query", y, heads))
    k = repeated("key", rotated("key", split_heads("key", y, shared)))
    v = repeated("value", split_heads("value", y, shared))
    k = b.op("key_swap", relax.op.permute_dims(k, (0, 1, 3, 2)))
    scores = b.op("scores", relax.op.matmul(q, k))
    scores = b.op("scale", relax.op.multiply(scores, b.array(np.array(width**-0.5))))
    weights = b.op("softmax", relax.op.nn.softmax(b.op("mask", relax.op.add(scores, mask))))
    mixed = b.op("context", relax.op.matmul(weights, v))
    mixed = b.op("context_swap", relax.op.permute_dims(mixed, (0, 2, 1, 3)))
    mixed = b.op("context_merge", relax.op.reshape(mixed, (batch, sequence, hidden)))
    x = b.add("attention_sum", x, product("output", mixed, hidden))
    y = norm("ffn_norm", x)
    inner = inner or hidden * 11 // 4
    gate = b.op("silu", relax.op.nn.silu(product("gate", y, inner)))
    grown = b.op("gated", relax.op.multiply(gate, product("up", y, inner)))
    return b.finish(b.add("ffn_sum", x, product("down", grown, hidden)))


def head_projections(
    *,
    heads: int = 8,
    tokens: int = 128,
    hidden: int = 512,
    width: int = 64,
    join: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> tvm.IRModule:
    """Q, K and V projections of every head, each a small product with a bias: 24 for 8 heads.

    ``[tokens, hidden]`` → 3·heads results ``[tokens, width]``, or with ``join="concat"`` three of
    ``[tokens, heads·width]``.

    Raises
    ------
    ValueError
        If ``join`` is another word.
    """
    if join not in (None, "concat"):
        raise ValueError(f"join must be None or concat, got {join!r}")
    b = ModuleBuilder(dtype, seed=seed)
    x = b.input("x", (tokens, hidden))
    results = []
    for kind in ("query", "key", "value"):
        parts = [dense(b, f"{kind}{i}", x, width) for i in range(heads)]
        results += parts if join is None else [b.op(kind, relax.op.concat(parts, axis=-1))]
    return b.finish(*results)


def dense_norm_heads(
    *,
    heads: int = 4,
    rows: int = 128,
    width: int = 256,
    outputs: int = 256,
    separate: bool = False,
    relu: bool = False,
    dtype: str = "float32",
    seed: int = 0,
) -> tvm.IRModule:
    """Parallel heads of dense layer + layer norm (+ ReLU), returned apart.

    ``[rows, width]`` (one input, or with ``separate`` one per head) → ``heads`` results
    ``[rows, outputs]``.
    """
    b = ModuleBuilder(dtype, seed=seed)
    inputs = [b.input(f"x{i}", (rows, width)) for i in range(heads if separate else 1)]
    results = []
    for i in range(heads):
        y = layer_norm(b, f"norm{i}", dense(b, f"fc{i}", inputs[i if separate else 0], outputs))
        results.append(b.relu(f"relu{i}", y) if relu else y)
    return b.finish(*results)


def matmul_pair(
    *,
    rows: int = 512,
    width: int = 256,
    inner: int = 64,
    outputs: int = 256,
    bias: bool = True,
    dtype: str = "float32",
    seed: int = 0,
) -> tvm.IRModule:
    """Two matrix products back to back with a small inner width, as in low-rank layers.

    ``[rows, width]`` → ``[rows, inner]`` → ``[rows, outputs]``; with ``bias`` a bias after each and
    a ReLU between them.
    """
    b = ModuleBuilder(dtype, seed=seed)
    x = b.input("x", (rows, width))
    if bias:
        return b.finish(dense(b, "second", b.relu("relu", dense(b, "first", x, inner)), outputs))
    y = b.op("first", relax.op.matmul(x, b.const(width, inner, scale=width**-0.5)))
    return b.finish(b.op("second", relax.op.matmul(y, b.const(inner, outputs, scale=inner**-0.5))))


def dense_gelu(
    *,
    rows: int = 128,
    width: int = 768,
    outputs: int = 3072,
    dtype: str = "float32",
    seed: int = 0,
) -> tvm.IRModule:
    """First half of a transformer's FFN: product, bias, GELU. ``[rows, width]`` → ``[rows, outputs]``."""
    b = ModuleBuilder(dtype, seed=seed)
    y = dense(b, "fc", b.input("x", (rows, width)), outputs)
    return b.finish(b.op("gelu", relax.op.nn.gelu(y)))


def dense_norm(
    *,
    rows: int = 128,
    width: int = 768,
    outputs: int = 768,
    dtype: str = "float32",
    seed: int = 0,
) -> tvm.IRModule:
    """Product, bias, layer norm, ReLU on one path. ``[rows, width]`` → ``[rows, outputs]``."""
    return dense_norm_heads(
        heads=1, rows=rows, width=width, outputs=outputs, relu=True, dtype=dtype, seed=seed
    )
