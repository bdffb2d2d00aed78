"""What the commands warn of once a model is imported: options that cost fusions without a word."""

from __future__ import annotations

import difflib
import fnmatch
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..compat import tvm


def warn_of_idle_patterns(patterns: Sequence[str], module: tvm.IRModule) -> None:
    """Warn of patterns of ``--deny`` that match no operator: they are probably misspelt."""
    from ..transform.fuse import graph_of

    operators = graph_of(module).operators
    names = {name for o in operators for name in (o.op, o.name, *o.source_names)}
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, sorted(names), n=2)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            warnings.warn(f"--deny {pattern!r} matches no operator{hint}", stacklevel=3)


def warn_of_open_inputs(module: tvm.IRModule) -> None:
    """Warn of inputs whose sizes the model leaves open: what depends on them is compiled, and never fused."""
    from ..compat import relax, tirx

    for param in module["main"].params:
        if not isinstance(param.ty, relax.TensorType) or param.ty.shape is None:
            continue
        names = [str(extent) for extent in param.ty.shape if not isinstance(extent, tirx.IntImm)]
        shape = ["N" if str(extent) in names else str(int(extent)) for extent in param.ty.shape]
        if names:
            warnings.warn(
                f"input {param.name!r} leaves {' and '.join(names)} open, and what depends on it is not "
                f"fused; fix it with --shape {param.name}={','.join(shape)}",
                stacklevel=3,
            )
