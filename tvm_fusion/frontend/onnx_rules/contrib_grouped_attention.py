"""onnxruntime's GroupQueryAttention, by ONNX's operators: attention of decoders, as onnxruntime-genai exports it.

Keys and values of a cache precede the new ones: ``present`` has as many places as both together. A cache whose buffer
is kept from call to call is filled up to a place that is known at run time only, and is refused.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..onnx_editor import Editor
from .contrib_attention import turned

if TYPE_CHECKING:
    import onnx

#: Attributes that change what is computed in a way that is not written out, with the values that do not.
_PLAIN = {
    "qk_output": 0,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
    "kv_cache_bit_width": 0,
}


def grouped_query_attention(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """Causal attention, several heads of queries sharing one of keys and values, rotated and behind a cache or not."""
    return _Grouped(editor, node).written()


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of one node: batch, new places, places of the cache, heads of queries and of keys, places of a head."""

    batch: int
    rows: int
    past: int
    heads: int
    own: int
    width: int

    @property
    def keys(self) -> int:
        return self.past + self.rows


class _Grouped:
    """Writes one node out."""

    def __init__(self, editor: Editor, node: onnx.NodeProto) -> None:
        self.editor, self.node = editor, node
        self.attributes: dict[str, Any] = editor.attributes(node)
        operands = editor.operands(node, 14)
        self.query, self.key, self.value, self.past_key, self.past_value = operands[:5]
        self.lengths, self.total, self.cosines, self.sines, self.positions = operands[5:10]
        self.bias, self.head_sink = operands[10:12]
        for name, plain in _PLAIN.items():
            if self.attributes.get(name, plain) != plain:
                editor.refuse(f"its attribute {name} is {self.attributes[name]}")
        if any(operands[12:]) or any(node.output[3:]):
            editor.refuse("its cache is quantised, or its scores are a result")
        if bool(self.key) != bool(self.value) or bool(self.past_key) != bool(self.past_value):
            editor.refuse("it has keys without values")
        self.sizes = self._sizes()
        self.dtype = editor.dtype(self.query) or np.dtype("float32")

    def _sizes(self) -> _Sizes:
        editor = self.editor
        heads, own = self.attributes["num_heads"], self.attributes["kv_num_heads"]
        if min(heads, own) < 1 or heads % own:
            editor.refuse(f"{heads} heads of queries do not share {own} of keys")
        dims = editor.dims(self.query) or []
        past = (
            (editor.dims(self.past_key) or [None] * 4) if self.past_key else [None, None, 0, None]
        )
        if len(dims) != 3 or None in dims or past[2:3] in ([], [None]):
            editor.refuse(
                "the sizes of its queries and its cache are not known; give them by shape"
            )
        batch, rows, hidden = (int(n) for n in dims)
        parts = heads if self.key else heads + 2 * own
        if hidden % parts:
            editor.refuse(f"{hidden} places are not those of {parts} heads")
        sizes = _Sizes(batch, rows, int(past[2]), heads, own, hidden // parts)
        known = editor.value(self.total) if self.total else None
        present = (
            (editor.dims(self.node.output[1]) or [None] * 4)[2] if self.node.output[1:2] else None
        )
        kept = sizes.past and present == sizes.past
        if kept or (known is not None and int(np.ravel(known)[0]) != sizes.keys):
            editor.refuse(
                f"its cache of {sizes.past} places is a buffer that is kept, not the places before the {rows} new ones"
            )
        return sizes

    @property
    def is_ragged(self) -> bool:
        """Whether elements of the batch may have caches of different lengths."""
        return self.sizes.batch > 1 and self.sizes.past > 0

    # -- operands ----------------------------------------------------------------------------------------

    def written(self) -> list[str]:
        """Return the results: rows with their heads side by side, keys and values with those of the cache."""
        editor, sizes = self.editor, self.sizes
        parts = [self.query, self.key, self.value]
        if not self.key:
            shares = [n * sizes.width for n in (sizes.heads, sizes.own, sizes.own)]
            parts = editor.split(self.query, shares, 2)
        counts = (sizes.heads, sizes.own, sizes.own)
        split = [
            editor.reshape(part, [sizes.batch, sizes.rows, count, sizes.width])
            for part, count in zip(parts, counts, strict=True)
        ]
        if self.attributes.get("do_rotary", 0):
            split[:2] = self._rotated(split[:2])
        q, k, v = (editor.add("Transpose", part, perm=[0, 2, 1, 3]) for part in split)
        k, v = self._behind(self.past_key, k), self._behind(self.past_value, v)
        mixed = self._attend(q, self._shared(k), self._shared(v))
        rows = editor.add("Transpose", mixed, perm=[0, 2, 1, 3])
        return [editor.reshape(rows, [sizes.batch, sizes.rows, -1]), k, v]

    def _cached(self) -> str:
        """How many places of the cache each element of the batch has, ``[batch]``."""
        before = np.array(1 - self.sizes.rows, "int64")
        lengths = self.editor.reshape(self.editor.cast(self.lengths, "int64"), [-1])
        return self.editor.add("Add", lengths, before)

    def _rotated(self, parts: list[str]) -> list[str]:
        """Queries and keys turned by the angles of their positions."""
        editor, sizes = self.editor, self.sizes
        half = (editor.dims(self.cosines) or [None])[-1] if self.cosines and self.sines else None
        if half is None:
            editor.refuse("it rotates, and the sizes of its tables are not known")
        places = np.arange(sizes.rows, dtype="int64")[None]
        positions: str | np.ndarray = self.positions
        if not positions:
            positions = places + sizes.past
            if self.is_ragged:
                positions = editor.add("Add", editor.reshape(self._cached(), [-1, 1]), places)
        cos, sin = (
            editor.unsqueeze(editor.add("Gather", table, positions, axis=0), 2)
            for table in (self.cosines, self.sines)
        )
        interleaved = bool(self.attributes.get("rotary_interleaved", 0))
        return [turned(editor, part, cos, sin, half, sizes.width, interleaved) for part in parts]

    def _behind(self, past: str, new: str) -> str:
        """New keys or values behind those of the cache."""
        if not past:
            return new
        editor, sizes = self.editor, self.sizes
        joined = editor.add("Concat", past, new, axis=2)
        if not self.is_ragged:
            return joined
        # Where an element's cache is shorter, the new places move up, and zeros follow.
        cached = editor.reshape(self._cached(), [-1, 1, 1, 1])
        place = np.arange(sizes.keys, dtype="int64").reshape(1, 1, -1, 1)
        moved = editor.add("Sub", editor.add("Add", place, np.array(sizes.past, "int64")), cached)
        last = np.array(sizes.keys - 1, "int64")
        moved = editor.add("Where", editor.add("Less", moved, last), moved, last)
        index = editor.add("Where", editor.add("Less", place, cached), place, moved)
        shape = np.array([sizes.batch, sizes.own, sizes.keys, sizes.width], "int64")
        found = editor.add("GatherElements", joined, editor.add("Expand", index, shape), axis=2)
        used = editor.add("Less", place - sizes.rows, cached)
        return editor.add("Where", used, found, np.zeros((), self.dtype))

    def _shared(self, x: str) -> str:
        """Each head of keys or values for all that share it."""
        editor, sizes = self.editor, self.sizes
        share = sizes.heads // sizes.own
        if share == 1:
            return x
        shape = [sizes.batch, sizes.own, share, sizes.keys, sizes.width]
        wide = editor.add("Expand", editor.unsqueeze(x, 2), np.array(shape, "int64"))
        return editor.reshape(wide, [sizes.batch, sizes.heads, sizes.keys, sizes.width])

    # -- scores ------------------------------------------------------------------------------------------

    def _attend(self, q: str, k: str, v: str) -> str:
        editor = self.editor
        scale = self.attributes.get("scale", 0.0) or 1 / math.sqrt(self.sizes.width)
        product = editor.add("MatMul", q, editor.add("Transpose", k, perm=[0, 1, 3, 2]))
        scores = editor.add("Mul", product, np.array(scale, self.dtype))
        if cap := self.attributes.get("softcap", 0.0):
            number = np.array(cap, self.dtype)
            scores = editor.add(
                "Mul", editor.add("Tanh", editor.add("Div", scores, number)), number
            )
        scores = editor.add("Add", scores, self.bias) if self.bias else scores
        lowest = np.array(-65504.0 if self.dtype == np.float16 else -3.4028234663852886e38)
        seen = self._seen()
        scores = editor.add("Where", seen, scores, lowest.astype(self.dtype))
        return editor.add("MatMul", self._weights(scores), v)

    def _seen(self) -> str | np.ndarray:
        """Truth values that a key is no later than a row, and not further before it than the window."""
        editor, sizes = self.editor, self.sizes
        window = self.attributes.get("local_window_size", -1)
        editor.require_room(sizes.rows, sizes.keys)
        distance = (
            np.arange(sizes.rows)[:, None] + sizes.past - np.arange(sizes.keys)[None]
        ).astype("int64")
        if not self.is_ragged:
            seen = distance >= 0
            return seen if window <= 0 else seen & (distance < window)
        cached = editor.reshape(self._cached(), [-1, 1, 1, 1])
        moved = editor.add("Add", cached, distance - sizes.past)
        # Comparisons of integers with >= came later than opset 10.
        made = editor.add("Greater", moved, np.array(-1, "int64"))
        if window <= 0:
            return made
        near = editor.add("Less", moved, np.array(window, "int64"))
        return editor.add("And", made, near)

    def _weights(self, scores: str) -> str:
        """The softmax, perhaps beside a sink: a column whose weights are sliced off."""
        editor, sizes = self.editor, self.sizes
        smooth = self.attributes.get("smooth_softmax", 0) == 1
        if not smooth and not self.head_sink:
            return editor.add("Softmax", scores, axis=-1)
        shape = [sizes.batch, sizes.heads, sizes.rows, 1]
        sink: str | np.ndarray = np.zeros((1, 1, 1, 1), self.dtype)
        if self.head_sink:
            sink = editor.reshape(self.head_sink, [1, -1, 1, 1])
        column = editor.add("Expand", sink, np.array(shape, "int64"))
        weights = editor.add("Softmax", editor.add("Concat", scores, column, axis=3), axis=-1)
        return editor.slice(weights, 3, 0, sizes.keys)
