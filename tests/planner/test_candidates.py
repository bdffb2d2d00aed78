"""What a group of several members is compared with: what could be taken instead of it."""

from __future__ import annotations

import pytest

from tvm_fusion.config import FusionConfig
from tvm_fusion.guards import Verdict
from tvm_fusion.planner.candidates import propose
from tvm_fusion.testing.modules import parallel_convs
from tvm_fusion.testing.named_blocks import named_block
from tvm_fusion.testing.plans import DEVICE, graph_of


def branches():
    """Four branches of one input, summed."""
    return parallel_convs(4, relu=True, channels=16, spatial=14)


def asked(strategies, make=branches, refusing=False):
    """Candidates of a model, and what was compared with what: pairs for chains, and for parts."""
    graph = graph_of(make())
    pairs = {"slower_predicted": [], "parts_better": []}

    def comparing(reason):
        def compare(candidate, others):
            pairs[reason].append((candidate, list(others)))
            return Verdict("unprofitable", reason) if refusing else None

        return compare

    config = FusionConfig(strategies=strategies)
    found = propose(graph, DEVICE, config, {}, *map(comparing, pairs))
    return found, pairs["slower_predicted"], pairs["parts_better"]


def shortcut():
    """A residual block with a convolution on its shortcut."""
    return named_block("bottleneck_projection")


@pytest.mark.parametrize(("make", "strategy"), [(branches, "horizontal"), (shortcut, "cross")])
def test_branches_are_compared_with_the_chains_inside_them(make, strategy):
    _, against_chains, _ = asked(("vertical", "horizontal", "cross"), make)
    compared = {c.proposal.strategy for c, _ in against_chains}
    assert strategy in compared and compared <= {"horizontal", "cross"}
    assert any(chains for _, chains in against_chains)
    for candidate, chains in against_chains:
        assert len(candidate.proposal.members) > 1
        inside = set(candidate.operators)
        for chain in chains:
            assert chain.proposal.strategy == "vertical" and chain.verdict.accepted
            assert inside > set(chain.operators)


def test_without_chains_there_is_nothing_to_compare_branches_with():
    found, against_chains, against_parts = asked(("horizontal", "cross"))
    assert found and not against_chains and not against_parts


def test_compounds_are_compared_with_whatever_survived():
    _, against_chains, against_parts = asked(("vertical", "horizontal", "cross", "compound"))
    assert {c.proposal.strategy for c, _ in against_parts} == {"compound"}
    assert {c.proposal.strategy for c, _ in against_chains}.isdisjoint({"compound", "vertical"})
    kinds = {part.proposal.strategy for _, parts in against_parts for part in parts}
    assert {"vertical", "horizontal"} <= kinds


@pytest.mark.parametrize("refusing", [True, False])
def test_what_is_refused_is_no_part_of_a_compound(refusing):
    found, against_chains, against_parts = asked(
        ("vertical", "horizontal", "compound"), refusing=refusing
    )
    refused = {c.key for c in found if c.verdict.reason == "slower_predicted"}
    assert refused == ({c.key for c, _ in against_chains} if refusing else set())
    assert bool(against_parts) is not refusing
    assert all(part.verdict.accepted for _, parts in against_parts for part in parts)
