"""Guards: proposal → verdict. One limit a file; every refusal carries a reason code and its numbers."""

from .base import ACCEPTED, Guard, Verdict
from .on_chip import Resources, judge_resources
from .registry import GUARDS, judge

__all__ = ["ACCEPTED", "GUARDS", "Guard", "Resources", "Verdict", "judge", "judge_resources"]
