"""Plans and explanations for people: text for a terminal, a page for a browser."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "render_explanation": "explain", "render_html": "html", "render_plan": "text",
    "render_tuning": "tuning_html",
}  # fmt: skip

__all__ = ["render_explanation", "render_html", "render_plan", "render_tuning"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
