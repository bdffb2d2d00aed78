"""Partitioned groups: members that share nothing, each with a store of its own.

A concatenation that joins the members becomes one store per operand, and what follows it element by
element is pulled into the members: ``op(concat(a, b), y) = concat(op(a, y[:ca]), op(b, y[ca:]))``.
So the members stay independent, and blocks can be divided among them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..compat import Constant, relax
from ..errors import LoweringError
from ..strategies.decompose import member_results
from ..strategies.growth import POINTWISE
from .legalize_horizontal import emit_concat_stores
from .rewrite_members import GroupBody, as_float, make_constant, slice_of


def emit_partitioned(group: GroupBody) -> None:
    """Emit each member on its own; operators that several members read are computed by each."""
    names = [o.name for o in group.graph.operators]
    concat, results = member_results(group.graph, names, group.options)
    if concat is not None:
        _emit_concatenated(group, concat, results)
        return
    if group.options.get("join") == "concat":
        raise LoweringError("not all results of the group come from its concatenation")
    if len(results) < 2:
        raise LoweringError("the group has no independent members; their blocks cannot be divided")
    closures = [_closure(group, tensors) for tensors in results]
    if sum(map(len, closures)) == len(names):
        group.replay(names)
        return
    values = _emit_members(group, results)
    for var in group.results:
        group.values[var] = values[group.tensor_of[var]]


def _closure(group: GroupBody, tensors: Sequence[str]) -> list[str]:
    """The operators that some tensors depend on."""
    ends = [p.name for t in tensors if (p := group.graph.producer.get(t)) is not None]
    return [
        o.name
        for o in group.graph.operators
        if any(o.name == end or group.graph.depends(end, o.name) for end in ends)
    ]


def _emit_members(group: GroupBody, results: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Emit each member with all that it needs; return the values of the members' results."""
    found: dict[str, Any] = {}
    before = dict(group.values)
    for tensors in results:
        names = _closure(group, tensors)
        read = {t for name in names for t in group.graph.by_name[name].inputs}
        group.replay(names, needed=read | set(tensors))
        for tensor in tensors:
            if not group.graph.tensors[tensor].is_constant:
                found[tensor] = group.value_of(tensor)
        group.values = dict(before)
    return found


def _emit_concatenated(group: GroupBody, concat: str, results: Sequence[Sequence[str]]) -> None:
    """One store per operand of the concatenation, after what follows it."""
    call = group.calls[concat]
    if not isinstance(call.args[0], relax.Tuple):
        raise LoweringError("the concatenation takes a tuple apart; its operands are not members")
    names = [o.name for o in group.graph.operators]
    tail = [n for n in names if n != concat and not group.graph.depends(concat, n)]
    for name in tail:
        if group.graph.by_name[name].pattern not in POINTWISE:
            raise LoweringError(
                f"{group.graph.by_name[name].op} {name!r} mixes elements of several members of the concatenation; "
                "leave it out of the group"
            )
    values = _emit_members(group, results)
    axis = int(call.attrs.axis) % call.ty.ndim
    parts, begin = [], 0
    for field in call.args[0].fields:
        end = begin + int(field.ty.shape[axis])
        value = field if isinstance(field, Constant) else values[group.tensor_of[field]]
        part = _Part(group, axis, call.ty.ndim, begin, end, bool(tail) and group.widens)
        part.values[group.var_of[concat]] = part.wide(value)
        part.follow(tail)
        parts.append(part)
        begin = end
    for var in dict.fromkeys(group.results):
        stored = [group.rounded(part.values[var], var) for part in parts]
        store = emit_concat_stores(group.builder, stored, axis)
        group.values[var] = group.builder.emit(store, name_hint=var.name)


@dataclasses.dataclass
class _Part:
    """One operand's range of the concatenation, and what follows computed on that range alone.

    Attributes
    ----------
    group : GroupBody
        The group.
    axis, ndim : int
        Axis of the concatenation and rank of its result.
    begin, end : int
        The range.
    is_wide : bool
        Whether narrow values are computed on in float32.
    values : dict
        What stands, on this range, for variables of the old body.
    """

    group: GroupBody
    axis: int
    ndim: int
    begin: int
    end: int
    is_wide: bool
    values: dict[Any, Any] = dataclasses.field(default_factory=dict)
    _taken: dict[tuple[Any, int], Any] = dataclasses.field(default_factory=dict)

    def wide(self, value: Any) -> Any:
        """The float32 form of a value, where this part computes in float32."""
        if not self.is_wide:
            return value
        return self.group.wide(value) if isinstance(value, Constant) else self.group.widen(value)

    def follow(self, names: Sequence[str]) -> None:
        """Compute the operators that follow, in topological order."""
        for name in names:
            call = self.group.calls[name]
            axes = self._operand_axes(call)
            args = [self._operand(arg, axis) for arg, axis in zip(call.args, axes, strict=True)]
            if self.is_wide:
                value = self.group.emit_wide(call, args)
            else:
                value = self.group.builder.emit(relax.Call(call.op, args, call.attrs))
            self.values[self.group.var_of[name]] = value

    def _operand_axes(self, call: relax.Call) -> list[int | None]:
        """The axis of each operand that is cut; None where it has none (it is broadcast)."""
        if call.op.name == "relax.nn.prelu":  # its slope is a vector along one axis
            along = int(call.attrs.axis) % self.ndim == self.axis
            return [self.axis, 0 if along else None]
        axes: list[int | None] = []
        for arg in call.args:
            rank = arg.ty.ndim if isinstance(arg.ty, relax.TensorType) else 0
            at = self.axis - (self.ndim - rank)
            axes.append(at if at >= 0 else None)
        return axes

    def _operand(self, arg: Any, axis: int | None) -> Any:
        """An operand on this range."""
        is_cut = axis is not None and int(arg.ty.shape[axis]) > 1
        if isinstance(arg, Constant):
            return self.wide(self._cut(arg, axis) if is_cut else arg)
        if not isinstance(arg, relax.Var):
            return arg
        if arg in self.values:
            return self.values[arg]
        if arg not in self.group.values:
            raise LoweringError(
                f"what follows the concatenation also reads {arg.name!r} of a member; leave it out of the group"
            )
        if not is_cut:
            return self.wide(self.group.values[arg])
        if (arg, axis) not in self._taken:
            source = self.group.values[arg]
            taken = self.group.builder.emit(slice_of(source, axis, self.begin, self.end))
            self._taken[arg, axis] = self.wide(taken)
        return self._taken[arg, axis]

    def _cut(self, constant: Constant, axis: int) -> Constant:
        place = (slice(None),) * axis + (slice(self.begin, self.end),)
        dtype = str(constant.ty.dtype)
        if "float" not in dtype:
            return relax.const(constant.value.numpy()[place], dtype)
        return make_constant(as_float(constant)[place], dtype)
