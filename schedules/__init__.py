"""Schedule templates: one idea per file, tried in order, a legal fallback last.

``schedule(func, target)`` is the only call that the rest of the package needs, and inside ``remembering()`` equal
functions are scheduled once. Who writes a template needs ``ScheduleTemplate``, ``structure`` to see what a function
computes, ``alternatives`` for what may be tuned, and ``register``; ``spaces`` and ``schedule_with`` try it out.
"""

from . import reducers  # noqa: F401  TVM is told of them at import
from .analysis import structure
from .base import Limits, ScheduleTemplate, limits
from .decisions import alternatives
from .registry import register, remembering, schedule, schedule_with, spaces, templates

__all__ = [
    "Limits",
    "ScheduleTemplate",
    "alternatives",
    "limits",
    "register",
    "remembering",
    "schedule",
    "schedule_with",
    "spaces",
    "structure",
    "templates",
]
