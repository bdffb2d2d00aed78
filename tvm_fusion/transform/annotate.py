"""Proposals → annotation: each group becomes a private Relax function with ``tvm_fusion.*`` attributes.

Nothing else in the module changes, and ``strip`` gives the module back binding for binding: the
original order stands in the attribute ``tvm_fusion.order`` of the calling function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compat import tvm
from ..frontend.outline import outline
from ..graph.relax import RelaxGraph
from ..strategies import attributes
from ..strategies.attributes import NUMERICS, parts_from
from ..strategies.base import Proposal

__all__ = ["NUMERICS", "annotate", "group_attrs", "parts_from"]


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
    attrs = {name: group_attrs(proposal, numerics) for name, proposal in groups.items()}
    return outline(mod, variables, attrs, func_name)


def group_attrs(proposal: Proposal, numerics: str = "wide") -> dict[str, Any]:
    """Attributes of a Relax group function (`strategies.attributes`)."""
    return {"Primitive": True, **attributes.group_attrs(proposal, numerics)}
