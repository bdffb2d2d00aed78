"""Fusion annotations of a Relay module → group functions of the canonical Relax module."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ...compat import relax, tvm
from ...errors import InvalidModelError, PlanError
from ..canonical.rewrite import bindings_of, op_name, variables
from ..outline import outline
from .graph import Group, RelayGraph

#: Relax operators that only say how the same elements lie.
_VIEWS = ("reshape", "permute_dims", "expand_dims", "squeeze", "flatten")

#: Relay operators that are such views themselves.
_RELAY_VIEWS = (
    "reshape", "reshape_like", "transpose", "expand_dims", "squeeze", "nn.batch_flatten", "layout_transform",
)  # fmt: skip

_PART = re.compile(r"(vertical|horizontal|cross|compound):\d+(,\d+)*")


def keep_groups(mod: tvm.IRModule, graph: RelayGraph) -> tvm.IRModule:
    """Make the operators of each annotation a private function with ``tvm_fusion.*`` attributes.

    An annotation of which clean-up leaves fewer than two operators, or which it has made
    impossible, is left out with a warning.

    Parameters
    ----------
    mod : IRModule
        The canonical module; its bindings carry the names of the graph's nodes.
    graph : RelayGraph
        The model as it was read.

    Raises
    ------
    InvalidModelError
        If annotations need each other's results, or an attribute is not what it must be.
    """
    if not graph.groups:
        return mod
    found = _Found(mod, graph)
    groups: dict[str, list[Any]] = {}
    attrs: dict[str, dict[str, Any]] = {}
    dropped = []
    for number, group in enumerate(graph.groups):
        members = found.members(number)
        name = _name(group, number, groups)
        if sum(found.works(i) for i in members) < 2 or not found.is_convex(members):
            dropped.append(name)
            continue
        groups[name] = [found.bindings[i].var for i in members]
        attrs[name] = _attrs(name, group, found, members)
    if dropped:
        warnings.warn(
            f"{len(dropped)} of {len(graph.groups)} fusion annotations ({', '.join(dropped[:3])}) hold fewer than two "
            "operators after clean-up, or are no longer possible; they are left out",
            stacklevel=3,
        )
    try:
        return outline(mod, groups, attrs)
    except PlanError as error:
        raise InvalidModelError(f"the fusion annotations contradict each other: {error}") from None


class _Found:
    """The bindings of the canonical module, and to which annotation each belongs."""

    def __init__(self, mod: tvm.IRModule, graph: RelayGraph) -> None:
        self.bindings = list(bindings_of(mod["main"]))
        self._position = {binding.var: i for i, binding in enumerate(self.bindings)}
        self.reads = [
            [self._position[v] for v in variables(b.value) if v in self._position]
            for b in self.bindings
        ]
        self.users: list[list[int]] = [[] for _ in self.bindings]
        for user, sources in enumerate(self.reads):
            for source in sources:
                self.users[source].append(user)
        by_name = {node.name: node for node in graph.nodes}
        self._groups: dict[int, list[int]] = {}
        self._artefacts: set[int] = set()
        group_of: dict[int, int | None] = {}
        for i, binding in enumerate(self.bindings):
            node = by_name.get(binding.var.name)
            group = node.group if node is not None else None
            if isinstance(binding.value, relax.TupleGetItem) and self.reads[i]:
                group = group_of[self.reads[i][0]]  # an item belongs to what computes the tuple
            group_of[i] = group
            if group is not None:
                self._groups.setdefault(group, []).append(i)
            if node is not None and node.op not in _RELAY_VIEWS and self._is_view(i):
                self._artefacts.add(i)

    def _is_view(self, i: int) -> bool:
        return op_name(self.bindings[i].value) in _VIEWS

    def works(self, i: int) -> bool:
        """Whether a binding computes something."""
        return not self._is_view(i) and not isinstance(self.bindings[i].value, relax.TupleGetItem)

    def members(self, number: int) -> list[int]:
        """Return an annotation's bindings, without the transposes and reshapes at its ends that import made."""
        inside = set(self._groups.get(number, ()))
        while True:
            ends = {
                i
                for i in inside & self._artefacts
                if not inside & set(self.reads[i]) or not inside & set(self.users[i])
            }
            if not ends:
                return sorted(inside)
            inside -= ends

    def is_convex(self, members: Sequence[int]) -> bool:
        """Whether no path leaves the members and comes back."""
        inside, outside = set(members), set()
        for i in range(members[0], members[-1] + 1):
            if i in inside:
                if outside & set(self.reads[i]):
                    return False
            elif (inside | outside) & set(self.reads[i]):
                outside.add(i)
        return True

    def depth(self, members: Sequence[int]) -> int:
        """Return how many working operators stand on the longest path."""
        longest: dict[int, int] = {}
        for i in members:
            before = max((longest.get(source, 0) for source in self.reads[i]), default=0)
            longest[i] = before + self.works(i)
        return max(longest.values())


def _name(group: Group, number: int, taken: Mapping[str, Any]) -> str:
    """Return a name for a group's function: that of the global function in Relay, if it had one."""
    name = group.name or f"fused_{group.strategy}_{number}"
    while name in taken or name == "main":
        name = f"{name}_{number}"
    return name


def _attrs(name: str, group: Group, found: _Found, members: Sequence[int]) -> dict[str, Any]:
    """Return the attributes of a group's function, complete and of the right types."""
    given = group.attrs
    working = sum(found.works(i) for i in members)
    out = {
        "Primitive": True,
        "tvm_fusion.strategy": group.strategy,
        "tvm_fusion.depth": given.get("tvm_fusion.depth", found.depth(members)),
        "tvm_fusion.members": given.get("tvm_fusion.members", 1),
        "tvm_fusion.parts": _parts(name, given.get("tvm_fusion.parts", []), working),
        "tvm_fusion.options": {
            str(key): str(value) for key, value in given.get("tvm_fusion.options", {}).items()
        },
    }
    if "tvm_fusion.numerics" in given:
        out["tvm_fusion.numerics"] = given["tvm_fusion.numerics"]
    return out


def _parts(name: str, parts: Sequence[Any], working: int) -> list[str]:
    """Return the parts of a compound group; none where they name operators that clean-up has removed."""
    for text in parts:
        if not isinstance(text, str) or not _PART.fullmatch(text):
            raise InvalidModelError(
                f'group {name!r} has the part {text!r}, which is not of the form "vertical:0,1"'
            )
    positions = [int(n) for text in parts for n in text.partition(":")[2].split(",")]
    return list(parts) if max(positions, default=0) < working else []
