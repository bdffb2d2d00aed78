"""Plans count on tensor cores exactly where the template takes the layout of constant weights."""

from __future__ import annotations

import pytest
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.registry import deciding_by

import tvm_fusion as tf
from tvm_fusion.build.model import lower_plan
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.bulk_models import feed_forward

TARGET = parse_target("cuda:sm_90")


@pytest.mark.parametrize(
    ("depth", "columns", "taken"),
    [
        (417, 4096, True),
        (418, 4092, True),
        (416, 4091, True),
        (417, 4092, False),
        (27, 1004, False),
    ],
)
def test_odd_depths_need_whole_pieces_of_columns(depth, columns, taken):
    mod, seen = feed_forward(512, depth, columns), []
    plan = tf.plan(mod, TARGET)
    with deciding_by(lambda *asked: seen.append(asked)):
        lower_plan(mod, plan, TARGET)
    names = {schedule(func, target)[1] for func, target in seen}
    assert ("tensor_core" in names) == taken
    # By multiply-adds at 67 TFLOP/s at most, on tensor cores many times as fast.
    by_multiply_adds = 2 * 512 * depth * columns / 67e12 * 1e6
    assert (plan.totals.predicted_us_after < by_multiply_adds) == taken
