"""Strategies: dataflow graph → proposals. They edit nothing and judge nothing."""

from .base import Proposal, Strategy
from .horizontal import Horizontal
from .vertical import Vertical

__all__ = ["Horizontal", "Proposal", "Strategy", "Vertical"]
