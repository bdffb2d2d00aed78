"""Import of modules saved by ``tvm.ir.save_json``: Relax of this TVM, or Relay of an older one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..compat import tvm
from ..errors import InvalidModelError
from . import relax, relay


def load(
    path: str | os.PathLike[str],
    *,
    shape: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
    params: str | os.PathLike[str] | None = None,
) -> tvm.IRModule:
    """Import a saved module, whichever dialect it is in; see ``frontend.load``."""
    try:
        data = Path(path).read_bytes()
        document: Any = json.loads(
            data
        )  # TVM's own reader reports a position in C++ source instead
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it does not fit into memory"
        raise InvalidModelError(f"{str(path)!r} is not a readable JSON file: {reason}") from None
    if relay.is_relay(document):
        del data
        return relay.from_document(document, str(path), params=params, shape=shape, dtype=dtype)
    if not isinstance(document, dict):
        raise InvalidModelError(f"{str(path)!r} is JSON, but no module saved by tvm.ir.save_json")
    del document
    values = relay.load_params(params) if params is not None else None
    return relax.from_json(data, str(path), shape=shape, dtype=dtype, params=values)
