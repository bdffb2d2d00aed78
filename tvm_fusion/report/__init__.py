"""Plans as text for people."""

from .text import render_plan

__all__ = ["render_plan"]
