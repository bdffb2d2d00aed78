"""Hand-made plans with what a planner may leave out: every strategy, parts, measured times, the compiler's report."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.graph.dataflow import DataflowGraph
from tvm_fusion.planner import (
    Group,
    Part,
    Plan,
    Region,
    Rejection,
    Search,
    TargetInfo,
    Totals,
    Ungrouped,
)  # fmt: skip
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.transform.fuse import graph_of

#: A name that would be a tag if it were not escaped.
HOSTILE = '</title><script>alert("1")</script>&amp;\'"'


def hostile_graph() -> DataflowGraph:
    """Four kernels' worth of operators, one with a hostile name, a view, an operator left alone."""
    b = ModuleBuilder()
    x = b.input("image", (1, 8, 16, 16))
    stem = b.relu("stem_relu", b.conv("stem", x, 8))
    left = b.relu(HOSTILE, b.conv("left", stem, 8))
    right = b.relu("right_relu", b.conv("right", stem, 8))
    joined = b.add("join", left, right)
    a = b.relu("a_relu", b.conv("a", joined, 8))
    c = b.relu("c_relu", b.conv("c", joined, 8))
    d = b.relu("d_relu", b.conv("d", a, 4, 1))
    e = b.relu("e_relu", b.conv("e", c, 4, 1))
    flat = b.op("flat", relax.op.reshape(b.add("sum", d, e), (1, 1024)))
    return graph_of(b.finish(b.op("softmax", relax.op.nn.softmax(flat))))


def group(graph: DataflowGraph, group_id: str, *branches: str, tail: str = "", **fields) -> Group:
    """A group of branches (names separated by blanks) and what joins them."""
    members = tuple(tuple(branch.split()) for branch in branches)
    nodes = graph.sort([*(n for member in members for n in member), *tail.split()])
    read, written = graph.traffic(nodes)
    operators = [graph.by_name[n] for n in nodes]
    flops = sum(o.flops for o in operators)
    before = sum(o.bytes_read + o.bytes_written for o in operators)
    values = {
        "id": group_id, "strategy": group_id.split("_")[1], "nodes": nodes,
        "operators": tuple(o.op for o in operators), "depth": 2, "members": len(members),
        "anchors": len(members), "branches": members, "options": {},
        "flops_before": flops, "flops_after": flops, "bytes_before": before,
        "bytes_after": read + written, "intensity_before": round(flops / before, 4),
        "intensity_after": round(flops / (read + written), 4), "launches_before": len(nodes),
        "predicted_us_before": 2.5 * len(nodes), "predicted_us_after": 3.25,
    }  # fmt: skip
    return Group(**{**values, **fields})


def make_plan(graph: DataflowGraph) -> Plan:
    """All strategies on `hostile_graph`; nothing measured, nothing built."""
    groups = (
        group(graph, "fused_vertical_0", "stem stem_relu", hot=True, estimated_registers=40,
              estimated_shared_bytes=2048),
        group(graph, "fused_cross_0", f"left {HOSTILE}", "right right_relu", tail="join",
              options={"form": "joined", "join": "add", "balance": "pad"}),
        group(graph, "fused_compound_0", "a a_relu", "c c_relu",
              options={"form": "merged", "join": "apart"},
              parts=(Part("vertical", ("a", "a_relu"), 2.25), Part("horizontal", ("a", "c"), 4.5))),
        group(graph, "fused_horizontal_0", "d d_relu", "e e_relu", tail="sum",
              options={"form": "merged", "join": "add"}),
    )  # fmt: skip
    alone = graph.by_name["softmax"]
    moved = alone.bytes_read + alone.bytes_written

    def total(field: str) -> float:
        return sum(getattr(g, field) for g in groups)

    return Plan(
        model=f"net {HOSTILE}",
        target=TargetInfo("cuda", "sm_90", "NVIDIA H200 SXM"),
        dtype="float32",
        operators=sum(o.does_work for o in graph.operators),
        groups=groups,
        regions=(Region("serial", ("fused_compound_0",), "a … c_relu", groups[2].nodes),),
        rejected=(
            Rejection("vertical", ("stem_relu", HOSTILE), "unsupported", "no_template", {"n": 12345},
                      f"nothing has stem and {HOSTILE} in one kernel"),
            Rejection("cross", ("left", "d"), "unprofitable", "work_ratio", {"ratio": 4.25}, "4.25 to 1"),
            Rejection("cross", ("left", "e"), "unprofitable", "work_ratio", {"ratio": 5.5}, "5.5 to 1"),
        ),
        ungrouped=(Ungrouped("softmax", "softmax", "no_partner", True),),
        totals=Totals(
            total("launches_before") + 1, len(groups) + 1, total("bytes_before") + moved,
            total("bytes_after") + moved, total("flops_before") + alone.flops,
            total("flops_after") + alone.flops, total("predicted_us_before") + 1.5,
            total("predicted_us_after") + 1.5,
        ),
        preset="small-cnn",
        search=Search(3, 2, 1, 0.25),
    )  # fmt: skip


@pytest.fixture(scope="session")
def hostile() -> str:
    """The name of a node that would be a tag if it were not escaped."""
    return HOSTILE


@pytest.fixture(scope="session")
def graph() -> DataflowGraph:
    """The graph of the hand-made plans."""
    return hostile_graph()


@pytest.fixture(scope="session")
def plan(graph) -> Plan:
    """A static plan."""
    return make_plan(graph)


@pytest.fixture(scope="session")
def measured(plan) -> Plan:
    """The same plan, compiled and measured."""
    groups = [
        dataclasses.replace(
            g, measured_us_before=9.5, measured_us_after=4.75, evidence="measured", registers=50,
            spill_bytes=16 if i == 1 else 0, shared_bytes=1024, template="some.template",
        )
        for i, g in enumerate(plan.groups)
    ]  # fmt: skip
    totals = dataclasses.replace(plan.totals, measured_us_before=41.5, measured_us_after=22.25)
    return dataclasses.replace(plan, groups=tuple(groups), totals=totals)
