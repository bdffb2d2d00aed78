"""The fusion passes for a TVM that still has Relay, with the graph, strategies, guards and planner of the others.

Imported only when asked for: such a TVM (0.8 to 0.19, tested with 0.16) cannot share an interpreter
with the one that the rest of the package runs on. docs/relay.md says how to install both.
"""

from .fuse import CompoundFusion, CrossFusion, Fuse, HorizontalFusion, VerticalFusion, explain, plan
from .strip_fusion import StripFusion

__all__ = [
    "CompoundFusion", "CrossFusion", "Fuse", "HorizontalFusion", "StripFusion", "VerticalFusion", "explain",
    "plan",
]  # fmt: skip
