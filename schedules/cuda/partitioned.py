"""The partitioned horizontal kernel: independent members side by side in one launch.

Each member is scheduled by the ordinary templates as if it were alone. The scheduled members are lowered up to their
barriers and become the branches of one kernel, whose blocks are divided among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...compat import Target, tirx
from ...errors import LoweringError
from .. import decisions, registry
from ..base import CONSTANTS, PACKED, ScheduleTemplate, limits
from .partition_lower import THREAD_TAGS, FlatMember, lower_member, substitute
from .partition_members import split_members
from .partition_merge import merge_members

#: Threads of a block above which a member is scheduled again with fewer, if others want far fewer: their surplus
#: threads would take room on a multiprocessor and do nothing.
_COMMON_THREADS = 256


class Partitioned(ScheduleTemplate):
    """Schedule a function of at least two independent members as one kernel.

    The result is flat (no blocks are left to schedule), with a one-dimensional grid and a one-dimensional block. A
    member gets as many blocks as it has alone; a block has as many threads as the largest member wants.
    """

    name = "partitioned"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the merged kernel; ``None`` for a single member, or when a member is not one mergeable kernel."""
        parts = split_members(func)
        if parts is None:
            return None
        parts = _with_constants(func, parts)
        members = []
        for number, part in enumerate(parts):
            with decisions.part(f"member{number}"):
                members.append(member_of(part, target))
        if any(member is None for member in members):
            return None
        members = _with_common_threads(parts, members, target)
        bounds = limits(target)
        if max(member.size(THREAD_TAGS) for member in members) > bounds.threads:
            return None
        params, packed = _packed_params(func, members)
        merged = merge_members(func, members, bounds, target, params)
        return merged.with_attr(PACKED, packed) if merged is not None and packed else merged


def _with_constants(func: tirx.PrimFunc, parts: Sequence[tirx.PrimFunc]) -> list[tirx.PrimFunc]:
    """Tell members which of their parameters are constants; one that several have stays as it is."""
    numbers = (func.attrs.get(CONSTANTS) or ()) if func.attrs is not None else ()
    known = [func.params[int(number)] for number in numbers]
    own = [p for p in known if sum(_has(part.params, p) for part in parts) == 1]
    return [
        part.with_attr(CONSTANTS, [i for i, p in enumerate(part.params) if _has(own, p)])
        for part in parts
    ]


def _has(params: Sequence[tirx.Var], param: tirx.Var) -> bool:
    return any(param.same_as(other) for other in params)


def _packed_params(
    func: tirx.PrimFunc, members: Sequence[FlatMember]
) -> tuple[list[tirx.Var], dict[str, list[int]]]:
    """Parameters of the kernel, of which members want some permuted, and these permutations by number."""
    params, packed = list(func.params), {}
    for number, param in enumerate(func.params):
        for member in members:
            for old, new, axes in member.packed:
                if old.same_as(param):
                    params[number], packed[str(number)] = new, axes
    return params, packed


def member_of(part: tirx.PrimFunc, target: Target) -> FlatMember | None:
    """Schedule and lower one of `split_members`; None when it is not one mergeable kernel."""
    try:
        scheduled, _ = registry.schedule(part, target)
    except LoweringError:
        return None
    # A template may write a function of parameters of its own.
    wanted = (scheduled.attrs.get(PACKED) or {}).items()
    axes = {int(number): [int(axis) for axis in order] for number, order in wanted}
    pairs = list(enumerate(zip(part.params, scheduled.params, strict=True)))
    renamed = {new: old for i, (old, new) in pairs if i not in axes and not new.same_as(old)}
    if renamed:
        params = [new if i in axes else old for i, (old, new) in pairs]
        body = substitute(scheduled.body, renamed)
        scheduled = tirx.PrimFunc(params, body, scheduled.ret_type, scheduled.attrs)
    member = lower_member(scheduled, target)
    if member is not None:
        member.packed = [(old, new, axes[i]) for i, (old, new) in pairs if i in axes]
    return member


def _with_common_threads(
    parts: Sequence[tirx.PrimFunc], members: Sequence[FlatMember], target: Target
) -> list[FlatMember]:
    """Schedule members that want very many threads again with fewer, where others want few."""
    wanted = [member.size(THREAD_TAGS) for member in members]
    if max(wanted) < max(2 * min(wanted), _COMMON_THREADS + 1):
        return list(members)
    fewer = {**dict(target.attrs.items()), "max_threads_per_block": _COMMON_THREADS}
    narrow = Target({"kind": target.kind.name, **fewer})
    found = []
    for number, (part, member, count) in enumerate(zip(parts, members, wanted, strict=True)):
        with decisions.part(f"narrow{number}"):
            fewer = member_of(part, narrow) if count > _COMMON_THREADS else None
        found.append(fewer or member)
    return found
