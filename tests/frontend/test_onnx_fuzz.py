"""Mutated models of the backend suite: nothing crashes, and what onnxruntime runs is right or refused.

A finding's model is written to the test's folder; ``Fuzzer.judge`` of its content repeats it.
"""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tvm_fusion.testing.onnx_suite import cases, with_settings
from tvm_fusion.testing.onnx_table import RECORD

pytest.importorskip("onnxruntime")

from tvm_fusion.testing.onnx_fuzz import Fuzzer, difference

#: Mutated models of one test, and the tests that CI has: 4000 models in all, of which one part of six runs there.
COUNT, SEEDS = 100, range(40)

#: Larger models are those of whole networks, of which `test_malformed_files` mutates others.
LARGEST_BYTES = 200_000


@pytest.fixture(scope="module")
def fuzzer():
    right = json.loads(RECORD.read_text(encoding="utf-8"))["operators"].values()
    names = [name for entry in right for name in entry["right"] if "_expanded" not in name]
    models = [with_settings(cases()[name])[0] for name in names if name in cases()]
    with Fuzzer([model for model in models if model.ByteSize() < LARGEST_BYTES]) as made:
        yield made


def run(fuzzer, tmp_path, seed, count):
    verdicts, bad = Counter(), []
    for number, finding in enumerate(fuzzer.run(seed, count)):
        verdicts[finding.verdict] += 1
        if finding.verdict in ("wrong", "raised", "crashed"):
            path = tmp_path / f"{seed}_{number}.onnx"
            path.write_bytes(finding.content)
            bad.append(f"{path}: {finding.verdict}: {finding.reason}")
    assert not bad, "\n".join(bad)
    assert verdicts["right"] >= count // 10 and verdicts["refused"] > 0, verdicts


def test_some_mutations(fuzzer, tmp_path):
    run(fuzzer, tmp_path, 1000, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_many_mutations(fuzzer, tmp_path, seed):
    run(fuzzer, tmp_path, seed, COUNT)


def graph_of(nodes, inputs, stored=()):
    values = [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()]
    result = helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)
    result.ClearField("type")
    graph = helper.make_graph(nodes, "g", values, [result], list(stored))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return made.SerializeToString()


FLOAT = TensorProto.FLOAT
node = helper.make_node


#: What the fuzzer has found, by what it was.
FOUND = {
    "an operand left out": graph_of([node("Concat", ["x", ""], ["y"], axis=0)], {"x": (FLOAT, [2, 2])}),
    "two results of three parts": graph_of(
        [node("Split", ["x"], ["a", "b"], axis=0, num_outputs=3), node("Neg", ["b"], ["y"])],
        {"x": (FLOAT, [6])},
    ),
    "a mode that there is not": graph_of(
        [node("GridSample", ["x", "g"], ["y"], mode="mean")],
        {"x": (FLOAT, [1, 1, 4, 4]), "g": (FLOAT, [1, 2, 2, 2])},
    ),
    "a huge size": graph_of([node("Neg", ["x"], ["y"])], {"x": (FLOAT, [2**20, 2**20])}),
    "a negative size": graph_of(
        [node("Pad", ["x", "p"], ["y"])], {"x": (FLOAT, [2, 2])},
        [onnx.numpy_helper.from_array(np.array([0, -(2**62), 0, 0]), "p")],
    ),
    "the last of three results": graph_of(
        [node("Split", ["x"], ["y", "b", "c"], num_outputs=3)], {"x": (FLOAT, [6])}
    ),
    "a mean of integers": graph_of([node("ReduceMean", ["x"], ["y"])], {"x": (TensorProto.INT32, [3, 4])}),
    "NaN less itself": graph_of(
        [node("Log", ["x"], ["l"]), node("Sub", ["l", "l"], ["y"])], {"x": (FLOAT, [9])}
    ),
    "NaN equal to itself": graph_of(
        [node("Log", ["x"], ["l"]), node("Equal", ["l", "l"], ["y"])], {"x": (FLOAT, [9])}
    ),
    "an axis that there is not": graph_of(
        [node("CumSum", ["x", "a"], ["y"])], {"x": (FLOAT, [2, 3])},
        [onnx.numpy_helper.from_array(np.array(5), "a")],
    ),
    "a limit that is not a number": graph_of(
        [node("Elu", ["x"], ["y"], alpha=float("nan"))], {"x": (FLOAT, [2, 3])}
    ),
    "one of a function": graph_of(
        [node("Celu", ["x"], ["y"], alpha=float("nan"))], {"x": (FLOAT, [2, 3])}
    ),
    "a type that there is not": graph_of([node("Neg", ["x"], ["y"])], {"x": (FLOAT, [2])}).replace(
        b"\x08\x01\x12\x04", b"\x08\x52\x12\x04"
    ),
    "a negative slope": graph_of([node("Celu", ["x"], ["y"], alpha=-1.0)], {"x": (FLOAT, [9])}),
    "a huge constant": graph_of(
        [node("CumProd", ["x", "a"], ["y"], exclusive=1)], {"x": (FLOAT, [2**20, 2**10])},
        [onnx.numpy_helper.from_array(np.array(0), "a")],
    ),
    "a negative limit": graph_of(
        [node("Shrink", ["x"], ["y"], bias=1.5, lambd=-1.0)], {"x": (FLOAT, [9])}
    ),
    "an input of unknown shape": graph_of([node("Neg", ["x"], ["y"])], {"x": (FLOAT, None)}),
    "a size that is written out": graph_of(
        [node("DFT", ["x"], ["y"], axis=1)], {"x": (FLOAT, [1, 10, 10, 2**40])}
    ),
    "the least number of its type everywhere": graph_of(
        [node("Clip", ["x", "", "l"], ["c"]), node("ArgMax", ["c"], ["y"], axis=0)],
        {"x": (TensorProto.INT32, [9])}, [onnx.numpy_helper.from_array(np.int32(-(2**31)), "l")],
    ),
    "computed statistics of float16": graph_of(
        [node("Abs", ["v"], ["a"]), node("BatchNormalization", ["x", "s", "s", "s", "a"], ["y"])],
        {"x": (TensorProto.FLOAT16, [2, 3]), "s": (TensorProto.FLOAT16, [3]), "v": (TensorProto.FLOAT16, [3])},
    ),
    "a small tangent made large": graph_of(
        [node("Div", ["x", "c"], ["d"]), node("Tanh", ["d"], ["t"]), node("Mul", ["t", "c"], ["y"])],
        {"x": (FLOAT, [9])}, [onnx.numpy_helper.from_array(np.float32(1e8), "c")],
    ),
}  # fmt: skip

RIGHT = (
    "the last of three results", "a mean of integers", "NaN less itself", "NaN equal to itself",
    "a small tangent made large", "a negative limit", "the least number of its type everywhere",
    "computed statistics of float16", "a negative slope",
)  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(fuzzer, name):
    graph = onnx.load_model_from_string(FOUND[name]).graph
    rng, inputs = np.random.default_rng(0), {}
    for value in graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        code = value.type.tensor_type.elem_type
        if np.prod(shape) < 1e6 and code in TensorProto.DataType.values():
            dtype = helper.tensor_dtype_to_np_dtype(code)
            inputs[value.name] = (4 * rng.standard_normal(shape)).astype(dtype)
    finding = fuzzer.judge(FOUND[name], inputs or None)
    assert finding.verdict == ("right" if name in RIGHT else "refused"), finding.reason


def test_differences_are_seen():
    x = np.array([1.0, np.nan], "float32")
    assert not difference([x], [x * np.float32(1 + 1e-6)])
    assert "differs" in difference([x], [x + np.float32(0.1)])
    assert "differs" in difference([x], [np.array([1.0, 0.0], "float32")])
    assert "instead of" in difference([x], [x.astype("float64")])
    assert "outputs" in difference([x], [x, x])
    assert "other values" in difference([np.array([1])], [np.array([2])])
