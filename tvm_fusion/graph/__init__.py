"""The IR-neutral dataflow graph on which strategies, guards and planner work."""

from .dataflow import DataflowGraph, Operator, Tensor

__all__ = ["DataflowGraph", "Operator", "Tensor"]
