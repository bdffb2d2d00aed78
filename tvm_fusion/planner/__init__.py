"""Planner: verdicts and costs → decisions."""

from .plan import SCHEMA, Group, Plan, Region, Rejection, TargetInfo, Totals, Ungrouped
from .planner import Candidate, solve

__all__ = [
    "SCHEMA", "Candidate", "Group", "Plan", "Region", "Rejection", "TargetInfo", "Totals", "Ungrouped", "solve",
]  # fmt: skip
