"""Rows: work, traffic and floors; the module, the expert's, the exported and the jnp version agree."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rows

#: Floors at float16 on an H200, microseconds (shared measurements of the peers).
FLOORS = {
    "convsum4": 2.9, "convrelusum4": 8.3, "fcln4": 3.1, "qkv8": 2.2, "cbr1": 1.4, "cbr3": 4.2, "cross31": 1.4,
    "cross33": 4.7, "dwpw": 1.6, "gelu_ln": 49, "bert128": 8.6, "bert512x8": 98,
}  # fmt: skip
#: Those that run in a moment on a CPU.
LIGHT = [
    name for name in (*rows.BLOCKS, "convsum3", "cbr_map") if name not in ("gelu_ln", "bert512x8")
]


@pytest.mark.parametrize("name", rows.BLOCKS)
def test_floor(name: str) -> None:
    rates = rows.KNOWN_RATES["NVIDIA H200", "float16"]
    floor = rows.ROWS[name].floor_us("float16", *rates)
    assert floor == pytest.approx(FLOORS[name], abs=0.51 if FLOORS[name] > 10 else 0.051)


def test_a_network_has_no_floor() -> None:
    assert math.isnan(rows.ROWS["resnet50_b1"].floor_us("float16", 1e12, 1e12, 1.0))


def test_ten_rows_have_targets() -> None:
    assert sum(row.target for row in rows.ROWS.values()) == 10


def test_chosen_rows_keep_the_order_of_the_table() -> None:
    assert rows.chosen_rows(["fcln4", "convsum4"], False) == ["convsum4", "fcln4"]
    assert rows.chosen_rows(None, False) == list(rows.BLOCKS)
    assert "resnet50_b32" in rows.chosen_rows(None, True)


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_an_unknown_row_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        rows.chosen_rows([name], False)


@pytest.mark.torch
@pytest.mark.parametrize("name", LIGHT)
def test_least_work_and_traffic_are_those_of_the_merged_version(name: str) -> None:
    import torch
    from experts import expert
    from torch.utils.flop_counter import FlopCounterMode
    from torch_rows import build, outputs_of

    work = build(name, "float32")
    module = expert(work)
    if name.startswith("bert"):
        work.module.library_attention = False  # the counter does not know the library's on a CPU
        module = work.module
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs = outputs_of(module(*work.inputs))
    row = rows.ROWS[name]
    assert counter.get_total_flops() == pytest.approx(row.flops, rel=0.01)
    weights = sum(
        w.numel() for w in {t.data_ptr(): t for t in module.state_dict().values()}.values()
    )
    elements = sum(t.numel() for t in (*work.inputs, *outputs)) + weights
    assert elements == pytest.approx(row.elements, rel=0.005)


@pytest.mark.torch
@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("dtype", rows.DTYPES)
def test_every_version_of_a_row_computes_the_same(name: str, dtype: str) -> None:
    import torch
    from accuracy import error_of
    from experts import expert
    from torch_rows import build, exported, outputs_of

    work = build(name, dtype)
    with torch.no_grad():
        right = [
            t.double().numpy()
            for t in outputs_of(work.module.double()(*(x.double() for x in work.inputs)))
        ]
        work.module.float()
        versions = {
            "module": outputs_of(work.module(*work.inputs)),
            "expert": outputs_of(expert(work)(*work.inputs)),
        }
        last = work.row.image and dtype == "float16"
        inputs = [x.permute(0, 2, 3, 1) for x in work.inputs] if last else work.inputs
        outputs = outputs_of(exported(work).module()(*inputs))
        versions["exported"] = [t.permute(0, 3, 1, 2) for t in outputs] if last else outputs
    for version, tensors in versions.items():
        error = error_of([t.numpy() for t in tensors], right)
        assert error.l2 < 3e-6, version
    assert 0.2 < float(np.std(right[0])) < 5, "values of order one, so that errors mean something"


@pytest.mark.torch
def test_a_small_layer_of_llama() -> None:
    """The row's own is too large for this test; work, traffic and every version agree at another size."""
    import torch
    from accuracy import error_of
    from experts import expert
    from llama import LlamaLayer
    from torch.utils.flop_counter import FlopCounterMode
    from torch_rows import Workload, exported

    sizes = {"hidden": 64, "inner": 160}
    torch.manual_seed(0)
    net = LlamaLayer(tokens=24, heads=4, **sizes).eval().requires_grad_(False)
    work = Workload(rows.ROWS["llama7b_layer_512"], "float32", net, (torch.randn(1, 24, 64),))
    right = net.double()(work.inputs[0].double()).numpy()
    net.float()
    for version in (net, expert(work), exported(work).module()):
        assert error_of([version(*work.inputs).numpy()], [right]).l2 < 1e-6
    net.library_attention = False
    with FlopCounterMode(display=False) as counter:
        net(*work.inputs)
    # Written out, attention computes above the diagonal, too.
    above = 2 * 24 * 23 * 64
    assert counter.get_total_flops() == rows._llama_flops(24, **sizes) + above
    weights = sum(p.numel() for p in net.parameters())
    assert weights + 2 * 24 * 64 == rows._llama_elements(24, **sizes)
    assert rows.ROWS["llama7b_layer_512"].floor_us("float16", 4.24e12, 666e12, 1.04) == (
        pytest.approx(318, abs=3)
    )


@pytest.mark.torch
def test_values_depend_on_the_dtype_and_the_seed_only() -> None:
    import torch
    from torch_rows import build

    one, two = build("cbr1", "float16"), build("cbr1", "float16")
    torch.manual_seed(7)
    assert torch.equal(one.inputs[0], two.inputs[0])
    states = zip(one.module.state_dict().values(), two.module.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)
    assert torch.equal(one.inputs[0], one.inputs[0].half().float()), "rounded to the dtype"
    assert not torch.equal(one.inputs[0], build("cbr1", "float16", seed=1).inputs[0])


@pytest.mark.torch
@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_formula_in_jax(name: str, layout: str) -> None:
    pytest.importorskip("jax")
    import torch
    from accuracy import error_of
    from peers.jax_rows import FORMULAS, arranged_weights
    from torch_rows import build, outputs_of

    work = build(name, "float32")
    last = work.row.image and layout == "NHWC"
    state = {k: v.numpy() for k, v in work.module.state_dict().items()}
    weights = arranged_weights(state, "NHWC" if last else "NCHW")
    inputs = [x.permute(0, 2, 3, 1).numpy() if last else x.numpy() for x in work.inputs]
    out = FORMULAS[name](weights, layout if work.row.image else "NCHW", *inputs)
    arrays = [np.asarray(a) for a in (out if isinstance(out, tuple) else [out])]
    with torch.no_grad():
        right = [t.numpy() for t in outputs_of(work.module(*work.inputs))]
    if last:
        arrays = [a.transpose(0, 3, 1, 2) for a in arrays]
    assert error_of(arrays, right).l2 < 3e-6


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_all_that_xla_runs_is_between_the_marks(tmp_path: Path) -> None:
    """On a CPU, where the marks only copy: same values, and nothing is computed outside of them."""
    jax = pytest.importorskip("jax")
    from peers import jax_peer

    marks = jax_peer.build_marks(tmp_path, host=True)

    def function(weights: dict[str, Any], x: Any) -> tuple[Any, Any]:
        scale = weights["a"] * weights["b"]  # of weights only: not to be done ahead
        return x @ scale, jax.numpy.tanh(x) + 1

    rng = np.random.default_rng(0)
    weights = {k: rng.normal(size=(8, 8)).astype(np.float32) for k in "ab"}
    x = rng.normal(size=(4, 8)).astype(np.float32)
    program = jax.jit(jax_peer.marked(function)).lower(weights, x).compile()
    _, (product, other) = program(weights, x)
    np.testing.assert_allclose(product, x @ (weights["a"] * weights["b"]), rtol=1e-5)
    np.testing.assert_allclose(other, np.tanh(x) + 1, rtol=1e-5)
    assert (marks.times_begun(), marks.times_ended(), marks.take()) == (1, 1, None)

    lines = [x for x in program.as_text().split("ENTRY")[1].splitlines() if " = " in x]
    (begin,) = (i for i, x in enumerate(lines) if "benchmark_begin" in x)
    (end,) = (i for i, x in enumerate(lines) if "benchmark_end" in x)
    work = [i for i, x in enumerate(lines) if re.search(r" (fusion|dot|multiply|tanh|call)\(", x)]
    assert work and all(begin < i < end for i in work), program.as_text()
