"""Values that a fused kernel would compute again and again."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.guards import judge
from tvm_fusion.guards.footprint import footprint
from tvm_fusion.guards.recompute import Recompute
from tvm_fusion.strategies import Vertical
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.testing.blocks import depthwise_pointwise, inverted_residual
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import DEVICE, graph_of
from tvm_fusion.testing.transformer_blocks import matmul_pair


def narrow_then_wide(width, dtype="float16"):
    """``big + exp(-x)``, ``x [64, 1]``, ``big [64, width]``."""
    b = ModuleBuilder(dtype)
    x, big = b.input("x", (64, 1)), b.input("big", (64, width))
    return b.finish(b.add("sum", big, b.op("exp", relax.op.exp(b.op("neg", relax.op.negative(x))))))


WHOLE = Proposal("vertical", ("neg", "exp", "sum"), (), (("neg", "exp", "sum"),), 3)


@pytest.mark.parametrize(("width", "refused"), [(1, False), (4, False), (5, True), (4096, True)])
def test_a_chain_pulled_over_a_broadcast(width, refused):
    """Each narrow value would be computed once for every element of its row; four times are allowed."""
    found = judge(WHOLE, graph_of(narrow_then_wide(width)), FusionConfig(), DEVICE)
    assert found.reason == ("recompute" if refused else "")
    if refused:
        assert found.outcome == "unprofitable"
        assert found.numbers == {"factor": width, "max_recompute": 4.0}
        assert f"computed {width} times" in found.detail


def test_the_limit_is_an_option():
    graph = graph_of(narrow_then_wide(64))
    assert judge(WHOLE, graph, FusionConfig(max_recompute=64), DEVICE).accepted
    assert judge(WHOLE, graph, FusionConfig(max_recompute=63.9), DEVICE).reason == "recompute"


def test_executed_flops_count_every_repetition():
    # 64 elements of neg and exp, 4096 times each, and one addition per element of the result.
    needs = footprint(graph_of(narrow_then_wide(4096)), WHOLE, DEVICE)
    assert needs.flops == 2 * 64 * 4096 + 64 * 4096


def test_a_broadcast_behind_an_anchor_repeats_nothing():
    """A bias of one value per channel is read, not computed."""
    b = ModuleBuilder()
    y = b.relu("relu", b.bias("bias", b.conv("conv", b.input("x", (1, 8, 14, 14)), 8)))
    graph = graph_of(b.finish(y))
    names = ("conv", "bias", "relu")
    proposal = Proposal("vertical", names, ("conv",), (names,), 3)
    assert footprint(graph, proposal, DEVICE).recompute == 1.0
    assert Recompute().check(proposal, graph, FusionConfig(max_recompute=1), DEVICE).accepted


def back_to_back(module, **options):
    graph, config = graph_of(module), FusionConfig(**options)
    found = [p for p in Vertical().propose(graph, config) if p.option("form") == "back_to_back"]
    proposal = max(found, key=lambda p: len(p.operators))
    return footprint(graph, proposal, DEVICE), Recompute().check(proposal, graph, config, DEVICE)


@pytest.mark.parametrize(
    ("columns", "factor"), [(256, 1), (1024, 1), (1025, 2), (4096, 4), (4097, 5), (8192, 8)]
)
def test_every_block_of_columns_computes_the_first_product_again(columns, factor):
    """A block holds 1,024 columns of 16 rows: 64 accumulators for each of its 256 threads."""
    needs, found = back_to_back(matmul_pair(rows=8192, outputs=columns))
    assert needs.recompute == factor
    assert found.reason == ("recompute" if factor > 4 else "")
    # bias and ReLU of the first product are computed as often as it is: [8192, 64] each
    first = 2 * 8192 * 64 * 256 + 2 * 8192 * 64
    second = 2 * 8192 * columns * 64 + 8192 * columns
    assert needs.flops == factor * first + second


def test_fewer_columns_where_rows_alone_leave_multiprocessors_idle():
    """32 blocks of 16 rows do not keep 132 busy: 64 columns each, and the first product 4 times."""
    needs, found = back_to_back(matmul_pair(rows=512))
    assert needs.blocks == 32 * 4 and needs.recompute == 4 and found.accepted
    needs, found = back_to_back(matmul_pair(rows=128))
    assert needs.recompute == 8 and found.reason == "recompute"


def test_a_halo_is_computed_by_its_neighbours_too():
    """1x1 -> depthwise 3x3 on 14x14: tiles of 4x4 positions need 6x6 of the first, (6/4)² as many."""
    b = ModuleBuilder()
    y = b.conv("expand", b.input("x", (1, 32, 14, 14)), 192, 1)
    module = b.finish(b.conv("depthwise", y, 192, groups=192))
    needs, found = back_to_back(module)
    assert needs.recompute == 2.25 and needs.repeated == "expand" and found.accepted
    _, found = back_to_back(module, max_recompute=2.0)
    assert found.numbers == {"factor": 2.25, "max_recompute": 2.0}


def test_a_pointwise_second_anchor_has_no_halo():
    needs, found = back_to_back(depthwise_pointwise(size=112), max_recompute=1.0)
    assert needs.recompute == 1.0 and found.accepted


def test_a_stride_reads_less_overlap():
    """Stride 2: a tile of 4x4 positions needs 9x9 of the first, which are (9/8)² of its own 8x8."""
    b = ModuleBuilder()
    y = b.conv("expand", b.input("x", (1, 32, 28, 28)), 192, 1)
    needs, _ = back_to_back(b.finish(b.conv("depthwise", y, 192, groups=192, stride=2)))
    assert needs.recompute == pytest.approx((9 / 8) ** 2)


def test_the_block_of_a_mobile_network_is_within_the_limit():
    _, found = back_to_back(inverted_residual())
    assert found.accepted


def test_a_cast_over_a_broadcast_repeats_no_work():
    """Nothing is computed again where numbers only change their type."""
    b = ModuleBuilder("float16")
    x, big = b.input("x", (64, 1)), b.input("big", (64, 4096))
    wide = b.op("wide", relax.op.astype(x, "float32"))
    sum_ = b.add("sum", b.op("other", relax.op.astype(big, "float32")), wide)
    names = ("wide", "other", "sum")
    proposal = Proposal("vertical", names, (), (names,), 2)
    assert footprint(graph_of(b.finish(sum_)), proposal, DEVICE).recompute == 1.0
