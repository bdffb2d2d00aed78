"""Verification: fused against unfused, as a whole and group by group."""

from .report import Comparison, VerificationReport
from .verify import check_groups, verify_module

__all__ = ["Comparison", "VerificationReport", "check_groups", "verify_module"]
