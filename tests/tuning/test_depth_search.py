"""The choice of depth and strategy is a pure function of measured times: no table of times makes it lose to what was
explored."""

from __future__ import annotations

import dataclasses
import random
import zlib

import pytest

from tvm_fusion.config import STRATEGIES, FusionConfig
from tvm_fusion.planner.candidates import Timing
from tvm_fusion.planner.compare import kernel_of, single
from tvm_fusion.planner.planner import solve
from tvm_fusion.testing.blocks import inception_module, resnet_bottleneck
from tvm_fusion.testing.modules import parallel_convs, random_module
from tvm_fusion.testing.plans import DEVICE, graph_of
from tvm_fusion.testing.synthetic_blocks import concatenated_sums, elementwise_chain
from tvm_fusion.testing.transformer_blocks import bert_block, dense_norm_heads
from tvm_fusion.tuning.candidates import DEPTHS, explore

MODULES = {
    "sums": concatenated_sums,
    "chain": lambda: elementwise_chain(9),
    "convs": lambda: parallel_convs(4, spatial=14, relu=True),
    "heads": dense_norm_heads,
    "bottleneck": resnet_bottleneck,
    "inception": inception_module,
    "bert": bert_block,
    "random": lambda: random_module(3, 16),
}

#: Ways to draw the time of a kernel of n operators.
LAWS = {
    "any": lambda chance, n: chance.uniform(1, 10),
    "fusing pays little": lambda chance, n: n * chance.uniform(0.7, 1.3),
    "fusing pays much": lambda chance, n: n**0.5 * chance.uniform(0.9, 1.1),
    "deep is slow": lambda chance, n: (1.0 if n < 4 else n**2) * chance.uniform(0.9, 1.1),
}


class Table:
    """A time for every kernel, the same each time it is asked about."""

    def __init__(self, seed, law, noise=0.0):
        self.seed, self.law, self.noise = seed, law, noise

    def time(self, proposal):
        """Microseconds of one proposal."""
        key = repr((self.seed, kernel_of(proposal)))
        chance = random.Random(zlib.crc32(key.encode()))
        return self.law(chance, len(proposal.operators))

    def __call__(self, proposals):
        times = map(self.time, proposals)
        return [Timing(t, self.noise * t) for t in times]

    def total(self, graph, groups):
        """Microseconds of a model with these groups."""
        inside = {name for group in groups for name in group.operators}
        alone = [single(o.name) for o in graph.operators if o.does_work and o.name not in inside]
        return sum(map(self.time, [*groups, *alone]))


@pytest.fixture(params=MODULES.values(), ids=MODULES.keys(), scope="module")
def explored(request):
    """A graph, the groups that are explored, and the plans that they come from."""
    graph = graph_of(request.param())
    config = FusionConfig()
    varied = [config]
    varied += [dataclasses.replace(config, max_depth=depth) for depth in DEPTHS]
    varied += [dataclasses.replace(config, strategies=(s,)) for s in STRATEGIES if s != "compound"]
    plans = [[c.proposal for c in solve(graph, DEVICE, one).chosen] for one in varied]
    groups = [p for variation in explore(graph, DEVICE, config) for p in variation.proposals]
    return graph, groups, [[], *plans]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_no_table_makes_it_lose_to_what_was_explored(explored, law, seed, noise):
    graph, groups, plans = explored
    table, kernels = Table(seed, LAWS[law], noise), {kernel_of(p) for p in groups}

    def recall(proposals):
        known = [len(p.operators) == 1 or kernel_of(p) in kernels for p in proposals]
        return [t if k else None for t, k in zip(table(proposals), known, strict=True)]

    found = solve(graph, DEVICE, FusionConfig(), offered=groups, measure=table, recall=recall)
    ours = table.total(graph, [c.proposal for c in found.chosen])
    best = min(table.total(graph, plan) for plan in plans)
    assert ours <= best * (1 + 2 * noise) + 1e-6
    assert all(c.measured_after == table.time(c.proposal) for c in found.chosen)


def test_the_choice_is_the_same_each_time(explored):
    graph, _, _ = explored
    table = Table(7, LAWS["any"])
    first, second = (
        solve(graph, DEVICE, FusionConfig(), measure=table, recall=table) for _ in range(2)
    )
    assert first == second


def test_tables_decide(explored):
    """Where fusing pays everything is fused that can be, where it does not nothing is."""
    graph, _, _ = explored
    slow = Table(0, lambda chance, n: n**2)
    assert not solve(graph, DEVICE, FusionConfig(), measure=slow).chosen
    fast = Table(0, lambda chance, n: 1 / n)
    assert solve(graph, DEVICE, FusionConfig(), measure=fast).chosen
