"""Operator fusion for TVM: groups as annotations in a ``Sequential``, one kernel per group, explained.

The names here are all that most users need. Importing the package is cheap: TVM is imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "CompiledModel": "build.executable", "FusionConfig": "config", "Plan": "planner.plan", "compile": "api",
    "explain": "api",
    "frontend": None, "load": "build.executable", "plan": "api", "report": None, "transform": None,
    "tune": "api", "verify": "api",
}  # fmt: skip

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("._version", __name__).__version__
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LAZY[name] is None:
        return importlib.import_module(f".{name}", __name__)
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
