"""What earlier runs of a model asked for, so that the next one plans with the same knowledge.

The planner asks for the kernels of what it chooses, and afterwards takes into account whatever is known. A run that
begins anew knows only the kernels of what it explores, although those of all that was asked for are on record: it could
choose otherwise and measure again, with its budget spent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence

from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .summary import GroupNote, Summary


def graph_digest(graph: DataflowGraph) -> str:
    """Name a graph by its operators, their tensors and how they are connected, in 16 hex digits."""
    tensors = {name: (t.shape, t.dtype) for name, t in graph.tensors.items()}
    operators = [(o.name, o.op, o.inputs, o.outputs) for o in graph.operators]
    text = json.dumps([operators, sorted(tensors.items()), graph.outputs], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def notes_of(asked: Iterable[Proposal], explored: Iterable[Proposal]) -> tuple[GroupNote, ...]:
    """What the planner asked for beyond what every run explores, as it is kept."""
    known = set(explored)
    others = dict.fromkeys(p for p in asked if p not in known)
    return tuple(GroupNote(*dataclasses.astuple(p)) for p in others)


def asked_before(graph: DataflowGraph, runs: Sequence[Summary]) -> list[Proposal]:
    """What runs of the same graph asked for, in their order."""
    own = graph_digest(graph)
    notes = [note for run in runs if run.graph == own for note in run.asked]
    return [Proposal(*dataclasses.astuple(note)) for note in dict.fromkeys(notes)]
