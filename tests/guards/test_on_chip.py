"""Registers, shared memory, occupancy and build time: estimated for proposals, exact once compiled."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.devices import CPU, DEVICES
from tvm_fusion.graph.expression import build_seconds, expression_size
from tvm_fusion.guards import ACCEPTED, Resources, judge, judge_resources
from tvm_fusion.guards.compile_time import CompileTime
from tvm_fusion.guards.footprint import Footprint, footprint
from tvm_fusion.guards.on_chip import Occupancy, Registers, SharedMemory
from tvm_fusion.strategies import Horizontal, Vertical
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import DEVICE, graph_of, planned
from tvm_fusion.testing.synthetic_blocks import diamonds, elementwise_chain, mixed_convs
from tvm_fusion.testing.transformer_blocks import dense_norm, matmul_pair

CONFIG = FusionConfig()
ARCHES = [f"sm_{n}" for n in (75, 80, 86, 89, 90, 100, 120)]
#: A kernel that nothing is wrong with.
FITS = Footprint(threads=256, blocks=1000, registers=64, shared_bytes=8192, flops=1)

#: What a compiler says of it.
GOOD = Resources(registers=64, spill_bytes=0, shared_bytes=8192, threads=256, template="t")


def widest(module, strategy=None, form=""):
    graph = graph_of(module)
    found = [p for p in (strategy or Vertical()).propose(graph, CONFIG)]
    matching = [p for p in found if not form or p.option("form") == form]
    return max(matching, key=lambda p: len(p.operators)), graph


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "module", [matmul_pair(rows=8192), parallel_convs(1, relu=True, spatial=56)]
)
def test_usual_groups_fit_on_every_chip(arch, module):
    proposal, graph = widest(module)
    assert judge(proposal, graph, CONFIG, DEVICES[arch]) is ACCEPTED


@pytest.mark.parametrize("arch", ARCHES)
def test_shared_memory_of_the_chip(arch):
    """Rows of 16,384 float32 values of a product need 64 KiB a row: more than any static block gets."""
    proposal, graph = widest(dense_norm(rows=4, width=64, outputs=16384), form="anchor_row")
    found = SharedMemory().check(proposal, graph, CONFIG, DEVICES[arch])
    assert (found.outcome, found.reason) == ("unsupported", "shared_memory")
    assert found.numbers["shared_bytes"] >= 4 * 16384
    assert found.numbers["max_shared_memory"] == 48 * 1024
    assert found.numbers["source"] == "estimated"
    proposal, graph = widest(dense_norm(rows=4, width=64, outputs=1024), form="anchor_row")
    assert SharedMemory().check(proposal, graph, CONFIG, DEVICES[arch]).accepted


def test_the_user_may_allow_less_shared_memory_and_not_more():
    proposal, graph = widest(matmul_pair())
    used = footprint(graph, proposal, DEVICE).shared_bytes
    guard = SharedMemory()
    exact = FusionConfig(max_shared_memory=used)
    assert guard.check(proposal, graph, exact, DEVICE).accepted
    found = guard.check(proposal, graph, FusionConfig(max_shared_memory=used - 1), DEVICE)
    assert (found.outcome, found.reason) == ("unprofitable", "shared_memory")
    assert found.numbers == {
        "shared_bytes": used, "max_shared_memory": used - 1, "source": "estimated",
    }  # fmt: skip
    large, graph = widest(dense_norm(rows=4, width=64, outputs=16384), form="anchor_row")
    found = guard.check(large, graph, FusionConfig(max_shared_memory=10**6), DEVICE)
    assert found.outcome == "unsupported" and found.numbers["max_shared_memory"] == 48 * 1024


def test_registers():
    proposal, graph = widest(parallel_convs(4, relu=True, spatial=56), Horizontal(), "merged")
    used = footprint(graph, proposal, DEVICE).registers
    guard = Registers()
    assert guard.check(proposal, graph, CONFIG, DEVICE).accepted
    assert guard.check(proposal, graph, FusionConfig(max_registers=used), DEVICE).accepted
    found = guard.check(proposal, graph, FusionConfig(max_registers=used - 1), DEVICE)
    assert (found.outcome, found.reason) == ("unprofitable", "registers")
    assert found.numbers == {"registers": used, "max_registers": used - 1, "source": "estimated"}


def test_joined_branches_need_registers_of_their_own():
    """Two anchors that meet in a thread hold twice the accumulators that one does, or smaller tiles."""
    one, graph = widest(parallel_convs(1, relu=True, spatial=56))
    alone = footprint(graph, one, DEVICE)
    two, graph = widest(parallel_convs(2, relu=True, spatial=56), Horizontal(), "merged")
    both = footprint(graph, two, DEVICE)
    assert both.registers > alone.registers or both.blocks > alone.blocks


@pytest.mark.parametrize(
    ("arch", "needs", "blocks", "occupancy"),
    [
        # 64 registers · 32 lanes = 2048 a warp, 8 warps = 16384 a block: 65536 / 16384 = 4 blocks
        ("sm_90", {}, 4, 1024 / 2048),
        ("sm_86", {}, 4, 1024 / 1536),
        ("sm_75", {}, 4, 1024 / 1024),
        # 33 · 32 = 1056, rounded up to 1280 a warp: 65536 / 10240 = 6 blocks
        ("sm_90", {"registers": 33}, 6, 1536 / 2048),
        # 16 · 32 · 8 = 4096: 16 blocks by registers, 8 by threads
        ("sm_90", {"registers": 16}, 8, 1.0),
        ("sm_86", {"registers": 16}, 6, 1.0),
        # 228 KiB / (40 + 1) KiB = 5 blocks; 100 KiB / 41 KiB = 2
        ("sm_90", {"registers": 16, "shared_bytes": 40 * 1024}, 5, 1280 / 2048),
        ("sm_120", {"registers": 16, "shared_bytes": 40 * 1024}, 2, 512 / 1536),
        # 32 threads: 32 blocks of one warp on sm_90, 16 on sm_75
        ("sm_90", {"threads": 32, "registers": 16, "shared_bytes": 0}, 32, 1024 / 2048),
        ("sm_75", {"threads": 32, "registers": 16, "shared_bytes": 0}, 16, 512 / 1024),
        # a block that does not fit at all: 255 · 32 → 8192 a warp, 32 warps = 4 × the registers
        ("sm_90", {"threads": 1024, "registers": 255}, 0, 0.0),
    ],
)
def test_occupancy_by_hand(arch, needs, blocks, occupancy):
    kernel = dataclasses.replace(FITS, **needs)
    assert kernel.resident_blocks(DEVICES[arch]) == blocks
    assert kernel.occupancy(DEVICES[arch]) == pytest.approx(occupancy)


def test_occupancy():
    proposal, graph = widest(parallel_convs(1, relu=True, spatial=56))
    device = DEVICES["sm_75"]
    reached = footprint(graph, proposal, device).occupancy(device)
    guard = Occupancy()
    assert guard.check(proposal, graph, CONFIG, device).accepted
    assert guard.check(proposal, graph, FusionConfig(min_occupancy=reached), device).accepted
    found = guard.check(proposal, graph, FusionConfig(min_occupancy=1.0), device)
    assert (found.outcome, found.reason) == ("unprofitable", "occupancy")
    assert found.numbers["occupancy"] == round(reached, 4) < 1
    assert found.numbers["min_occupancy"] == 1.0 and found.numbers["source"] == "estimated"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_that_copy_asynchronously_need_few_warps(dtype):
    """From sm_80 on: the model of their tiles says what few warps cost."""
    layout = "NCHW" if dtype == "float32" else "NHWC"
    module = parallel_convs(1, relu=True, spatial=56, dtype=dtype, layout=layout)
    proposal, graph = widest(module)
    assert footprint(graph, proposal, DEVICE).occupancy(DEVICE) < 1
    assert Occupancy().check(proposal, graph, FusionConfig(min_occupancy=1.0), DEVICE).accepted


def test_small_blocks_are_no_lack_of_registers():
    """32 blocks of 4 threads are 6 % of a multiprocessor, and all that may be resident."""
    tiny = dataclasses.replace(GOOD, threads=4, shared_bytes=256)
    assert judge_resources(tiny, FITS, FusionConfig(), DEVICE) is ACCEPTED
    # 40 KiB each: 5 of the 32 blocks
    fat = dataclasses.replace(tiny, shared_bytes=40 * 1024)
    assert judge_resources(fat, FITS, FusionConfig(), DEVICE).reason == "occupancy"


def test_a_small_convolution_keeps_its_epilogue():
    """25 positions of 16 channels: one warp a block would leave a multiprocessor idle, fused or not."""
    proposal, graph = widest(mixed_convs([16], stride=3))
    assert proposal.operators == ("conv0", "relu0")
    assert judge(proposal, graph, CONFIG, DEVICE) is ACCEPTED


@pytest.mark.parametrize("guard", [SharedMemory(), Registers(), Occupancy()])
def test_a_cpu_has_no_such_limits(guard):
    proposal, graph = widest(dense_norm(rows=4, width=64, outputs=16384), form="anchor_row")
    config = FusionConfig(max_registers=1, max_shared_memory=1, min_occupancy=1.0)
    assert guard.check(proposal, graph, config, CPU).accepted
    assert not guard.check(proposal, graph, config, DEVICE).accepted


def test_compile_time():
    chain, graph = widest(elementwise_chain(40))
    guard = CompileTime()
    seconds = build_seconds(graph, chain.operators)
    assert guard.check(chain, graph, CONFIG, DEVICE).accepted
    assert guard.check(chain, graph, FusionConfig(max_build_seconds=seconds), DEVICE).accepted
    found = guard.check(chain, graph, FusionConfig(max_build_seconds=0.1), DEVICE)
    assert (found.outcome, found.reason) == ("unprofitable", "compile_time")
    assert found.numbers == {
        "seconds": round(seconds, 1),
        "max_build_seconds": 0.1,
        "operations": expression_size(graph, chain.operators),
    }


def test_expressions_double_where_a_value_is_read_twice():
    """x ← erf(x) + sigmoid(x): sizes 1, then 2 s + 3 for each diamond."""
    graph = graph_of(diamonds(12))
    names = tuple(o.name for o in graph.operators)
    sizes = [3]
    for _ in range(3):
        sizes.append(2 * sizes[-1] + 3)
    assert [expression_size(graph, names[: 3 * k]) for k in (1, 2, 3, 4)] == sizes
    chain = graph_of(elementwise_chain(12))
    assert expression_size(chain, [o.name for o in chain.operators]) == 12
    plan = planned(graph_of(diamonds(60)))
    assert all(expression_size(graph_of(diamonds(60)), g.nodes) < 5000 for g in plan.groups)


def leaky(b, i, x):
    """Three reads of x, one of them in a comparison."""
    condition = b.op(f"greater_{i}", relax.op.greater(x, relax.const(0.0, "float32")))
    scaled = b.op(f"scaled_{i}", relax.op.multiply(x, relax.const(0.1, "float32")))
    return b.op(f"where_{i}", relax.op.where(condition, x, scaled))


def pointwise(function):
    """The same pointwise operator as `leaky` makes it of three."""
    return lambda b, i, x: b.op(f"f_{i}", function(x))


def links(link, count):
    b = ModuleBuilder()
    x = b.input("x", (4, 64))
    for i in range(count):
        x = b.op(f"mul_{i}", relax.op.multiply(link(b, i, x), relax.const(0.9, "float32")))
    return graph_of(b.finish(x))


@pytest.mark.parametrize(
    "link",
    [leaky, pointwise(relax.op.tanh), pointwise(relax.op.sign)],
    ids=["where", "tanh", "sign"],
)
def test_chains_that_compilers_take_minutes_for_are_cut(link):
    """Six links took more than half a minute, each further one ten times as long."""
    graph = links(link, 8)
    plan = planned(graph)
    assert len(plan.groups) > 1 and any(r.reason == "compile_time" for r in plan.rejected)
    assert all(build_seconds(graph, g.nodes) < CONFIG.max_build_seconds for g in plan.groups)
    short = links(link, 3)
    assert [len(g.nodes) for g in planned(short).groups] == [len(short.operators)]


@pytest.mark.parametrize(
    "function", [relax.op.nn.relu, relax.op.sigmoid, relax.op.abs], ids=["relu", "sigmoid", "abs"]
)
def test_chains_that_read_once_are_not_cut(function):
    graph = links(pointwise(function), 16)
    assert [len(g.nodes) for g in planned(graph).groups] == [32]


def test_build_time_grows_with_anchors_that_stay_apart():
    merged, graph = widest(parallel_convs(4, relu=True, spatial=14), Horizontal(), "merged")
    apart = dataclasses.replace(merged, options=(("form", "joined"), ("join", "add")))
    once, each = (
        build_seconds(graph, merged.operators, 1),
        build_seconds(graph, merged.operators, 4),
    )
    limit = FusionConfig(max_build_seconds=(once + each) / 2)
    assert CompileTime().check(merged, graph, limit, DEVICE).accepted
    assert CompileTime().check(apart, graph, limit, DEVICE).reason == "compile_time"


@pytest.mark.parametrize(
    ("change", "outcome", "reason", "numbers"),
    [
        ({}, "ok", "", {}),
        ({"error": "no template takes it"}, "unsupported", "no_template", {}),
        ({"spill_bytes": 16}, "unprofitable", "spill", {"spill_bytes": 16, "registers": 64}),
        (
            {"registers": 256}, "unprofitable", "registers",
            {"registers": 256, "max_registers": 255, "source": "compiled"},
        ),
        (
            {"shared_bytes": 49153}, "unsupported", "shared_memory",
            {"shared_bytes": 49153, "max_shared_memory": 49152, "source": "compiled"},
        ),
        # 255 · 32 → 8192 a warp: 8 warps of 256 threads, the whole register file for 12.5 %
        ({"registers": 255}, "ok", "", {}),
        (
            {"registers": 255, "threads": 160}, "unprofitable", "occupancy",
            {
                "occupancy": 160 / 2048, "min_occupancy": 0.125, "registers": 255, "shared_bytes": 8192,
                "threads": 160, "source": "compiled",
            },
        ),
    ],
)  # fmt: skip
def test_a_compiled_kernel(change, outcome, reason, numbers):
    found = judge_resources(dataclasses.replace(GOOD, **change), FITS, CONFIG, DEVICE)
    assert (found.outcome, found.reason) == (outcome, reason)
    rounded = {
        k: pytest.approx(v, abs=1e-4) if isinstance(v, float) else v for k, v in numbers.items()
    }
    assert dict(found.numbers) == rounded


def test_limits_of_compiled_kernels_are_options():
    assert judge_resources(GOOD, FITS, FusionConfig(max_registers=63), DEVICE).reason == "registers"
    small = FusionConfig(max_shared_memory=4096)
    assert judge_resources(GOOD, FITS, small, DEVICE).reason == "shared_memory"
    full = FusionConfig(min_occupancy=0.75)
    assert judge_resources(GOOD, FITS, full, DEVICE).reason == "occupancy"


def test_what_the_compiler_does_not_say_is_taken_from_the_estimate():
    bad = dataclasses.replace(FITS, threads=1024, registers=255)
    assert judge_resources(Resources(), bad, CONFIG, DEVICE).reason == "occupancy"
    assert judge_resources(Resources(), FITS, CONFIG, DEVICE).accepted


def test_compiled_kernels_on_a_cpu():
    assert judge_resources(Resources(spill_bytes=99), FITS, CONFIG, CPU).accepted
    assert judge_resources(Resources(error="no"), FITS, CONFIG, CPU).reason == "no_template"


def test_a_kernel_of_one_member_is_no_larger_than_its_launch():
    """The blocks of a partitioned launch add up; its largest member sizes each block."""
    b = ModuleBuilder()
    x = b.input("x", (1, 32, 28, 28))
    graph = graph_of(b.finish(b.relu("r", b.conv("a", x, 32)), b.conv("b", x, 32, 1)))
    members = (("a", "r"), ("b",))
    options = (("form", "partitioned"), ("join", "apart"))
    (first,) = [p for p in Vertical().propose(graph, CONFIG) if p.operators == ("a", "r")]
    launch = dataclasses.replace(
        first, strategy="compound", operators=("a", "r", "b"), anchors=("a", "b"), members=members,
        options=options,
    )  # fmt: skip
    whole, part = footprint(graph, launch, DEVICE), footprint(graph, first, DEVICE)
    assert whole.blocks > part.blocks and whole.registers >= part.registers
    assert whole.shared_bytes >= part.shared_bytes
    assert whole.flops == part.flops + graph.by_name["b"].flops
