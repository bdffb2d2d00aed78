"""Whole networks: all four passes annotate in a ``Sequential``, the module runs, and its numbers stay."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relay

import tvm_fusion.relay as fusion
from tvm_fusion.testing.relay_models import (
    NETWORKS,
    bert,
    group_calls,
    inputs_of,
    network,
    run_graph,
    run_vm,
    simplified,
)
from tvm_fusion.testing.relay_plans import write_plans

CUDA = "cuda:sm_90a"
PASSES = (
    fusion.VerticalFusion,
    fusion.HorizontalFusion,
    fusion.CrossFusion,
    fusion.CompoundFusion,
)

#: Least number of groups.
GROUPS = {
    "resnet-50": 50, "mobilenet": 26, "inception-v3": 61, "squeezenet": 18, "densenet": 66, "bert": 10,
}  # fmt: skip


def test_page() -> None:
    """The examples of docs/relay.md run as they stand."""
    text = (Path(__file__).parents[3] / "docs" / "relay.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), scope)
    assert len(group_calls(scope["mod"])) >= 20
    (array,) = inputs_of(scope["mod"])
    assert scope["vm"](array).numpy().shape == (1, 1000)


def test_sequential_with_tvms_passes() -> None:
    """All passes on a module that has not been touched."""
    transform = relay.transform
    passes = [
        transform.InferType(), transform.SimplifyInference(), transform.FoldScaleAxis(),
        transform.FoldConstant(), *(make(target=CUDA) for make in PASSES),
    ]  # fmt: skip
    with tvm.transform.PassContext(opt_level=3):
        mod = tvm.transform.Sequential(passes)(network("squeezenet", 64))
    assert len(group_calls(mod)) >= 18
    assert "Composite" not in fusion.StripFusion()(mod).astext(show_meta_data=False)


def seconds_of(make: type, mod: tvm.IRModule) -> float:
    """Processor time of one pass: the least of three, because other processes may share the machine."""
    times = []
    for _ in range(3):
        start = time.process_time()
        make(target=CUDA)(mod)
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("name", [*NETWORKS, "bert"])
def test_network(name: str) -> None:
    before = simplified(bert() if name == "bert" else network(name))
    # The outer test compares plans; simplifying the network again would take longer than all else.
    if folder := os.environ.get("TVM_FUSION_RELAY_PLANS"):
        write_plans(Path(folder), name, before)
    mod = tvm.transform.Sequential([make(target=CUDA) for make in PASSES])(before)
    groups = group_calls(mod)
    assert len(groups) >= GROUPS[name]
    inlined = fusion.StripFusion()(mod)
    assert tvm.ir.structural_equal(inlined, before)
    if name == "resnet-50":
        assert all(seconds_of(make, before) < 1.0 for make in PASSES)
    inputs = inputs_of(before)
    # Annotated on the virtual machine; on the graph executor what the inliner gives back, which is the original.
    found, expected = run_vm(mod, inputs), run_graph(inlined, inputs)
    for a, b in zip(found, expected, strict=True):
        # Probabilities of a thousand classes are small; their differences must be smaller still.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7 * float(np.abs(b).max()))
