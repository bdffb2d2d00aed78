"""onnxruntime's attention and rotary embedding, by ONNX's operators of every opset since 10."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx


def attention(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """com.microsoft's Attention: queries, keys and values are one product of the input."""
    attributes = editor.attributes(node)
    x, weight, bias, mask, past, added, *rest = editor.operands(node, 8)
    _refuse_more(editor, rest, attributes, ("do_rotary", "past_present_share_buffer"))
    columns = (editor.dims(weight) or [None])[-1]
    if columns is None:
        editor.refuse("the shape of its weight is not known")
    sizes = [int(n) for n in attributes.get("qkv_hidden_sizes", ())] or [columns // 3] * 3
    joint = editor.add("MatMul", x, weight)
    joint = editor.add("Add", joint, bias) if bias else joint
    heads = attributes["num_heads"]
    q, k, v = (_heads(editor, part, heads) for part in editor.split(joint, sizes, 2))
    before = 0
    if past:
        before = (editor.dims(past) or [None] * 5)[3]
        k, v = (
            editor.add(
                "Concat", editor.add("Gather", past, np.array(i, "int64"), axis=0), new, axis=2
            )
            for i, new in enumerate((k, v))
        )
    dims = editor.dims(x) or [None] * 3
    keys = None if None in (dims[1], before) else dims[1] + before
    scores = _Scores(editor, x, attributes, dims, keys)
    y = scores.attend(q, k, v, mask, added, sizes[0] // heads)
    if not any(node.output[1:]):
        return [y]
    return [y, editor.add("Concat", editor.unsqueeze(k, 0), editor.unsqueeze(v, 0), axis=0)]


def multi_head_attention(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """com.microsoft's MultiHeadAttention: queries, keys and values of three axes, or keys and values by heads."""
    attributes = editor.attributes(node)
    q, k, v, bias, mask, added, past_k, past_v, *rest = editor.operands(node, 10)
    _refuse_more(editor, [*rest, *node.output[3:]], attributes, ())
    if not k or not v:
        editor.refuse("queries, keys and values are packed in one operand")
    heads = attributes["num_heads"]
    dims = editor.dims(q) or [None] * 3
    parts = [q, k, v]
    ranks = [len(editor.dims(part) or (0, 0, 0)) for part in parts]
    if ranks[0] != 3 or ranks[1] != ranks[2] or ranks[1] not in (3, 4):
        editor.refuse(f"its operands are of ranks {ranks}")
    width = (dims[2] or 0) // heads
    if bias:
        total = (editor.dims(bias) or [0])[0]
        hidden = dims[2] or total // 3
        width = hidden // heads
        shares = editor.split(bias, [hidden, hidden, total - 2 * hidden], 0)
        parts = [
            editor.add("Add", part, share) if rank == 3 else part
            for part, share, rank in zip(parts, shares, ranks, strict=True)
        ]
    if not width:
        editor.refuse("the width of its queries is not known")
    q, k, v = (
        _heads(editor, part, heads) if rank == 3 else part
        for part, rank in zip(parts, ranks, strict=True)
    )
    keys, before = (editor.dims(node.input[1]) or [None] * 4)[1 if ranks[1] == 3 else 2], 0
    if past_k:
        before = (editor.dims(past_k) or [None] * 4)[2]
        k, v = (editor.add("Concat", *pair, axis=2) for pair in ((past_k, k), (past_v, v)))
    length = None if None in (keys, before) else keys + before
    y = _Scores(editor, node.input[0], attributes, dims, length).attend(q, k, v, mask, added, width)
    return [y, k, v]


def _refuse_more(editor: Editor, operands: list[str], attributes: dict, keys: tuple) -> None:
    if any(operands):
        editor.refuse("it has operands or results of a cache that is shared between calls")
    for key in keys:
        if attributes.get(key, 0):
            editor.refuse(f"its attribute {key} is {attributes[key]}")


def _heads(editor: Editor, x: str, heads: int) -> str:
    """``[batch, length, hidden]`` by heads: ``[batch, heads, length, width]``."""
    parts = editor.reshape(x, [0, 0, heads, -1])
    return editor.add("Transpose", parts, perm=[0, 2, 1, 3])


class _Scores:
    """Writes out the products and what is added to the scores.

    Parameters
    ----------
    editor : Editor
        The graph.
    like : str
        A value of the type of the operands.
    attributes : dict
        The node's.
    dims : sequence of int or None
        Sizes of the batch and of the queries.
    keys : int or None
        Number of keys, those of a cache included.
    """

    def __init__(
        self,
        editor: Editor,
        like: str,
        attributes: dict,
        dims: Sequence[int | None],
        keys: int | None,
    ) -> None:
        self.editor, self.attributes, self.keys = editor, attributes, keys
        self.batch, self.rows = dims[:2]
        self.dtype = editor.dtype(like) or np.dtype("float32")

    def attend(self, q: str, k: str, v: str, mask: str, added: str, width: int) -> str:
        """Return the result, heads side by side."""
        editor = self.editor
        product = editor.add("MatMul", q, editor.add("Transpose", k, perm=[0, 1, 3, 2]))
        scale = self.attributes.get("scale", 0.0) or 1 / math.sqrt(width)
        scores = editor.add("Mul", product, np.array(scale, self.dtype))
        for bias in (self._padding(mask), added):
            scores = editor.add("Add", scores, bias) if bias else scores
        mixed = editor.add("MatMul", editor.add("Softmax", scores, axis=-1), v)
        return editor.reshape(editor.add("Transpose", mixed, perm=[0, 2, 1, 3]), [0, 0, -1])

    def _padding(self, mask: str) -> str:
        """What hides keys: a mask of ones and zeros, lengths, what comes later; empty where nothing does."""
        editor = self.editor
        zero = np.zeros((), self.dtype)
        value = np.array(self.attributes.get("mask_filter_value", -10000.0), self.dtype)
        found = ""
        if mask:
            found = editor.add("Where", self._shown(mask), zero, value)
        if not self.attributes.get("unidirectional", 0):
            return found
        if self.rows is None or self.keys is None:
            editor.refuse("the numbers of its queries and keys are not known")
        editor.require_room(self.rows, self.keys)
        seen = np.tri(self.rows, self.keys, self.keys - self.rows, dtype=bool)
        lowest = np.array(-65504.0 if self.dtype == np.float16 else -3.4028234663852886e38)
        if not found:
            return editor.store(np.where(seen, 0.0, lowest).astype(self.dtype))
        return editor.add("Where", seen, found, lowest.astype(self.dtype))

    def _shown(self, mask: str) -> str:
        """Truth values that keys take part, ``[batch, 1, queries or 1, keys]``."""
        editor, dims = self.editor, self.editor.dims(mask)
        rank = len(dims or ())
        if rank in (2, 3):
            shown = editor.unsqueeze(editor.cast(mask, "bool"), 1)
            return editor.unsqueeze(shown, 2) if rank == 2 else shown
        if rank != 1 or self.keys is None:
            editor.refuse(f"its mask is of rank {rank}" if rank else "its mask's rank is not known")
        if self.batch is None or dims[0] != self.batch:
            editor.refuse(
                "its mask is of one axis and holds no length for each element of the batch"
            )
        lengths = editor.reshape(mask, [-1, 1, 1, 1])
        places = np.arange(self.keys, dtype=editor.dtype(mask) or np.dtype("int32"))
        return editor.add("Less", places, lengths)


def rotary_embedding(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """com.microsoft's RotaryEmbedding: pairs of places of each head are turned by angles of stored tables."""
    attributes = editor.attributes(node)
    x, positions, cosines, sines = editor.operands(node, 4)
    dims, half = editor.dims(x), (editor.dims(cosines) or [None])[-1]
    where = len(editor.dims(positions) or ())
    if attributes.get("scale", 1.0) != 1.0 or attributes.get("is_packed_batching", 0):
        editor.refuse("it scales positions, or packs the batch")
    if dims is None or half is None or len(dims) not in (3, 4) or where not in (1, 2):
        editor.refuse("the ranks of its operands are not known")
    flat = len(dims) == 3
    if flat:
        heads = attributes.get("num_heads", 0) or (dims[2] or 0) // (2 * half)
        if not heads:
            editor.refuse("its number of heads is not known")
        x = editor.reshape(x, [0, 0, heads, -1])
    if where == 1:  # the first position
        length = dims[1 if flat else 2]
        if length is None:
            editor.refuse("the number of its positions is not known")
        places = np.arange(length, dtype="int64")[None]
        positions = editor.add("Add", editor.cast(positions, "int64"), places)
    cos, sin = (
        editor.unsqueeze(editor.add("Gather", table, positions, axis=0), 2 if flat else 1)
        for table in (cosines, sines)
    )
    width = dims[2] // heads if flat and dims[2] else dims[-1]
    made = turned(editor, x, cos, sin, half, width, bool(attributes.get("interleaved", 0)))
    return [editor.reshape(made, [0, 0, -1]) if flat else made]


def turned(
    editor: Editor, x: str, cos: str, sin: str, half: int, width: int | None, interleaved: bool
) -> str:
    """Turn the first ``2 * half`` places of heads of four axes by angles; others stay."""
    made = _turned(editor, x, cos, sin, half, interleaved)
    if width is not None and width <= 2 * half:
        return made
    rest = editor.slice(x, 3, 2 * half, np.iinfo("int32").max)
    return editor.add("Concat", made, rest, axis=3)


def _turned(editor: Editor, x: str, cos: str, sin: str, half: int, interleaved: bool) -> str:
    if interleaved:
        one, two = (editor.slice(x, 3, first, 2 * half, 2) for first in (0, 1))
    else:
        one, two = editor.slice(x, 3, 0, half), editor.slice(x, 3, half, 2 * half)
    real = editor.add("Sub", editor.add("Mul", one, cos), editor.add("Mul", two, sin))
    imaginary = editor.add("Add", editor.add("Mul", one, sin), editor.add("Mul", two, cos))
    if not interleaved:
        return editor.add("Concat", real, imaginary, axis=3)
    pairs = [editor.unsqueeze(part, 4) for part in (real, imaginary)]
    return editor.reshape(editor.add("Concat", *pairs, axis=4), [0, 0, 0, -1])
