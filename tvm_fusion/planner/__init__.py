"""Planner: verdicts and costs → decisions."""

from .candidates import Candidate
from .plan import (
    SCHEMA,
    Group,
    Part,
    Plan,
    Region,
    Rejection,
    Search,
    TargetInfo,
    Totals,
    Ungrouped,
)
from .planner import Solution, solve

__all__ = [
    "SCHEMA", "Candidate", "Group", "Part", "Plan", "Region", "Rejection", "Search", "Solution",
    "TargetInfo", "Totals", "Ungrouped", "solve",
]  # fmt: skip
