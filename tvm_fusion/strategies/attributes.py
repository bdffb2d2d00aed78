"""Groups as attributes of functions, the same in every dialect: what annotation writes and reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..graph.dataflow import DataflowGraph
from .base import OPTIONS, Proposal, depth_of
from .decompose import decompose

#: Attribute that marks a group function.
STRATEGY = "tvm_fusion.strategy"

#: Attribute of groups whose roundings are kept.
NUMERICS = "tvm_fusion.numerics"


def group_attrs(proposal: Proposal, numerics: str = "wide") -> dict[str, Any]:
    """Attributes of a group function. Nothing unique to one place goes in: equal blocks must hash equal.

    Parameters
    ----------
    proposal : Proposal
        The group.
    numerics : str
        One of ``config.NUMERICS``; groups say so where it is ``"strict"``.
    """
    strict = {} if numerics == "wide" else {NUMERICS: numerics}
    return {
        STRATEGY: proposal.strategy,
        "tvm_fusion.depth": proposal.depth,
        "tvm_fusion.members": len(proposal.members),
        "tvm_fusion.parts": [
            _part_text(proposal, *part)
            for part in proposal.parts
            # A group that was cut out for checking has other names than its parts.
            if set(part[1]) <= set(proposal.operators)
        ],
        "tvm_fusion.options": dict(proposal.options),
        **strict,
    }


def _part_text(proposal: Proposal, strategy: str, operators: tuple[str, ...]) -> str:
    """A part as strategy and positions in the group, as ``"vertical:0,1"``: names would be unique."""
    return f"{strategy}:{','.join(str(proposal.operators.index(name)) for name in operators)}"


def parts_from(attrs: Mapping[str, Any], operators: Sequence[str]) -> tuple[Any, ...]:
    """Read the parts of an annotated group back.

    Parameters
    ----------
    attrs : mapping
        Attributes of the group function.
    operators : sequence of str
        Its operators in topological order.
    """
    out = []
    for text in attrs.get("tvm_fusion.parts", ()):
        strategy, _, positions = str(text).partition(":")
        places = [int(i) for i in positions.split(",")]
        if max(places) < len(operators):  # another pass may have removed operators since
            out.append((strategy, tuple(operators[i] for i in places)))
    return tuple(out)


def proposal_from(graph: DataflowGraph, names: Iterable[str], attrs: Mapping[str, Any]) -> Proposal:
    """Read an annotated group back as a proposal.

    Parameters
    ----------
    graph : DataflowGraph
        The graph of the module without its groups.
    names : iterable of str
        Operators of the group.
    attrs : mapping
        Attributes of the group function.
    """
    operators = graph.sort(names)
    strategy = str(attrs[STRATEGY])
    given = attrs.get("tvm_fusion.options") or {}
    # Another hand may have written what this package does not know.
    options = tuple(
        sorted((str(k), str(v)) for k, v in given.items() if str(v) in OPTIONS.get(str(k), ()))
    )
    shape = decompose(graph, operators, dict(options))
    wide = strategy != "vertical" and shape.branches
    members = tuple(b.operators for b in shape.branches) if wide else (operators,)
    return Proposal(
        strategy, operators, shape.anchors, members, depth_of(graph, operators),
        parts_from(attrs, operators), options,
    )  # fmt: skip
