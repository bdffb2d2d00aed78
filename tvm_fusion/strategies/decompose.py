"""The members of a group, read from its operators alone.

An annotation says how many members a group has, not which; this finds them again, in a group's body
or in the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..graph.dataflow import DataflowGraph, Operator
from .branches import JOINS, Branch, Join
from .growth import POINTWISE

#: Patterns of the operators that decide a kernel's loops.
ANCHOR_PATTERNS = ("anchor", "pool", "reduction", "row")

#: Forms whose group is one branch, however many anchors it has.
SINGLE_BRANCH_FORMS = ("back_to_back", "anchor_row", "attention")

#: Operators that take a part of their operand: each member of a partitioned group takes its own.
SLICES = ("split", "strided_slice")


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """The parts of a group.

    Every operator of the group is in exactly one branch, in ``join.operators`` or in ``tail``.

    Attributes
    ----------
    anchors : tuple of str
        The operators that decide the kernel's loops (convolutions, products, pooling, reductions
        and row normalisations), in topological order; several of them may depend on each other.
    branches : tuple of Branch
        The members. A branch is headed by its first anchor, or by its first operator where it has
        none; its operators are its prologue, its anchors and what follows them up to the join. A
        prologue that several branches read is listed with the first of them.
    join : Join or None
        What combines all branches; None where they are returned apart. Its ``branches`` include the
        operands from outside the group that it joins (``Branch("", (), tensor)``: the shortcut of a
        cross group with the option ``shortcut``, the copied operands of a concatenation); these are
        not in ``Decomposition.branches``. Those of a concatenation are in the order of its
        operands, others in the order of their heads, outside operands last. Its operators include
        what lies between two joining ones.
    tail : tuple of str
        Operators that follow the join, and those that only they read.
    """

    anchors: tuple[str, ...]
    branches: tuple[Branch, ...]
    join: Join | None
    tail: tuple[str, ...]


def decompose(
    graph: DataflowGraph, operators: Sequence[str], options: Mapping[str, str] | None = None
) -> Decomposition:
    """Split a group into branches, join and tail.

    Parameters
    ----------
    graph : DataflowGraph
        The graph that holds the operators.
    operators : sequence of str
        The group.
    options : mapping of str to str, optional
        The group's options (see ``base.OPTIONS``); ``form``, ``join`` and ``shortcut`` are read.

    Returns
    -------
    Decomposition
        By the form:

        * ``back_to_back``, ``anchor_row`` and ``attention``: one branch of all operators.
        * ``partitioned``: the members are what remains connected once the concatenation that joins
          them is taken out. Operators that only read outside the group (slices, and pointwise
          operators) connect nothing: every member computes them for itself.
        * any other, and none: anchors that depend on each other are one branch; a group without
          anchors branches at the pointwise operators that read no other operator of the group.
    """
    options = options or {}
    inside = graph.sort(operators)
    anchors = tuple(n for n in inside if graph.by_name[n].pattern in ANCHOR_PATTERNS)
    if options.get("form") in SINGLE_BRANCH_FORMS:
        branch = Branch((anchors or inside)[0], inside, _result_of(graph, inside))
        return Decomposition(anchors, (branch,), None, ())
    if options.get("form") == "partitioned":
        return _Partition(graph, inside, options.get("join", "concat")).decompose(anchors)
    shortcut = options.get("shortcut") == "identity"
    return _Branching(graph, inside, anchors, shortcut).decompose()


def _result_of(graph: DataflowGraph, names: Sequence[str]) -> str:
    """The tensor that a set of operators gives to others (the first one, should there be more)."""
    results = graph.external_outputs(names)
    return results[0] if results else graph.by_name[names[-1]].outputs[0]


class _Branching:
    """Branches headed by anchors: each operator belongs to the anchors that it depends on."""

    def __init__(
        self,
        graph: DataflowGraph,
        inside: tuple[str, ...],
        anchors: tuple[str, ...],
        shortcut: bool,
    ) -> None:
        self.graph, self.inside, self.anchors = graph, inside, anchors
        self.made = {t: n for n in inside for t in graph.by_name[n].outputs}
        self.seeds = anchors or tuple(n for n in inside if not self._before(n))
        self.roots = self._roots()
        self.identity = self._identity() if shortcut else None
        self.of: dict[str, frozenset[str]] = {}
        for name in inside:
            self.of[name] = frozenset().union(*self._operand_roots(name), self._own_root(name))

    def _before(self, name: str) -> list[str]:
        """Operators of the group whose results an operator reads."""
        return list(dict.fromkeys(filter(None, map(self.made.get, self._operator(name).inputs))))

    def _operator(self, name: str) -> Operator:
        return self.graph.by_name[name]

    def _roots(self) -> dict[str, str]:
        """The first of the seeds that depend on each other, by seed."""
        root = {seed: seed for seed in self.seeds}

        def find(seed: str) -> str:
            while root[seed] != seed:
                seed = root[seed]
            return seed

        above: dict[str, set[str]] = {}
        for name in self.inside:
            above[name] = set().union(*(above[p] for p in self._before(name)))
            if name in root:
                for seed in above[name]:
                    first, second = sorted((find(seed), find(name)), key=self.graph.index.get)
                    root[second] = first
                above[name].add(name)
        return {seed: find(seed) for seed in self.seeds}

    def _identity(self) -> tuple[str, str] | None:
        """The joining operator with an operand from outside, and that operand."""
        reached = set(self.seeds)
        for name in self.inside:
            operator = self._operator(name)
            if any(p in reached for p in self._before(name)):
                reached.add(name)
                if operator.op in JOINS:
                    outer = [t for t in operator.inputs if self._is_shortcut(t, operator)]
                    if outer:
                        return name, outer[0]
        return None

    def _is_shortcut(self, tensor: str, operator: Operator) -> bool:
        found, result = self.graph.tensors[tensor], self.graph.tensors[operator.outputs[0]]
        return tensor not in self.made and not found.is_constant and found.shape == result.shape

    def _own_root(self, name: str) -> frozenset[str]:
        return frozenset({self.roots[name]} if name in self.roots else ())

    def _operand_roots(self, name: str) -> list[frozenset[str]]:
        """Branches that each operand of an operator depends on; the shortcut is one of its own."""
        found = [self.of[p] for p in self._before(name)]
        if self.identity and self.identity[0] == name:
            found.append(frozenset({""}))
        return found

    def _merges(self, name: str) -> bool:
        """Whether an operator brings together what no operand of it already does."""
        operands = self._operand_roots(name)
        return len(self.of[name]) > 1 and all(o < self.of[name] for o in operands)

    def decompose(self) -> Decomposition:
        heads = list(dict.fromkeys(self.roots.values()))
        every = frozenset(heads) | ({""} if self.identity else set())
        merging = [n for n in self.inside if self._merges(n)]
        owned = self._owners()
        branches = tuple(self._branch(head, owned) for head in heads)
        joined = {name for name in self.inside if name not in owned}
        if not merging or self.of[merging[-1]] != every:
            return Decomposition(
                self.anchors, branches, None, tuple(n for n in self.inside if n in joined)
            )
        last = merging[-1]
        operators = tuple(
            n
            for n in self.inside
            if n in joined and len(self.of[n]) > 1 and (n == last or self.graph.depends(last, n))
        )
        kinds = {self._operator(n).op for n in merging}
        kind = kinds.pop() if len(kinds) == 1 else "mixed"
        if kind not in (*JOINS, "concat"):
            kind = "mixed"
        result = self._operator(last).outputs[0]
        join = Join(self._order(branches, kind, last), kind, operators, result)
        tail = tuple(n for n in self.inside if n in joined and n not in operators)
        return Decomposition(self.anchors, branches, join, tail)

    def _owners(self) -> dict[str, str]:
        """Head of the branch that each operator before the join belongs to."""
        owned = {n: next(iter(self.of[n])) for n in self.inside if len(self.of[n]) == 1}
        for name in reversed(self.inside):  # what depends on no anchor: a prologue, or an operand
            if not self.of[name]:
                readers = {
                    owned[c.name]
                    for t in self._operator(name).outputs
                    for c in self.graph.consumers[t]
                    if c.name in owned
                }
                if readers:
                    owned[name] = min(readers, key=self.graph.index.__getitem__)
        return owned

    def _branch(self, head: str, owned: Mapping[str, str]) -> Branch:
        names = tuple(n for n in self.inside if owned.get(n) == head)
        after = [n for n in names if self.of[n]] or names
        return Branch(head, names, _result_of(self.graph, after))

    def _order(self, branches: tuple[Branch, ...], kind: str, last: str) -> tuple[Branch, ...]:
        if kind == "concat":
            place = {t: i for i, t in enumerate(self._operator(last).inputs)}
            branches = tuple(sorted(branches, key=lambda b: place.get(b.result, len(place))))
        return (*branches, Branch("", (), self.identity[1])) if self.identity else branches


def member_results(
    graph: DataflowGraph, operators: Sequence[str], options: Mapping[str, str] | None = None
) -> tuple[str | None, list[list[str]]]:
    """Find what the members of a partitioned group give to the join, or return.

    Parameters
    ----------
    graph, operators, options
        As for `decompose`.

    Returns
    -------
    concat : str or None
        The concatenation that joins the members; None where they are returned apart.
    results : list of list of str
        The tensors of each member, in the order of the concatenation's operands. A tensor from
        outside, and a slice of one, is a member of its own.
    """
    inside = graph.sort(operators)
    partition = _Partition(graph, inside, (options or {}).get("join", "concat"))
    return partition.concat, partition.results


class _Partition:
    """Members of a partitioned group: what is connected besides the joining concatenation."""

    def __init__(self, graph: DataflowGraph, inside: tuple[str, ...], join: str) -> None:
        self.graph, self.inside = graph, inside
        self.made = {t: n for n in inside for t in graph.by_name[n].outputs}
        self.above: dict[str, set[str]] = {}
        self.cheap: set[str] = set()
        for name in inside:
            operator = graph.by_name[name]
            before = [self.made[t] for t in operator.inputs if t in self.made]
            self.above[name] = {name}.union(*(self.above[p] for p in before))
            light = operator.pattern in (*POINTWISE, "view") or operator.op in SLICES
            if light and all(p in self.cheap for p in before):
                self.cheap.add(name)
        self.concat = self._joining_concat() if join == "concat" else None
        if self.concat is None:
            roots = graph.external_outputs(inside)
        else:
            roots = tuple(dict.fromkeys(graph.by_name[self.concat].inputs))
        self.results = self._members(roots)

    def _joining_concat(self) -> str | None:
        """The last concatenation, if all results of the group come from it."""
        concats = [n for n in self.inside if self.graph.by_name[n].op == "concat"]
        results = [self.made[t] for t in self.graph.external_outputs(self.inside)]
        joins = concats and all(concats[-1] in self.above[r] for r in results)
        return concats[-1] if joins else None

    def _members(self, roots: Sequence[str]) -> list[list[str]]:
        """Group tensors that share work; each outside tensor and each slice is alone."""
        groups: list[tuple[set[str], list[str]]] = []
        ends = {
            self.made[t]
            for t in roots
            if t in self.made and self.graph.by_name[self.made[t]].op not in SLICES
        }
        for tensor in roots:
            above = self.above[self.made[tensor]] if tensor in self.made else set()
            work = {n for n in above if n not in self.cheap or n in ends}
            touching = [g for g in groups if g[0] & work]
            for group in touching:
                groups.remove(group)
            merged = [t for g in touching for t in g[1]]
            groups.append((work.union(*(g[0] for g in touching)), [*merged, tensor]))
        order = {t: i for i, t in enumerate(roots)}
        found = (sorted(tensors, key=order.__getitem__) for _, tensors in groups)
        return sorted(found, key=lambda tensors: order[tensors[0]])

    def decompose(self, anchors: tuple[str, ...]) -> Decomposition:
        """Build the decomposition; operators that several members read are listed with the first."""
        branches = []
        own: set[str] = {self.concat} if self.concat else set()
        for tensors in self.results:
            names = set().union(*(self.above[self.made[t]] for t in tensors if t in self.made))
            listed = self.graph.sort(names - own)
            own |= names
            heads = [n for n in listed if n in anchors] or list(listed)
            branches.append(Branch(heads[0] if heads else "", listed, tensors[0]))
        computed = tuple(b for b in branches if b.operators)
        rest = tuple(n for n in self.inside if n not in own)
        if self.concat is None:
            return Decomposition(anchors, computed, None, rest)
        result = self.graph.by_name[self.concat].outputs[0]
        join = Join(tuple(branches), "concat", (self.concat,), result)
        return Decomposition(anchors, computed, join, rest)
