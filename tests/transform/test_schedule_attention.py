"""A group of attention becomes the kernel that was planned, or none."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax, tvm
from tvm_fusion.errors import LoweringError
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.attention import attention_function, number, plain, scores_of
from tvm_fusion.transform import ScheduleGroups

op = relax.op


def doubled(builder, q, k, v):
    """Weights that are doubled: no attention."""
    emit = builder.emit
    weights = emit(op.multiply(emit(op.nn.softmax(scores_of(emit, q, k))), number(2, q)))
    return emit(op.matmul(weights, v))


def module(make):
    func = attention_function(make, [(1, 2, 32, 32)] * 3)
    attrs = {"tvm_fusion.strategy": "vertical", "tvm_fusion.options": {"form": "attention"}}
    return tvm.IRModule({"fused_vertical_0": func.with_attrs(attrs)})


def test_attention_has_its_kernel() -> None:
    made = ScheduleGroups(parse_target("cuda:sm_90"))(module(plain))
    assert made["fused_vertical_0"].attrs["tvm_fusion.template"] == "attention"


def test_what_no_template_reads_is_refused() -> None:
    with pytest.raises(LoweringError, match="no template for attention"):
        ScheduleGroups(parse_target("cuda:sm_90"))(module(doubled))


def test_cpus_have_one_function() -> None:
    target = parse_target("llvm")
    made = ScheduleGroups(target)(module(doubled))
    assert made["fused_vertical_0"].attrs["tvm_fusion.template"] != "attention"
