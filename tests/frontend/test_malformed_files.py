"""Damaged model files, loaded in a child process: an error of ours or a success, never a crash."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import numpy as np
import onnx
import pytest
import tvm

from tvm_fusion.testing.models import LIGHT_MODELS, light_model_path
from tvm_fusion.testing.modules import parallel_convs

CHILD = """
import sys
from tvm_fusion.errors import FusionError
from tvm_fusion.frontend import load
for name in sys.argv[1:]:
    try:
        load(name)
        print("ok", flush=True)
    except (FusionError, ValueError) as error:
        assert "\\n" not in str(error).strip(), error
        print(type(error).__name__, flush=True)
"""

EXTREMES = [0, -1, 1, 7, 255, 1000, 65536, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63)]


def load_all(paths):
    """Load the files in one child and count the outcomes; fail when the child dies."""
    command = [sys.executable, "-c", CHILD, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    outcomes = done.stdout.split()
    assert done.returncode == 0, (
        f"exit code {done.returncode} at {paths[len(outcomes)]}: {done.stderr[-2000:]}"
    )
    assert len(outcomes) == len(paths)
    return Counter(outcomes)


def flip_bytes(content, chance):
    """Change, drop or insert a few bytes."""
    content = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 5, 20])):
        position = chance.randrange(len(content))
        kind = chance.random()
        if kind < 0.8:
            content[position] = chance.randrange(256)
        elif kind < 0.9:
            del content[position]
        else:
            content.insert(position, chance.randrange(256))
    return bytes(content)


def disturb(content, chance):
    """Change the model where a flipped byte seldom reaches: attributes, shapes, wiring, operators."""
    model = onnx.load_model_from_string(content)
    graph = model.graph
    for _ in range(chance.choice([1, 1, 2, 3])):
        node = chance.choice([node for node in graph.node if node.op_type != "ConstantOfShape"])
        kind = chance.random()
        numbers = [
            attribute for attribute in node.attribute if attribute.ints or attribute.HasField("i")
        ]
        if kind < 0.4 and numbers:
            attribute = chance.choice(numbers)
            if attribute.ints:
                attribute.ints[chance.randrange(len(attribute.ints))] = chance.choice(EXTREMES)
            else:
                attribute.i = chance.choice(EXTREMES)
        elif kind < 0.6:
            tensor = chance.choice(graph.initializer)
            values = onnx.numpy_helper.to_array(tensor).copy().reshape(-1)
            values[chance.randrange(values.size)] = chance.choice(EXTREMES)
            changed = onnx.numpy_helper.from_array(values.reshape(tuple(tensor.dims)), tensor.name)
            tensor.CopyFrom(changed)
        elif kind < 0.7:
            value = chance.choice([value for value in graph.input if "data" in value.name])
            chance.choice(value.type.tensor_type.shape.dim).dim_value = chance.choice(EXTREMES)
        elif kind < 0.8:
            node.input[chance.randrange(len(node.input))] = chance.choice(
                chance.choice(graph.node).output
            )
        elif kind < 0.9:
            node.op_type = chance.choice(
                ["Conv", "Gemm", "Concat", "Tile", "Range", "Pad", "Slice", "If", "TopK"]
            )
        else:
            model.opset_import[0].version = chance.choice([-1, 0, 1, 6, 8, 11, 13, 18, 99])
    return model.SerializeToString()


def write(tmp_path, mutate, names, count, seed):
    """Write ``count`` mutated files."""
    chance, paths = random.Random(seed), []
    for number in range(count):
        name = chance.choice(names)
        paths.append(tmp_path / f"{number}_{name}.onnx")
        paths[-1].write_bytes(mutate(light_model_path(name).read_bytes(), chance))
    return paths


SMALL = ("bvlc_alexnet", "squeezenet", "zfnet512")


def test_truncated_onnx(tmp_path):
    paths = []
    for name in SMALL:
        content = light_model_path(name).read_bytes()
        for tenth in range(10):
            paths.append(tmp_path / f"{name}_{tenth}.onnx")
            paths[-1].write_bytes(content[: len(content) * tenth // 10])
    assert set(load_all(paths)) == {"InvalidModelError"}


@pytest.mark.parametrize("mutate", [flip_bytes, disturb])
def test_mutated_onnx(tmp_path, mutate):
    outcomes = load_all(write(tmp_path, mutate, SMALL, 15, seed=1))
    assert outcomes["InvalidModelError"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [flip_bytes, disturb])
def test_many_mutated_onnx(tmp_path, mutate):
    load_all(write(tmp_path, mutate, LIGHT_MODELS, 300, seed=2))


@pytest.mark.slow
def test_mutated_json(tmp_path):
    content = tvm.ir.save_json(parallel_convs(2, channels=4, spatial=6, relu=True))
    chance, paths = random.Random(3), []
    for number in range(20):
        paths.append(tmp_path / f"{number}.json")
        digits = [i for i, letter in enumerate(content) if letter.isdigit()]
        position = chance.choice(digits)
        paths[-1].write_text(
            content[:position] + str(chance.randrange(10)) + content[position + 1 :]
        )
    load_all(paths)


def test_hostile_sizes(tmp_path):
    """An initializer that claims more data than it has, and constants that would fill the memory."""
    model = onnx.load(str(light_model_path("squeezenet")))
    tensor = onnx.numpy_helper.from_array(np.zeros(4, "float32"), "claims")
    tensor.dims[0] = 2**40
    model.graph.initializer.append(tensor)
    (tmp_path / "claims.onnx").write_bytes(model.SerializeToString())
    model = onnx.load(str(light_model_path("squeezenet")))
    for tensor in model.graph.initializer:
        if tensor.name.endswith("SHAPE") and list(tensor.dims) == [4]:
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(np.array([2**20, 2**10, 3, 3]), tensor.name)
            )
    (tmp_path / "fills.onnx").write_bytes(model.SerializeToString())
    assert load_all([tmp_path / "claims.onnx", tmp_path / "fills.onnx"]) == {"InvalidModelError": 2}
