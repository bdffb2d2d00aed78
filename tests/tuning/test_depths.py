"""Depth against latency: covers of a chain, by times that are given."""

from __future__ import annotations

import math

from tvm_fusion.strategies.base import Proposal
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.transform.fuse import graph_of
from tvm_fusion.tuning.depths import chains


def chain_graph():
    """conv → relu → conv → relu → conv → relu, and an operator after them."""
    b = ModuleBuilder()
    x = b.input("image", (1, 8, 16, 16))
    for number in range(3):
        x = b.relu(f"r{number}", b.conv(f"c{number}", x, 8))
    return graph_of(b.finish(b.relu("last", x)))


GRAPH = chain_graph()
NAMES = ("c0", "r0", "c1", "r1", "c2", "r2")


def group(*names):
    return Proposal("vertical", names, (), (names,), len(names))


PAIRS = [group(*NAMES[i : i + 2]) for i in (0, 2, 4)]
FOUR, SIX = group(*NAMES[:4]), group(*NAMES)


def rows_of(groups, times, alone=10.0):
    (chain,) = chains(GRAPH, groups, lambda g: times[g], lambda name: alone)
    return chain, {row.least: row for row in chain.rows}


def test_each_row_covers_the_same_operators():
    times = {**dict.fromkeys(PAIRS, 12.0), FOUR: 30.0, SIX: 50.0}
    chain, rows = rows_of([*PAIRS, FOUR, SIX], times)
    assert chain.operators == NAMES and list(rows) == [1, 2, 3, 5]
    assert [rows[k].microseconds for k in (1, 2, 3, 5)] == [60.0, 36.0, 42.0, 50.0]
    assert rows[2].groups == tuple(PAIRS) and not rows[2].singles
    # The row of depth 4 holds it although pairs are faster, and takes the fastest for the rest.
    assert set(rows[3].groups) == {FOUR, PAIRS[2]}
    for row in rows.values():
        covered = [n for g in row.groups for n in g.operators] + list(row.singles)
        assert sorted(covered) == sorted(NAMES)


def test_what_is_slower_than_its_parts_stays_out_of_a_cover():
    times = {PAIRS[0]: 12.0, PAIRS[1]: 99.0, SIX: 100.0}
    _, rows = rows_of([*PAIRS[:2], SIX], times)
    assert rows[2].groups == (PAIRS[0],) and rows[2].singles == ("c1", "r1", "c2", "r2")
    assert rows[2].microseconds == 52.0


def test_a_depth_whose_kernels_all_fail_is_told():
    """Depth 4 spills: there is a row, without a time."""
    times = {**dict.fromkeys(PAIRS, 12.0), FOUR: math.inf, SIX: 50.0}
    _, rows = rows_of([*PAIRS, FOUR, SIX], times)
    assert rows[3].groups == (FOUR,) and math.isinf(rows[3].microseconds)
    assert rows[3].singles == PAIRS[2].operators
    assert rows[5].microseconds == 50.0


def test_a_depth_that_was_not_considered_has_no_row():
    _, rows = rows_of([PAIRS[0], SIX], {PAIRS[0]: 1.0, SIX: 2.0})
    assert list(rows) == [1, 2, 5]


def test_chains_do_not_overlap():
    other = group("r2", "last")
    found = chains(GRAPH, [FOUR, group("r1", "c2"), PAIRS[2], other], lambda g: 1.0, lambda n: 1.0)
    taken = [name for chain in found for name in chain.operators]
    assert len(taken) == len(set(taken)) and found[0].operators == NAMES[:4]


def test_covers_whose_groups_wait_for_each_other_are_left_out():
    """Two chains side by side, each group with the head of one and the tail of the other."""
    b = ModuleBuilder()
    x = b.input("image", (1, 8, 16, 16))
    a, c = b.relu("a0", x), b.relu("b0", x)
    joined = b.add("j", b.relu("a1", a), b.relu("b1", c))
    graph = graph_of(b.finish(joined))
    whole = group("a0", "b0", "a1", "b1", "j")
    crossed = [Proposal("horizontal", n, (), (n,), 1) for n in (("a0", "b1"), ("b0", "a1"))]
    crossed = [Proposal(g.strategy, g.operators, (), g.members, 2) for g in crossed]
    (chain,) = chains(graph, [whole, *crossed], lambda g: 1.0, lambda n: 9.0)
    assert [row.least for row in chain.rows] == [1, 5]


def test_a_long_chain_with_many_groups_is_quick():
    b = ModuleBuilder()
    x = b.input("image", (1, 8, 8, 8))
    for number in range(40):
        x = b.relu(f"r{number}", x)
    graph = graph_of(b.finish(x))
    names = [f"r{number}" for number in range(40)]
    groups = [group(*names[i : i + n]) for n in (2, 3, 4, 6) for i in range(40 - n + 1)]
    groups.append(group(*names))
    (chain,) = chains(graph, groups, lambda g: 5.0 + len(g.operators), lambda n: 9.0)
    assert [row.least for row in chain.rows] == [1, 2, 3, 5]
    assert chain.rows[-1].microseconds <= 45.0
