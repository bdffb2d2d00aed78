"""What compute-sanitizer finds in blocks at work: mistakes that need not show in the numbers.

Checked are hazards in shared memory (racecheck), wrong uses of barriers (synccheck), and with memcheck accesses beyond
allocations, misaligned ones and exceptions, as well as calls of the CUDA API that return an error, those of this
package, of TVM and of other libraries. Only calls that ask whether the driver has a function may fail
(`tvm_fusion.testing.sanitizer.QUERIES`). Accesses beyond a tensor but inside of the allocation that TVM's pool took it
from are invisible to memcheck: for those see tests/build/test_emulated_bounds.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

import tvm_fusion as tf
from tvm_fusion.testing.modules import parallel_convs
from tvm_fusion.testing.named_blocks import named_block
from tvm_fusion.testing.sanitizer import explain
from tvm_fusion.testing.transformer_blocks import bert_block, dense_norm_heads

pytestmark = pytest.mark.gpu

BLOCKS = {
    "bert": lambda dtype: bert_block(sequence=40, hidden=128, heads=2, dtype=dtype),
    "heads": lambda dtype: dense_norm_heads(dtype=dtype),
    "convolutions": lambda dtype: parallel_convs(
        4, channels=32, spatial=14, relu=True, dtype=dtype, layout="NHWC"
    ),
    "separate": lambda dtype: parallel_convs(
        3, channels=16, spatial=9, separate=True, dtype=dtype, layout="NHWC"
    ),
    "inverted": lambda dtype: named_block("inverted_residual", dtype),
    "squeeze": lambda dtype: named_block("squeeze_excite", dtype),
}

_RUN = """
import sys
import numpy as np
import tvm_fusion as tf
model = tf.load(sys.argv[1], cuda_graph=False)
rng = np.random.default_rng(0)
for _ in range(2):
    model(*(rng.standard_normal(s.shape).astype(s.dtype) for s in model.signature.inputs))
"""


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("tool", ["racecheck", "synccheck", "memcheck"])
def test_no_hazard(tool, name, dtype, tmp_path):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    path = tmp_path / "model.so"
    tf.compile(BLOCKS[name](dtype), "cuda", verify=False).export(path)
    done = subprocess.run(
        [sanitizer, "--tool", tool, sys.executable, "-c", _RUN, str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wrong = explain(done.stdout)
    assert not wrong, f"{tool}: {wrong}"
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
