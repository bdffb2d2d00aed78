"""Relax passes of the package, for use in a ``tvm.transform.Sequential``."""

from .canonicalize import Canonicalize
from .fuse import CompoundFusion, CrossFusion, Fuse, HorizontalFusion, VerticalFusion
from .lower_groups import LowerGroups
from .schedule_groups import ScheduleGroups
from .strip_fusion import StripFusion

__all__ = [
    "Canonicalize", "CompoundFusion", "CrossFusion", "Fuse", "HorizontalFusion", "LowerGroups",
    "ScheduleGroups", "StripFusion", "VerticalFusion",
]  # fmt: skip
