"""Predicted times of products whose rows are reduced, against kernels measured on an H200."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.devices import device_for
from tvm_fusion.guards.tensor_rows import (
    RowProblem,
    best_row_tiles,
    predict_rows,
    requested_row_bytes,
    row_tile_bytes,
)
from tvm_fusion.guards.tensor_tiles import Problem, Tile, best_tiles
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.plans import DEVICE

#: Four products [32, 1024] x [1024, 1024] with layer norms; [128, 768] x [768, 768] and [128, 3072] x [3072, 768] with
#: one; the same of 4096 rows.
HEADS = RowProblem(Problem(32, 4096, 1, (1024,), (1,)), 1024, 2)
OUTPUT, FFN = (RowProblem(Problem(128, 768, 1, (k,), (1,)), 768, 2) for k in (768, 3072))
LONG, LONG_FFN = (RowProblem(Problem(4096, 768, 1, (k,), (1,)), 768, 2) for k in (768, 3072))

#: The best tiles that were measured, and one that needs more clusters than there is room for at once.
MEASURED = [
    (HEADS, (16, 128, 128, 1, 4, 1, 4), 7.02),
    (HEADS, (16, 128, 64, 1, 4, 1, 6), 6.77),
    (OUTPUT, (16, 96, 128, 1, 3, 1, 4), 4.97),
    (OUTPUT, (16, 96, 128, 1, 3, 2, 5), 5.14),
    (FFN, (16, 96, 128, 1, 3, 1, 4), 11.01),
    (FFN, (16, 96, 128, 1, 3, 2, 5), 11.64),
    (LONG, (64, 256, 64, 2, 4, 1, 3), 27.47),
    (LONG_FFN, (128, 128, 64, 2, 2, 1, 3), 69.74),
    (LONG_FFN, (128, 192, 64, 2, 4, 1, 3), 107.33),
]


@pytest.mark.parametrize(("problem", "tile", "measured"), MEASURED)
def test_measured_kernels(problem, tile, measured):
    assert predict_rows(problem, DEVICE, Tile(*tile)) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("problem", [HEADS, OUTPUT, FFN, LONG, LONG_FFN])
def test_the_chosen_tile_is_no_wishful_thinking(problem):
    """No tile is predicted much faster than the best of the measured ones, nor than the product alone."""
    (chosen,) = best_row_tiles(problem, DEVICE)
    known = [us for p, _, us in MEASURED if p is problem]
    assert chosen.microseconds > 0.7 * min(known)
    assert chosen.microseconds > best_tiles(problem.product, DEVICE)[0].microseconds


def test_more_clusters_than_there_is_room_for_take_two_turns():
    """30 clusters of four blocks fit on an H200: 4096 rows of 768 columns are 32 of these tiles, 3712 are 29."""
    tile = Tile(128, 192, 64, 2, 4, 1, 3)
    fewer = dataclasses.replace(LONG, product=dataclasses.replace(LONG.product, rows=3712))
    ratio = predict_rows(LONG, DEVICE, tile) / predict_rows(fewer, DEVICE, tile)
    assert 1.7 < ratio < 2


def test_without_clusters_rows_stay_in_a_block():
    device = device_for(parse_target("cuda:sm_80"))
    (chosen,) = best_row_tiles(LONG, device)
    assert chosen.tile.columns >= LONG.length


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_a_block_takes_the_room_of_another_one(stages):
    """64 blocks for 132 multiprocessors: were there room for two, some would wait for others (measured)."""
    tile = Tile(16, 128, 128, 1, 2, 2, stages)
    asked = requested_row_bytes(HEADS, tile, DEVICE)
    assert row_tile_bytes(HEADS, tile) <= asked <= DEVICE.shared_memory_per_block_optin
    assert 2 * (asked + 1024) > DEVICE.shared_memory_per_multiprocessor


def test_many_blocks_ask_for_what_they_need():
    tile = Tile(16, 96, 64, 1, 3, 1, 2)
    assert requested_row_bytes(LONG, tile, DEVICE) == row_tile_bytes(LONG, tile)
