"""ONNX's native checker, shape inference and simplifier, run where an untrusted graph can do no harm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import InvalidModelError
from . import child

if TYPE_CHECKING:
    import onnx

#: Limits of the child. Checking takes 0.3 s and simplifying 2 s for models of 1000 nodes, nearly
#: all of it imports.
CHECK_SECONDS, SIMPLIFY_SECONDS = 60, 180

#: The simplifier evaluates only what stays below this size: shape arithmetic, not weights.
FOLD_BYTES = 1 << 20

_WORKER = f"{__package__}.onnx_worker"

#: How TVM prints an operator inside a message.
_OPERATOR_REPR = re.compile(
    r'ir\.Op\(span=None.*?name="(?:relax\.)?([\w.]+)".*?support_level=\d+\)', re.DOTALL
)


def check_and_infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model`` checked, with local functions inlined and with shapes of intermediate values.

    Raises
    ------
    InvalidModelError
        If the checker or shape inference rejects the model, or dies of it.
    """
    return _answered(model, "check", "ONNX's checker")


def infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model``, not checked, with shapes of intermediate values as far as ONNX knows their operators.

    Raises
    ------
    InvalidModelError
        If shape inference rejects the model, or dies of it.
    """
    return _answered(model, "infer", "ONNX's shape inference")


def _answered(model: onnx.ModelProto, stage: str, step: str) -> onnx.ModelProto:
    """What a stage of the worker makes of a model."""
    import onnx

    data = model.SerializeToString()
    try:
        data = child.run(_WORKER, {"stage": stage}, data, step=step, seconds=CHECK_SECONDS)
    except child.ChildFailure as error:
        raise InvalidModelError(f"the model is not valid ONNX: {first_line(str(error))}") from None
    return onnx.load_model_from_string(data)


def simplify(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model`` with shape arithmetic and other small constant expressions evaluated.

    Raises
    ------
    ChildFailure
        If the simplifier is missing, refuses the model, crashes or takes too long.
    """
    import onnx

    request = {"stage": "simplify", "fold_bytes": FOLD_BYTES}
    data = model.SerializeToString()
    data = child.run(_WORKER, request, data, step="the ONNX simplifier", seconds=SIMPLIFY_SECONDS)
    return onnx.load_model_from_string(data)


def first_line(message: str, limit: int = 300) -> str:
    """Return what a native error message says, as one line of at most ``limit`` characters."""
    message = _OPERATOR_REPR.sub(r"\1", message)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines[0] if lines else "")
    return text if len(text) <= limit else text[: limit - 3] + "..."
