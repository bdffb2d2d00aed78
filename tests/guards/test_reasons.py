"""Every reason code can be reached, and nothing is refused with another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tvm_fusion.compat import relax, tvm
from tvm_fusion.guards import Resources, Verdict
from tvm_fusion.guards.base import OUTCOMES, REASONS
from tvm_fusion.planner import Plan
from tvm_fusion.planner.candidates import Candidate, Timing
from tvm_fusion.planner.compare import no_better
from tvm_fusion.planner.cost import Cost
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import graph_of, planned
from tvm_fusion.testing.synthetic_blocks import cross_pair, mixed_convs, relaxation_chain
from tvm_fusion.testing.transformer_blocks import dense_norm, matmul_pair
from tvm_fusion.verification.report import Comparison
from tvm_fusion.verification.verify import refusals_of


def chain(shape=(1, 8, 14, 14)):
    b = ModuleBuilder()
    return b.finish(b.relu("relu", b.bias("bias", b.conv("conv", b.input("x", shape), 8))))


def pointwise_chain(extent=64):
    b = ModuleBuilder()
    return b.finish(b.relu("relu", b.op("exp", relax.op.exp(b.input("x", (extent, 64))))))


def dependent_products():
    """``x · (x · W)``: both products read x first, and the second one reads the first."""
    b = ModuleBuilder()
    x = b.input("x", (64, 64))
    return b.finish(b.op("second", relax.op.matmul(x, b.dense("first", x, 64, bias=False))))


def around_a_reduction():
    b = ModuleBuilder()
    value = b.op("exp", relax.op.exp(b.input("x", (64, 64))))
    total = b.op("total", relax.op.sum(value, axis=[0], keepdims=True))
    return b.finish(b.op("share", relax.op.divide(value, total)))


def two_layouts():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 8, 8))
    left = b.conv("left", x, 8)
    b.layout = "NHWC"
    return b.finish(left, b.conv("right", x, 8))


def two_dtypes():
    b = ModuleBuilder()
    x = b.input("x", (64, 64))
    return b.finish(b.relu("relu", x), b.op("half", relax.op.astype(x, "float16")))


def tiny_members():
    b = ModuleBuilder()
    left = b.relu("relu", b.input("x", (16,)))
    return b.finish(left, b.op("tanh", relax.op.tanh(b.input("y", (16,)))))


def opaque():
    b = ModuleBuilder()
    return b.finish(b.op("cumsum", relax.op.cumsum(b.relu("relu", b.input("x", (8, 8))), axis=1)))


def lone():
    b = ModuleBuilder()
    return b.finish(b.conv("conv", b.input("x", (1, 8, 14, 14)), 8))


def two_anchors():
    b = ModuleBuilder()
    return b.finish(b.conv("second", b.conv("first", b.input("x", (1, 8, 14, 14)), 8), 8))


def spilling(proposals):
    return [Resources(255, 64, 0, 256, "fake") for _ in proposals]


def slow(proposals):
    """Each kernel takes the square of its operators."""
    return [Timing(float(len(p.operators) ** 2)) for p in proposals]


def compound_against_parts() -> Verdict | None:
    """A compound of two chains that saves 3 µs, whose chains save 2 µs each on their own."""
    graph = graph_of(mixed_convs([16, 16]))
    chains = [("conv0", "relu0"), ("conv1", "relu1")]

    def candidate(strategy, members, saving):
        names = graph.sort(n for m in members for n in m)
        proposal = Proposal(strategy, names, (), tuple(members), 2)
        return Candidate(
            proposal, Verdict("ok"), Cost(microseconds=10.0), Cost(microseconds=10.0 - saving)
        )

    parts = [candidate("vertical", [c], 2.0) for c in chains]
    return no_better(graph, candidate("compound", chains, 3.0), parts, "parts_better")


def wrong_result() -> Plan:
    plan = planned(chain())
    (group,) = plan.groups
    bad = Comparison(group.id, group.nodes, error=0.5, tolerance=1e-4, worst="output 0")
    return refusals_of([bad], plan)[group.id]


#: For each code something that yields a plan, a refusal or a verdict with it.
SOURCES: dict[str, Callable[[], object]] = {
    "dependence": lambda: planned(dependent_products()),
    "not_convex": lambda: planned(around_a_reduction()),
    "shape_mismatch": lambda: planned(mixed_convs([16, 16], stride=[1, 2])),
    "layout_mismatch": lambda: planned(two_layouts()),
    "dtype_mismatch": lambda: planned(two_dtypes()),
    "dynamic_shape": lambda: planned(pointwise_chain(tvm.tirx.Var("n", "int64"))),
    "unsupported_op": lambda: planned(opaque()),
    "no_template": lambda: planned(two_anchors()),
    "no_partner": lambda: planned(lone()),
    "group_too_large": lambda: planned(parallel_convs(7, relu=True, spatial=14)),
    "work_ratio": lambda: planned(cross_pair(ratio=4)),
    "divergence": lambda: planned(tiny_members()),
    "recompute": lambda: planned(relaxation_chain(depth=2)),
    "registers": lambda: planned(chain(), max_registers=20),
    "spill": lambda: planned(chain(), compiler=spilling),
    "occupancy": lambda: planned(
        parallel_convs(1, relu=True, spatial=56), "cuda:sm_75", min_occupancy=1.0
    ),
    "shared_memory": lambda: planned(dense_norm(rows=4, width=64, outputs=16384)),
    "compile_time": lambda: planned(chain(), max_build_seconds=0),
    "slower_predicted": lambda: planned(
        matmul_pair(rows=4096, width=1024, inner=512, outputs=16384, dtype="float16"),
        max_recompute=1000,
    ),
    "slower_measured": lambda: planned(chain(), measure=slow),
    "parts_better": compound_against_parts,
    "overlaps_better": lambda: planned(cross_pair(), strategies="vertical"),
    "numerics": wrong_result,
    "denied": lambda: planned(chain(), deny="relu"),
}


def refusals(found: object) -> list[tuple[str, str, str]]:
    """Reason, outcome and detail of everything that was refused."""
    if isinstance(found, Plan):
        lone = [(u.reason, "unsupported", "-") for u in found.ungrouped]
        return [(r.reason, r.outcome, r.detail) for r in found.rejected] + lone
    return [(found.reason, found.outcome, found.detail)]


def test_every_code_has_a_source():
    assert list(REASONS) and set(SOURCES) == set(REASONS)


@pytest.mark.parametrize("reason", SOURCES)
def test_the_code_is_reached(reason):
    found = refusals(SOURCES[reason]())
    assert reason in {r for r, _, _ in found}
    for code, outcome, detail in found:
        assert code in REASONS and outcome in OUTCOMES and outcome != "ok" and detail


def test_a_plain_chain_is_refused_nothing():
    plan = planned(chain())
    assert (plan.rejected, plan.ungrouped) == ((), ())
