"""What an explanation holds: frozen dataclasses, plain values by ``to_dict()``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .plan import Rejection, Ungrouped


class _Explanation:
    """What explanations share."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


@dataclasses.dataclass(frozen=True)
class OperatorFacts:
    """One operator.

    Attributes
    ----------
    name, op : str
        Its name and type.
    source_names : tuple of str
        Nodes of the user's model that it came from.
    inputs, outputs : tuple of str
        Types, as ``float16[1,64,56,56]``.
    bytes_read, bytes_written, flops : int
        As a kernel of its own.
    intensity : float
        FLOP per byte, as a kernel of its own.
    does_work : bool
        False for a view, which needs no kernel.
    candidate : bool
        Whether the intensity is under 10 FLOP/B, where fusion would pay.
    """

    name: str
    op: str
    source_names: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    flops: int
    intensity: float
    does_work: bool
    candidate: bool


@dataclasses.dataclass(frozen=True)
class GroupFacts:
    """The group that an operator is in; ``id`` and ``saving_us`` are those of the plan."""

    id: str
    strategy: str
    operators: tuple[str, ...]
    options: Mapping[str, str]
    predicted_us_before: float
    predicted_us_after: float
    saving_us: float


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One group that an operator could have joined.

    Attributes
    ----------
    strategy : str
        Strategy that proposed it.
    partners : tuple of str
        Its other operators.
    outcome, reason, numbers, detail
        The verdict; ``overlaps_better`` where it was accepted and others were taken.
    predicted_us_before, predicted_us_after : float or None
        Predicted times; None where the group could not be built, so that its time means nothing.
    overlaps : tuple of str
        Ids of the taken groups that hold some of its operators.
    """

    strategy: str
    partners: tuple[str, ...]
    outcome: str
    reason: str
    numbers: Mapping[str, Any]
    detail: str
    predicted_us_before: float | None = None
    predicted_us_after: float | None = None
    overlaps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """A producer or consumer outside the operator's group, and what stopped the two.

    ``role`` is ``"producer"`` or ``"consumer"``; ``group`` is the id of the neighbour's group.
    """

    name: str
    op: str
    role: str
    group: str | None
    outcome: str
    reason: str
    numbers: Mapping[str, Any]
    detail: str


@dataclasses.dataclass(frozen=True)
class OperatorExplanation(_Explanation):
    """One operator: its group, the groups that it could have joined, its neighbours.

    ``considered`` counts the proposals with this operator; ``alternatives`` holds the telling ones.
    """

    facts: OperatorFacts
    group: GroupFacts | None
    alternatives: tuple[Alternative, ...]
    considered: int
    neighbours: tuple[Neighbour, ...]

    def __str__(self) -> str:
        where = "a view, no kernel" if not self.facts.does_work else "a kernel of its own"
        if self.group is not None:
            where = f"in {self.group.id}, which saves {self.group.saving_us:.1f} us"
        lines = [f"{self.facts.name} ({self.facts.op}): {where}"]
        for other in self.alternatives:
            partners = ", ".join(other.partners[:4]) + (", ..." if len(other.partners) > 4 else "")
            lines.append(f"  {other.strategy} with {partners}: {other.reason}: {other.detail}")
        for near in self.neighbours:
            lines.append(f"  {near.role} {near.name} ({near.op}): {near.reason}: {near.detail}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class NodeExplanation(_Explanation):
    """Everything that came from one node of the user's model."""

    node: str
    operators: tuple[OperatorExplanation, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.operators))


@dataclasses.dataclass(frozen=True)
class ReasonSummary:
    """How often one reason stopped a fusion, with examples."""

    reason: str
    meaning: str
    outcome: str
    count: int
    examples: tuple[Rejection, ...]


@dataclasses.dataclass(frozen=True)
class ModelExplanation(_Explanation):
    """A whole model: what was weighed, taken and refused.

    Attributes
    ----------
    operators : int
        Operators that do work.
    considered, accepted : int
        Proposals, and those that no guard refused.
    groups : mapping of str to int
        Groups taken, by strategy.
    ungrouped : tuple of Ungrouped
        Operators that are kernels of their own.
    reasons : tuple of ReasonSummary
        Why edges and sets of branches stay unfused, the most frequent first.
    """

    operators: int
    considered: int
    accepted: int
    groups: Mapping[str, int]
    ungrouped: tuple[Ungrouped, ...]
    reasons: tuple[ReasonSummary, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.operators} operators: {self.considered} groups weighed, {self.accepted} allowed, "
            f"{sum(self.groups.values())} taken; {len(self.ungrouped)} kernels of one operator"
        ]
        for entry in self.reasons:
            lines.append(
                f"  {entry.reason} ({entry.outcome}), {entry.count} times: {entry.meaning}"
            )
            lines += [f"    {example.detail}" for example in entry.examples]
        return "\n".join(lines)
