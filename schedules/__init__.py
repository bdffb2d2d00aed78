"""Schedule templates: one idea per file, tried in order, a legal fallback last.

``schedule(func, target)`` is the only call that the rest of the package needs; ``register`` adds a template, and inside
``remembering()`` equal functions are scheduled once.
"""

from . import reducers  # noqa: F401  TVM is told of them at import
from .base import Limits, ScheduleTemplate, limits
from .registry import register, remembering, schedule, templates

__all__ = [
    "Limits",
    "ScheduleTemplate",
    "limits",
    "register",
    "remembering",
    "schedule",
    "templates",
]
