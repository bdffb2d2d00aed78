"""The node list of a JSON file saved by ``tvm.ir.save_json``: every access checked, nothing trusted."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidModelError, UnsupportedOperatorError
from .fields import ATTRIBUTES, STRUCTURE

_ATTRS = "relay.attrs."

#: Arrays in attributes are at most this deep (pad_width is an array of arrays).
_MAX_NESTING = 8

#: What stands for a symbolic number (``?``, a variable, an expression) in a shape or an attribute.
SYMBOLIC = float("nan")


class NodeTable:
    """The nodes of a saved module.

    Parameters
    ----------
    document : object
        The parsed JSON file.

    Raises
    ------
    InvalidModelError
        If the document is not a node list; any method, if a node is not what is asked for.
    """

    def __init__(self, document: Any) -> None:
        if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
            raise InvalidModelError("it is no node list of tvm.ir.save_json: save the module again")
        if "arg_nodes" in document:
            raise InvalidModelError(
                "it is the graph that relay.build made, not a Relay module: save the module with tvm.ir.save_json "
                "before it is built"
            )
        self._nodes = document["nodes"]
        self.root = document.get("root")
        self.arrays = document.get("b64ndarrays", [])
        attrs = document.get("attrs")
        self.version = str(attrs.get("tvm_version", "")) if isinstance(attrs, dict) else ""
        if not isinstance(self.arrays, list):
            raise InvalidModelError("its b64ndarrays are no list: the file is damaged")

    def __len__(self) -> int:
        return len(self._nodes)

    def _node(self, index: Any) -> dict[str, Any]:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(self):
            raise InvalidModelError(
                f"it refers to node {index!r}, but has nodes 0 to {len(self) - 1}: the file is "
                "damaged or truncated"
            )
        node = self._nodes[index]
        if not isinstance(node, dict) or not isinstance(node.get("type_key"), str):
            raise InvalidModelError(f"node {index} has no type_key: the file is damaged")
        return node

    def kind(self, index: int) -> str:
        """Return the class of a node; ``""`` is null."""
        return self._node(index)["type_key"]

    def describe(self, index: int) -> str:
        """Return a node's place in words."""
        return f"node {index} ({self.kind(index) or 'null'})"

    def expect(self, index: int, *kinds: str) -> None:
        """Raise unless a node is of one of these classes."""
        if self.kind(index) not in kinds:
            raise InvalidModelError(
                f"{self.describe(index)} stands where {' or '.join(kinds)} must be: the file is damaged"
            )

    def text(self, index: int) -> str:
        """Return the text of a String or the name of an Op."""
        node = self._node(index)
        text = node.get("repr_str", "")
        if "repr_b64" in node:
            text = _encoded_text(node["repr_b64"])
        if not isinstance(text, str):
            raise InvalidModelError(f"{self.describe(index)} holds no text: the file is damaged")
        return text

    def items(self, index: int) -> Sequence[int]:
        """Return the node indices that an Array or a Map holds (null: none)."""
        if self.kind(index) == "":
            return ()
        self.expect(index, "Array", "Map")
        data = self._node(index).get("data", [])
        if not isinstance(data, list):
            raise InvalidModelError(f"{self.describe(index)} holds no list: the file is damaged")
        for item in data:
            self._node(item)
        return data

    def mapping(self, index: int) -> Mapping[str, int]:
        """Return a Map with string keys as node indices by key (null: an empty one)."""
        if self.kind(index) == "":
            return {}
        self.expect(index, "Map")
        keys, values = self._node(index).get("keys", []), self.items(index)
        if (
            not isinstance(keys, list)
            or not all(isinstance(key, str) for key in keys)
            or len(keys) != len(values)
        ):
            raise InvalidModelError(
                f"{self.describe(index)} has not one value for each key: the file is damaged"
            )
        return dict(zip(keys, values, strict=True))

    def fields(self, index: int) -> Mapping[str, str]:
        """Return a node's fields as they are written, after a check that they are known ones."""
        kind, attrs = self.kind(index), self._node(index).get("attrs", {})
        table = self._table(kind)
        if table is None:
            raise InvalidModelError(
                f"{self.describe(index)} is of a class that is not known here: save the module with TVM 0.8 to "
                "0.16, in Relay"
            )
        if not isinstance(attrs, dict) or not all(isinstance(v, str) for v in attrs.values()):
            raise InvalidModelError(f"{self.describe(index)} has no fields: the file is damaged")
        unknown = sorted(set(attrs) - set(table))
        if unknown:
            raise InvalidModelError(
                f"{self.describe(index)} has the unknown field {unknown[0]!r}: save the module with TVM 0.8, 0.9 "
                "or 0.16"
            )
        return attrs

    @staticmethod
    def _table(kind: str) -> Mapping[str, str] | None:
        if kind.startswith(_ATTRS):
            return ATTRIBUTES.get(kind.removeprefix(_ATTRS))
        return STRUCTURE.get(kind)

    def get(self, index: int, name: str) -> Any:
        """Return one field: a number, a truth value or a text, and a node index for a reference.

        A reference that is absent is 0, the null node.
        """
        kind = self.kind(index)
        form = (self._table(kind) or {}).get(name, "-")
        raw = self.fields(index).get(name)
        if raw is None:
            if form == "r":
                return 0
            raise InvalidModelError(
                f"{self.describe(index)} lacks the field {name!r}: the file is damaged"
            )
        return self._parse(index, name, form, raw)

    def _parse(self, index: int, name: str, form: str, raw: str) -> Any:
        try:
            if form in ("r", "i"):
                number = _integer(raw)
                return self._node(number) and number if form == "r" else number
            if form == "f":
                return float(raw)
            if form == "b":
                return {"0": False, "1": True}[raw]
        except (ValueError, KeyError):
            raise InvalidModelError(
                f"{self.describe(index)} has {raw[:40]!r} in its field {name!r}: the file is damaged"
            ) from None
        if form == "t" and raw.isdecimal():
            number = int(raw) if len(raw) < 12 else -1
            if self.kind(number) == "":  # an undefined String
                return ""
            self.expect(number, "runtime.String")
            return self.text(number)
        return raw

    def attributes(self, index: int, op: str) -> dict[str, Any]:
        """Return the attributes of an operator (null: none) as Python values.

        Raises
        ------
        UnsupportedOperatorError
            If no operator with attributes of this class is known.
        """
        kind = self.kind(index)
        if kind == "":
            return {}
        if self._table(kind) is None or not kind.startswith(_ATTRS):
            raise UnsupportedOperatorError(
                f"operator {op} has attributes of the class {kind} (node {index}), which cannot be imported"
            )
        out = {}
        for name, form in ATTRIBUTES[kind.removeprefix(_ATTRS)].items():
            if form == "-" or name not in self.fields(index):
                continue
            value = self.get(index, name)
            out[name] = self.value(value) if form == "r" else value
        return out

    def value(self, index: int, depth: int = 0) -> Any:
        """Return a node of an attribute as a Python value; numbers that are not fixed are ``SYMBOLIC``."""
        kind = self.kind(index)
        if kind == "":
            return None
        if depth > _MAX_NESTING:
            raise InvalidModelError(
                f"{self.describe(index)} is nested too deeply: the file is damaged"
            )
        if kind == "runtime.String":
            return self.text(index)
        if kind in ("IntImm", "FloatImm"):
            return self.get(index, "value")
        if kind == "Array":
            return [self.value(item, depth + 1) for item in self.items(index)]
        if kind == "Map":
            return {key: self.value(item, depth + 1) for key, item in self.mapping(index).items()}
        if kind.startswith("tir."):
            return SYMBOLIC
        raise InvalidModelError(
            f"{self.describe(index)} stands where a plain value must be: the file is damaged"
        )


def _encoded_text(raw: Any) -> str | None:
    """Decode a text that is not printable ASCII: its length in eight bytes, then UTF-8; None if it is none."""
    try:
        data = base64.b64decode(raw, validate=True)
        return data[8:].decode() if int.from_bytes(data[:8], "little") == len(data) - 8 else None
    except (TypeError, ValueError):
        return None


def _integer(raw: str) -> int:
    """Parse a decimal integer of at most 64 bits; ``int`` would take underscores and a million digits."""
    digits = raw.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
        raise ValueError(raw)
    return int(raw)


def is_symbolic(value: Any) -> bool:
    """Whether a value is ``SYMBOLIC``."""
    return isinstance(value, float) and math.isnan(value)
