"""Strategies: dataflow graph → proposals. They edit nothing and judge nothing."""

from .base import Proposal, Strategy
from .compound import Compound
from .cross import Cross
from .horizontal import Horizontal
from .vertical import Vertical

__all__ = ["Compound", "Cross", "Horizontal", "Proposal", "Strategy", "Vertical"]
