"""Exact choice of groups: disjoint, jointly acyclic, of the largest total saving.

Choosing groups is weighted set packing with one more condition, that contracting every chosen group
to one node leaves no cycle. The native core (``csrc/search.cc``) splits the candidates into regions
that share operators and solves each by dynamic programming over its operators, pruned by prices that
are feasible for the dual of the set-packing program. Acyclicity is added lazily: where the optimum
closes a cycle, the groups on it are forbidden to be chosen together and their regions are solved
again as one. A region that needs more states than allowed is searched as a beam instead, and the
result says by how much it may miss the optimum.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

from ..graph._native import Reachability

#: Partial solutions that the search of one region may hold before it becomes a beam.
MAX_STATES = 200_000


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The chosen groups, and what is known of the optimum.

    Attributes
    ----------
    chosen : tuple of int
        Positions of the chosen candidates, ascending.
    saving : int
        Their total saving, in the unit of the candidates.
    upper_bound : int
        No choice saves more; equal to ``saving`` where the choice is optimal.
    regions : int
        Regions of candidates that save something.
    exact_regions, bounded_regions : int
        How many of them are solved optimally, and how many only within the bound.
    states : int
        Partial solutions that were looked at.
    """

    chosen: tuple[int, ...]
    saving: int
    upper_bound: int
    regions: int
    exact_regions: int
    bounded_regions: int
    states: int

    @property
    def exact(self) -> bool:
        """Whether no choice saves more."""
        return self.saving == self.upper_bound

    @property
    def gap(self) -> float:
        """How much better the optimum may be, as a share of the upper bound (0 to 1)."""
        return (self.upper_bound - self.saving) / self.upper_bound if self.upper_bound else 0.0


def choose(
    reachability: Reachability,
    candidates: Sequence[tuple[Sequence[int], int]],
    *,
    max_states: int = MAX_STATES,
) -> SearchResult:
    """Choose disjoint, jointly acyclic candidates of largest total saving.

    Parameters
    ----------
    reachability : Reachability
        The graph; its nodes are the operators.
    candidates : sequence of (sequence of int, int)
        Operators of each candidate and what it saves (an integer in any unit, such as picoseconds).
        Candidates that save nothing are never chosen. All others must be convex.
    max_states : int
        Partial solutions that the search of one region may hold; above it the region is bounded
        instead of exact.

    Returns
    -------
    SearchResult
        Among all sets of largest saving the one that is preferred is the one whose ascending
        positions are lexicographically smallest: at the first candidate in which two sets differ,
        the set that has it wins. So earlier candidates are preferred, whatever their size. In
        bounded regions the result is deterministic, too, but follows no such rule.

    Raises
    ------
    ValueError
        If a candidate is empty, not convex, names an operator twice or one that does not exist, if
        the savings add up to more than 2**60, or ``max_states`` is not between 1 and 50 million.
    TypeError
        If a number is not an integer.
    """
    groups = [group for group, _ in candidates]
    savings = [saving for _, saving in candidates]
    found = reachability.choose(groups, savings, operator.index(max_states))
    saving, upper_bound, regions, exact, states = found[:5]
    return SearchResult(
        tuple(found[5:]), saving, upper_bound, regions, exact, regions - exact, states
    )
