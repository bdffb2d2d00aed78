"""The frozen configuration of planning and lowering."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

#: Strategies that can be asked for, in the order in which proposals are made.
STRATEGIES: tuple[str, ...] = ("vertical", "horizontal")


@dataclasses.dataclass(frozen=True)
class FusionConfig:
    """Options of ``plan``, ``compile`` and the passes.

    Parameters
    ----------
    strategies : tuple of str
        Strategies to propose groups with, a subset of ``STRATEGIES``.
    max_depth : int
        Largest number of working operators on one path of a vertical group.
    max_members : int
        Largest number of horizontal branches that stay apart in one kernel. 4 to 6 pay most; 12
        lost 8 % (project sources), so the default is 6. Branches of a linear sum collapse and do
        not count.
    max_operators : int
        Largest number of operators in one group; bounds compile time and parameter count.
    deny : tuple of str
        ``fnmatch`` patterns of operator types or source node names that must not be fused.
    """

    strategies: tuple[str, ...] = STRATEGIES
    max_depth: int = 16
    max_members: int = 6
    max_operators: int = 64
    deny: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategies", _as_tuple(self.strategies))
        object.__setattr__(self, "deny", _as_tuple(self.deny))
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown:
            raise ValueError(
                f"unknown strategy {unknown[0]!r}; choose from {', '.join(STRATEGIES)}"
            )
        if not self.strategies:
            raise ValueError(f"no strategy is given; choose from {', '.join(STRATEGIES)}")
        for field in ("max_depth", "max_members", "max_operators"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 1:
                raise ValueError(
                    f"{field} must be a positive integer, got {getattr(self, field)!r}"
                )


def _as_tuple(value: str | Iterable[str]) -> tuple[str, ...]:
    return (
        tuple(part for part in value.split(",") if part) if isinstance(value, str) else tuple(value)
    )
