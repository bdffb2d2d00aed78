"""What verification found."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One result against its reference.

    Attributes
    ----------
    name : str
        ``"model"`` or a group's id.
    nodes : tuple of str
        Source nodes of the group (empty for the whole model).
    error : float
        Largest difference, relative to the largest reference value of that output.
    tolerance : float
        Largest error that passes.
    worst : str
        Where it is: output, index, value and reference.
    inputs : int
        Number of inputs compared.
    problem : str
        Why nothing could be compared; empty otherwise.
    """

    name: str
    nodes: tuple[str, ...]
    error: float
    tolerance: float
    worst: str = ""
    inputs: int = 0
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        return not self.problem and self.error <= self.tolerance

    def __str__(self) -> str:
        if self.problem:
            return f"FAIL  {self.name}: {self.problem}"
        text = f"error {self.error:.2e} (tolerance {self.tolerance:.0e}, {self.inputs} inputs)"
        if self.passed:
            return f"ok    {self.name}: {text}"
        nodes = f" of {', '.join(self.nodes)}" if self.nodes else ""
        return f"FAIL  {self.name}{nodes}: {text}, worst at {self.worst}"


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """All comparisons of one verification, the whole model first."""

    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is within tolerance."""
        return all(c.passed for c in self.comparisons)

    @property
    def failed(self) -> tuple[Comparison, ...]:
        """What is not."""
        return tuple(c for c in self.comparisons if not c.passed)

    def __str__(self) -> str:
        groups = [c for c in self.comparisons if c.name != "model"]
        lines = [str(c) for c in self.comparisons if c.name == "model" or not c.passed]
        if groups:
            good = sum(c.passed for c in groups)
            worst = max((c.error for c in groups if not c.problem), default=0.0)
            lines.append(
                f"{good} of {len(groups)} groups match the unfused result, largest error {worst:.2e}"
            )
        return "\n".join(lines)
