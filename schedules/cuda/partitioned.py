"""The partitioned horizontal kernel: independent members side by side in one launch.

Each member is scheduled by the ordinary templates as if it were alone. The scheduled members are lowered up to their
barriers and become the branches of one kernel, whose blocks are divided among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...compat import Target, tirx
from ...errors import LoweringError
from .. import registry
from ..base import ScheduleTemplate, limits
from .partition_lower import THREAD_TAGS, FlatMember, lower_member
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

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool = False
    ) -> tirx.PrimFunc | None:
        """Return the merged kernel; ``None`` for a single member, or when a member is not one mergeable kernel."""
        parts = split_members(func)
        if parts is None:
            return None
        members = [_lower(part, target) for part in parts]
        if any(member is None for member in members):
            return None
        members = _with_common_threads(parts, members, target)
        bounds = limits(target)
        if max(member.size(THREAD_TAGS) for member in members) > bounds.threads:
            return None
        return merge_members(func, members, bounds.shared_bytes, target)


def _lower(part: tirx.PrimFunc, target: Target) -> FlatMember | None:
    try:
        scheduled, _ = registry.schedule(part, target)
    except LoweringError:
        return None
    return lower_member(scheduled, target)


def _with_common_threads(
    parts: Sequence[tirx.PrimFunc], members: Sequence[FlatMember], target: Target
) -> list[FlatMember]:
    """Schedule members that want very many threads again with fewer, where others want few."""
    wanted = [member.size(THREAD_TAGS) for member in members]
    if max(wanted) < max(2 * min(wanted), _COMMON_THREADS + 1):
        return list(members)
    fewer = {**dict(target.attrs.items()), "max_threads_per_block": _COMMON_THREADS}
    narrow = Target({"kind": target.kind.name, **fewer})
    return [
        (_lower(part, narrow) or member) if count > _COMMON_THREADS else member
        for part, member, count in zip(parts, members, wanted, strict=True)
    ]
