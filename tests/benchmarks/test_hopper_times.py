"""The script that times products of Hopper's copy engine: its references, and that no kernel can stop it."""

from __future__ import annotations

import json
import time

import hopper_times
import numpy as np
import pytest


@pytest.mark.parametrize("after", ["nothing", "bias", "bias_gelu", "bias_gelu_residual"])
def test_its_reference_is_the_function_that_it_compiles(after):
    """Both are computed in float64: on the CPU by TVM, and by NumPy."""
    import tvm
    from tvm_fusion.schedules.cuda.tensor_core.form import Products

    from tvm_fusion.targets import parse_target
    from tvm_fusion.testing import cuda_emulation

    shape = hopper_times.Shape(80, 64, 64, after)
    target = parse_target("cuda:sm_90a")
    form = hopper_times.form_of(shape, "float16", target)
    assert isinstance(form, Products)
    options = hopper_times.Options(0, 0, "float16", "cuda:sm_90a")
    tile = next(
        choice.tile
        for choice in hopper_times.choices_of(form, target, options)
        if choice.tile.columns == 64
    )
    from tvm_fusion.schedules.cuda.tensor_core.bulk import bulk_kernel

    from tvm_fusion.devices import device_for

    func: tvm.tirx.PrimFunc = bulk_kernel(form, tile, device_for(target))
    arrays = hopper_times.inputs_of(shape, "float16")
    (result,) = cuda_emulation.run(func, arrays, target)
    rows = hopper_times.checked_rows(shape)
    assert hopper_times.error_of(result[rows], hopper_times.expected(shape, arrays, rows)) < 1e-3


def test_every_tile_of_the_output_has_a_row_that_is_checked():
    for shape in hopper_times.SHAPES.values():
        rows = hopper_times.checked_rows(shape)
        assert set(rows // 64) == set(range(-(-shape.rows // 64)))
        assert rows.max() < shape.rows


def test_nan_is_an_error():
    assert not hopper_times.error_of(np.array([1.0, np.nan]), np.array([1.0, 1.0])) <= 1.0


def test_a_process_that_never_ends_is_stopped_and_what_it_printed_is_kept(tmp_path):
    script = tmp_path / "hangs.py"
    rows = [{"starts": "a"}, {"tile": "a", "right": True}, {"starts": "b"}]
    script.write_text(
        "import time\n"
        + "".join(f"print({json.dumps(row)!r}, flush=True)\n" for row in rows)
        + "time.sleep(600)\n"
    )
    began = time.time()
    found = hopper_times.in_child(["x"], 6.0, str(script))
    assert time.time() - began < 60
    assert found[0] == {"tile": "a", "right": True}
    assert found[1]["running"] == ["b"] and "stopped" in found[1]["why"]


def test_a_process_that_fails_is_a_row(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('no device')\n")
    (row,) = hopper_times.in_child([], 60.0, str(script))
    assert row["why"] == "no device"
    assert hopper_times.in_child([], 1.0, str(script))[0]["why"] == "no time was left"
