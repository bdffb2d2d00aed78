"""Which problems have their reduction split among the blocks of a cluster, and which have not."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.devices import DEVICES
from tvm_fusion.guards import fma_tiles
from tvm_fusion.guards.clusters import most_blocks, reached
from tvm_fusion.guards.footprint import as_proposal, footprint
from tvm_fusion.guards.split_tiles import SLICES, SPLIT_RATES, best_choices, best_fma_choices
from tvm_fusion.guards.tensor_tiles import Problem
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import DEVICE, graph_of

#: ResNet's 3x3 convolution at 7x7, a classifier of four images and of 32, BERT's second product of 128 tokens.
FEW_TILES = [
    Problem(49, 512, 1, (4608,), (1,), reduction_inner=True),
    Problem(4, 1000, 1, (4096,), (1,), reduction_inner=True),
    Problem(32, 1000, 1, (4096,), (1,), reduction_inner=True),
    Problem(128, 768, 1, (3072,), (1,), reduction_inner=True),
]

#: Measured on an H200: no split is faster. ResNet's 1x1 convolutions at 7x7 and 14x14, BERT's projection of 128 tokens.
NOT_FASTER = [
    Problem(49, 512, 1, (2048,), (1,), reduction_inner=True),
    Problem(196, 256, 1, (1024,), (1,), reduction_inner=True),
    Problem(128, 768, 1, (768,), (1,), reduction_inner=True),
]

#: Enough tiles, or a short reduction.
MANY_TILES = [
    Problem(3136, 64, 1, (576,), (1,), reduction_inner=True),
    Problem(16384, 64, 1, (576,), (4,), reduction_inner=True),
    Problem(512, 1536, 1, (512,), (1,), 64, reduction_inner=True),
    Problem(49, 2048, 1, (512,), (1,), reduction_inner=True),
    Problem(32, 4096, 1, (1024,), (1,), reduction_inner=True),
    Problem(4096, 4096, 1, (4096,), (1,), reduction_inner=True),
]


def convolution(channels: int, size: int) -> fma_tiles.Problem:
    """A 3x3 convolution, channels first: its rows are channels."""
    side = fma_tiles.Side(size * size, width=1)
    return fma_tiles.Problem(fma_tiles.Side(channels), side, 1, (9 * channels,), (1,))


def linear(rows: int, depth: int, columns: int) -> fma_tiles.Problem:
    """A float32 product."""
    left = fma_tiles.Side(rows, width=1, transposed=True)
    return fma_tiles.Problem(left, fma_tiles.Side(columns), 1, (depth,), (1,))


@pytest.mark.parametrize(
    ("problem", "warpgroups"),
    [*((problem, True) for problem in FEW_TILES), *((problem, False) for problem in FEW_TILES[:3])],
)
def test_few_tiles_and_a_long_reduction_are_split(problem, warpgroups):
    (chosen,) = best_choices(problem, DEVICE, warpgroups=warpgroups)
    (whole,) = best_choices(problem, DEVICE, warpgroups=warpgroups, clusters=False)
    assert chosen.tile.slices in SLICES
    assert whole.tile.slices == 1
    assert chosen.microseconds < SPLIT_RATES.margin * whole.microseconds


@pytest.mark.parametrize("problem", MANY_TILES + NOT_FASTER)
def test_enough_tiles_or_a_short_reduction_are_not(problem):
    (chosen,) = best_choices(problem, DEVICE)
    assert chosen.tile.slices == 1


@pytest.mark.parametrize(
    ("problem", "slices", "measured"),
    [(FEW_TILES[0], 8, 3.98), (FEW_TILES[1], 8, 3.08), (FEW_TILES[2], 8, 4.15)],
)
def test_predictions_are_near_measurements(problem, slices, measured):
    """The model's choice on one H200, launches that overlap; benchmarks/NOTES.md."""
    (chosen,) = best_choices(problem, DEVICE)
    assert chosen.tile.slices == slices
    assert chosen.microseconds == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("problem", [convolution(512, 7), linear(4, 4096, 1000)])
def test_few_float32_tiles_are_split(problem):
    (chosen,) = best_fma_choices(problem, DEVICE)
    (whole,) = best_fma_choices(problem, DEVICE, clusters=False)
    assert chosen.tile.slices in SLICES
    assert whole.tile.slices == 1
    assert chosen.microseconds < SPLIT_RATES.margin * whole.microseconds
    (other,) = best_fma_choices(problem, DEVICES["sm_80"])
    assert other.tile.slices == 1
    assert other.tile.warp_depth > 1


@pytest.mark.parametrize(
    "problem", [convolution(64, 56), linear(512, 512, 1536), linear(32, 1024, 4096)]
)
def test_enough_float32_tiles_are_not(problem):
    (chosen,) = best_fma_choices(problem, DEVICE)
    assert chosen.tile.slices == 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
@pytest.mark.parametrize("problem", FEW_TILES)
def test_nothing_is_split_without_clusters(problem, arch):
    found = best_choices(problem, DEVICES[arch], 256)
    assert all(choice.tile.slices == 1 for choice in found)
    # Warps of a block share the reduction there.
    assert found[0].tile.warp_depth > 1


@pytest.mark.parametrize("problem", FEW_TILES + MANY_TILES)
def test_split_tiles_keep_to_the_chip(problem):
    found = [c.tile for c in best_choices(problem, DEVICE, 256) if c.tile.slices > 1]
    for tile in found:
        asked = tile.requested_bytes(problem, DEVICE)
        assert tile.shared_bytes(problem) <= asked <= DEVICE.shared_memory_per_block_optin
        assert tile.slices <= most_blocks(DEVICE)
        # Every block finishes as many outputs.
        assert 2 * tile.row_fragments * tile.column_fragments % tile.slices == 0
        # All blocks of the kernel run at once.
        most = DEVICE.shared_memory_per_multiprocessor // (asked + 1024)
        assert tile.blocks(problem) <= most * reached(DEVICE, most, tile.slices)


def test_the_search_has_splits_that_the_margin_keeps_from_the_first_place():
    """What the model puts close together, tuning measures."""
    problem = Problem(49, 512, 1, (2048,), (1,), reduction_inner=True)
    found = best_choices(problem, DEVICE, 256)
    assert found[0].tile.slices == 1
    assert any(choice.tile.slices > 1 for choice in found)


def test_a_smaller_chip_has_fewer_blocks():
    small = dataclasses.replace(DEVICE, multiprocessors=16)
    problem = FEW_TILES[0]
    blocks = [best_choices(problem, d)[0].tile.blocks(problem) for d in (small, DEVICE)]
    assert blocks[0] < blocks[1]


def seven(spatial: int = 7):
    """ResNet's 3x3 convolution of 512 channels, as a graph."""
    b = ModuleBuilder("float16", "NHWC")
    value = b.conv("conv", b.input("x", (1, spatial, spatial, 512)), 512, 3)
    return graph_of(b.finish(b.relu("relu", value)))


def test_the_planner_predicts_what_the_template_builds():
    graph = seven()
    names = tuple(operator.name for operator in graph.operators)
    anchors = tuple(o.name for o in graph.operators if o.pattern == "anchor")
    group = Proposal("vertical", names, anchors, (names,), 2)
    (chosen,) = best_choices(FEW_TILES[0], DEVICE)
    found = footprint(graph, group, DEVICE)
    assert found.microseconds == chosen.microseconds
    assert found.blocks == chosen.tile.blocks(FEW_TILES[0])
    # A member of a partitioned kernel is built without clusters.
    alone = footprint(graph, as_proposal(graph, names), DEVICE)
    (whole,) = best_choices(FEW_TILES[0], DEVICE, clusters=False)
    assert alone.microseconds == whole.microseconds
