"""Guards: proposal → verdict. One limit a file; every refusal carries a reason code and its numbers."""

from .base import ACCEPTED, Guard, Verdict
from .registry import GUARDS, judge

__all__ = ["ACCEPTED", "GUARDS", "Guard", "Verdict", "judge"]
