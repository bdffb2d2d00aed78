"""Proposals → annotation: each group becomes a private Relax function with ``tvm_fusion.*`` attributes.

Nothing else in the module changes, and ``strip`` gives the module back binding for binding: the
original order stands in the attribute ``tvm_fusion.order`` of the calling function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compat import tvm
from ..frontend.outline import outline
from ..graph.relax import RelaxGraph
from ..strategies.base import Proposal

#: Attribute of groups, and of their PrimFuncs, whose roundings are kept.
NUMERICS = "tvm_fusion.numerics"


def annotate(
    mod: tvm.IRModule,
    found: RelaxGraph,
    groups: Mapping[str, Proposal],
    func_name: str = "main",
    *,
    numerics: str = "wide",
) -> tvm.IRModule:
    """Turn sets of operators into group functions.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module; it is left untouched.
    found : RelaxGraph
        The graph of ``mod[func_name]``.
    groups : mapping of str to Proposal
        Disjoint, jointly acyclic groups by the name of their function.
    func_name : str
        The function to annotate.
    numerics : str
        One of ``config.NUMERICS``; groups say so where it is ``"strict"``.

    Returns
    -------
    tvm.IRModule
        The module with one private function per group.
    """
    variables = {
        name: [
            binding.var for operator in proposal.operators for binding in found.bindings[operator]
        ]
        for name, proposal in groups.items()
    }
    attrs = {name: group_attrs(proposal) for name, proposal in groups.items()}
    if numerics != "wide":
        attrs = {name: {**own, NUMERICS: numerics} for name, own in attrs.items()}
    return outline(mod, variables, attrs, func_name)


def group_attrs(proposal: Proposal) -> dict[str, Any]:
    """Attributes of a group function. Nothing unique to one place goes in: equal blocks must hash equal."""
    return {
        "Primitive": True,
        "tvm_fusion.strategy": proposal.strategy,
        "tvm_fusion.depth": proposal.depth,
        "tvm_fusion.members": len(proposal.members),
        "tvm_fusion.parts": [
            _part_text(proposal, *part)
            for part in proposal.parts
            # A group that was cut out for checking has other names than its parts.
            if set(part[1]) <= set(proposal.operators)
        ],
        "tvm_fusion.options": dict(proposal.options),
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
        out.append((strategy, tuple(operators[int(i)] for i in positions.split(","))))
    return tuple(out)
