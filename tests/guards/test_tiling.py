"""Tiles of kernels that have no time model of their own, their shared memory, and members side by side: by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.devices import DEVICES
from tvm_fusion.guards.footprint import _side_by_side
from tvm_fusion.guards.needs import Footprint
from tvm_fusion.guards.tensor_tiles import RATES
from tvm_fusion.guards.tiling import BlockTile, Contraction, block_tile, serial_depth, staged_bytes

DEVICE = DEVICES["sm_90"]  # 132 multiprocessors

#: A 3x3 convolution of 64 channels.
CONV = Contraction(16384, 64, 576, 9, 1, 1, 4)

#: A block's tile of it.
TILE = BlockTile(64, 64, 32, 256, 128)


@pytest.mark.parametrize(
    ("what", "copies", "tile"),
    [
        # 2^20 outputs: 256 blocks of 128 threads with 32 sums each, and too few blocks with 64.
        (CONV, 1, TILE),
        # Of four branches a thread keeps at most 16 sums each.
        (CONV, 4, BlockTile(32, 64, 16, 512, 128)),
        # A small map: every multiprocessor cannot have a block, so the tile is the smallest.
        (dataclasses.replace(CONV, rows=49), 1, BlockTile(8, 16, 1, 28, 128)),
        # Few columns: the rows take what they leave.
        (dataclasses.replace(CONV, columns=4), 1, BlockTile(64, 4, 2, 256, 128)),
        # A matrix times a vector: eight warps, an output each.
        (dataclasses.replace(CONV, rows=1, columns=100), 1, BlockTile(1, 8, 1, 13, 256)),
    ],
)
def test_a_block_is_as_large_as_leaves_every_multiprocessor_one(what, copies, tile):
    assert block_tile(what, DEVICE, copies) == tile


@pytest.mark.parametrize(
    ("change", "limit", "copies", "expected"),
    [
        # A patch of 10 x 10 positions and 64 columns of 9 weights, four bytes each, of eight channels.
        ({}, 48 << 10, 1, 8 * 4 * (100 + 64 * 9)),
        ({}, 20_000, 1, 4 * 4 * (100 + 64 * 9)),
        ({}, 100, 1, 4 * (100 + 64 * 9)),  # one channel at least
        ({}, 48 << 10, 2, 8 * 4 * (100 + 2 * 64 * 9)),
        ({"stride": 4}, 48 << 10, 1, 8 * 4 * (400 + 64 * 9)),
        ({"nbytes": 2}, 48 << 10, 1, 8 * 2 * (100 + 64 * 9)),
        ({"depth": 27}, 48 << 10, 1, 3 * 4 * (100 + 64 * 9)),  # an image of three channels
        ({"window": 1, "depth": 64}, 48 << 10, 1, 64 * 4 * (64 + 64)),
        ({"groups": 64, "depth": 9}, 48 << 10, 1, 0),  # depthwise: nothing is shared
    ],
)
def test_slices_of_operands_in_shared_memory(change, limit, copies, expected):
    assert staged_bytes(dataclasses.replace(CONV, **change), TILE, limit, copies) == expected


def test_a_warp_shares_the_products_of_an_output_where_rows_are_few():
    assert serial_depth(CONV) == 576
    assert serial_depth(dataclasses.replace(CONV, rows=8)) == 18
    assert serial_depth(dataclasses.replace(CONV, rows=9)) == 576


def member(microseconds, blocks):
    return Footprint(128, blocks, 64, 0, 1, microseconds=microseconds)


START = (RATES.start + RATES.latency) / RATES.clock


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        # Few blocks: all at once, as long as the longest.
        ([(5.0, 10), (4.0, 10)], 5.0),
        # A full chip each: one after the other, but for the start.
        ([(5.0, 132), (4.0, 1000)], 9.0 - START),
        # Half of one chip and all of another.
        ([(5.0, 132), (4.0, 66)], 5.0 + (4.0 - START) / 2),
        # Where a member has no time model, the launch has none.
        ([(5.0, 132), (0.0, 66)], 0.0),
    ],
)
def test_members_in_one_launch(members, expected):
    found = _side_by_side([member(*m) for m in members], DEVICE)
    assert found == pytest.approx(expected)
