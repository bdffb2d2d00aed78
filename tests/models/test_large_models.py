"""Models with weights in an external file, beyond what a protobuf holds: right, in less than 3 times their size.

Peak memory is that of a process of its own, as Linux counts it (VmHWM).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

pytestmark = pytest.mark.slow

ROWS, COLUMNS = 5120, 7680

CHILD = """
import json, sys
import numpy as np, onnx
import tvm_fusion as tf

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

before = peak()
mod = tf.frontend.load(sys.argv[1])
compiled = tf.compile(mod, "llvm", verify=False, strict=True)
(result,) = compiled(np.ones((1, int(sys.argv[2])), "float32"))
print(json.dumps([peak() - before, np.asarray(result)[0, :8].tolist()]))
"""


def write(path, layers):
    """Write a chain of products whose weights are zero but for one row; return their size and the result for ones."""
    weights, nodes, value, offset = [], [], "x", 0
    row = np.linspace(-1, 1, COLUMNS, dtype="float32")
    with open(f"{path}.data", "wb") as file:
        for layer in range(layers):
            rows, columns = (ROWS, COLUMNS) if layer % 2 == 0 else (COLUMNS, ROWS)
            length = 4 * rows * columns
            file.seek(offset)
            file.write(row[:columns].tobytes())
            file.truncate(offset + length)  # the rest is a hole, and zero
            tensor = TensorProto(
                name=f"w{layer}", data_type=TensorProto.FLOAT, dims=(rows, columns),
                data_location=TensorProto.EXTERNAL,
            )  # fmt: skip
            places = {"location": f"{path.name}.data", "offset": offset, "length": length}
            for key, text in places.items():
                tensor.external_data.add(key=key, value=str(text))
            weights.append(tensor)
            nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"h{layer}"]))
            value, offset = f"h{layer}", offset + length
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, ROWS])]
    outputs = [helper.make_tensor_value_info(value, TensorProto.FLOAT, [1, columns])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    expected = row[:columns] * np.prod([row[0]] * (layers - 1))
    return offset, expected[:8]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
@pytest.mark.parametrize("layers", [4, 14], ids=["0.6 GB", "2.2 GB"])
def test_external_weights(tmp_path, layers):
    size, expected = write(tmp_path / "large.onnx", layers)
    assert layers < 14 or size > 2**31  # more than a protobuf holds
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < 4 * size:
        pytest.skip(f"needs {4 * size >> 30} GiB of memory")
    command = [sys.executable, "-c", CHILD, str(tmp_path / "large.onnx"), str(ROWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, result = json.loads(done.stdout.splitlines()[-1])
    assert peak < 3 * size, f"{peak / size:.2f} times the weights"
    np.testing.assert_allclose(result, expected, rtol=1e-5)
