"""Run ONNX's native checker, shape inference and simplifier where they can do no harm: in a child process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidModelError

if TYPE_CHECKING:
    import onnx

#: Limits of the child. Checking takes 0.3 s and simplifying 2 s for models of 1000 nodes, nearly all of it imports.
CHECK_SECONDS, SIMPLIFY_SECONDS = 60, 180
MEMORY_BYTES = 8 << 30

#: The simplifier evaluates only what stays below this size: shape arithmetic, not weights.
FOLD_BYTES = 1 << 20

# The worker is run by its path with the parent's sys.path: importing it as part of the package would import TVM, and
# running it as a script would put this folder, with its own onnx.py and torch.py, first on sys.path.
_LAUNCH = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)

#: How TVM prints an operator inside a message.
_OPERATOR_REPR = re.compile(r'ir\.Op\(span=None.*?name="(?:relax\.)?([\w.]+)".*?support_level=\d+\)', re.DOTALL)


class NativeFailure(Exception):
    """The child refused the model, crashed, or ran out of time or memory; the message says which."""


def check_and_infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model`` checked, with local functions inlined and with shapes of intermediate values.

    Raises
    ------
    InvalidModelError
        If the checker or shape inference rejects the model, or dies of it.
    """
    try:
        return _run(model, "check", CHECK_SECONDS)
    except NativeFailure as error:
        raise InvalidModelError(f"the model is not valid ONNX: {error}") from None


def simplify(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model`` with shape arithmetic and other small constant expressions evaluated.

    Raises
    ------
    NativeFailure
        If the simplifier is missing, refuses the model, crashes or takes too long.
    """
    return _run(model, "simplify", SIMPLIFY_SECONDS)


def _run(model: onnx.ModelProto, stage: str, seconds: int) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    request = {"stage": stage, "memory_bytes": MEMORY_BYTES, "fold_limit": FOLD_BYTES}
    worker = str(Path(__file__).with_name("onnx_worker.py"))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LAUNCH, json.dumps(sys.path), worker, json.dumps(request)],
            input=model.SerializeToString(),
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NativeFailure(f"ONNX's {stage} step took more than {seconds} s") from None
    head, _, body = done.stdout.partition(b"\n")
    if done.returncode != 0 or not head:
        reason = (
            f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        )
        raise NativeFailure(f"ONNX's {stage} step crashed on it ({reason})")
    header = json.loads(head)
    if header:
        raise NativeFailure(first_line(header["message"]) or header["error"])
    try:
        return onnx.load_model_from_string(body)
    except DecodeError:
        raise NativeFailure(f"ONNX's {stage} step returned no readable model") from None


def first_line(message: str, limit: int = 300) -> str:
    """Return what a native error message says, as one line of at most ``limit`` characters."""
    message = _OPERATOR_REPR.sub(r"\1", message)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines[0] if lines else "")
    return text if len(text) <= limit else text[: limit - 3] + "..."
