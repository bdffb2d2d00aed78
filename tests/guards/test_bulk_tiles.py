"""The time model of the copy engine's tiles, and that plans count on it where the kernels will have them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import tvm_fusion as tf
from tvm_fusion.devices import DEVICES
from tvm_fusion.guards.bulk_tiles import BulkTile, bulk_choices, predict
from tvm_fusion.guards.split_tiles import best_choices
from tvm_fusion.guards.tensor_tiles import Problem
from tvm_fusion.testing.bulk_models import feed_forward

DEVICE = DEVICES["sm_90"]
LARGE = Problem(4096, 4096, 1, (1024,), (1,), reduction_inner=True)
TILE = BulkTile(128, 256, 64, 8, 1, 1, 4)


def test_a_large_product_is_faster_with_it_and_a_small_one_is_not():
    assert bulk_choices(LARGE, DEVICE)[0].microseconds < best_choices(LARGE, DEVICE)[0].microseconds
    small = dataclasses.replace(LARGE, rows=64, columns=512)
    assert bulk_choices(small, DEVICE)[0].microseconds > best_choices(small, DEVICE)[0].microseconds


def test_what_costs_time_costs_time():
    time = predict(LARGE, DEVICE, TILE)
    longer = dataclasses.replace(LARGE, depths=(2048,))
    assert 1.7 * time < predict(longer, DEVICE, TILE) < 2.0 * time  # the end of a tile is paid once
    assert predict(dataclasses.replace(LARGE, rows=8192), DEVICE, TILE) > 1.8 * time
    # Stores of four bytes; waits for a copy that nothing hides.
    assert predict(LARGE, DEVICE, dataclasses.replace(TILE, bulk=1)) > 1.1 * time
    narrow = BulkTile(128, 64, 64, 8, 1, 1, 3)
    assert predict(LARGE, DEVICE, dataclasses.replace(narrow, stages=6)) < predict(
        LARGE, DEVICE, narrow
    )


def test_of_equal_times_four_stages_come_first_then_the_most():
    found = bulk_choices(LARGE, DEVICE, 1000)
    ties = 0
    for one, other in itertools.pairwise(found):
        assert one.microseconds <= other.microseconds
        if one.microseconds == other.microseconds:
            first, second = one.tile.stages, other.tile.stages
            assert first == 4 or (second != 4 and first >= second)
            ties += first != second
    assert ties


@pytest.mark.parametrize(("target", "faster"), [("cuda:sm_90", True), ("cuda:sm_80", False)])
def test_a_plan_counts_on_it_where_the_operands_are_taken(target, faster):
    """Rows of 1020 elements begin at no 16 bytes."""
    taken, other = (
        tf.plan(feed_forward(4096, depth, 4096), target).totals.predicted_us_after
        for depth in (1024, 1020)
    )
    assert (taken < 0.95 * other) == faster
