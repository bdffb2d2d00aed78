"""The partitioned horizontal kernel: independent members side by side in one launch.

Each member is scheduled by the ordinary templates as if it were alone. The scheduled members are lowered up to their
barriers and become the branches of one kernel, whose blocks are divided among them.
"""

from __future__ import annotations

from ...compat import Target, tirx
from ...errors import LoweringError
from .. import registry
from ..base import ScheduleTemplate, limits
from .partition_lower import THREAD_TAGS, FlatMember, lower_member
from .partition_members import split_members
from .partition_merge import merge_members


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
        members = []
        for part in parts:
            member = _lower(part, target)
            if member is None:
                return None
            members.append(member)
        bounds = limits(target)
        if max(member.size(THREAD_TAGS) for member in members) > bounds.threads:
            return None
        return merge_members(func, members, bounds.shared_bytes)


def _lower(part: tirx.PrimFunc, target: Target) -> FlatMember | None:
    try:
        scheduled, _ = registry.schedule(part, target)
    except LoweringError:
        return None
    return lower_member(scheduled, target)
