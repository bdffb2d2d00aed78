"""Small ONNX models of a few nodes, compared with onnxruntime or with given results, or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..errors import FusionError
from .onnx_suite import checking_here


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, np.ndarray],
    stored: Mapping[str, np.ndarray] | None = None,
    opset: int = 17,
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:
    """Return a model whose outputs' types are left to inference.

    Parameters
    ----------
    nodes : sequence of NodeProto
        In order.
    inputs, stored : mapping of name to array
        Inputs with the types and shapes of these arrays, and initializers.
    opset : int
        Of the default domain.
    outputs : sequence of str
        Names of the results.
    """
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in inputs.items()
    ]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    constants = [numpy_helper.from_array(np.asarray(a), name) for name, a in (stored or {}).items()]
    graph = helper.make_graph(nodes, "g", values, results, constants)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(proto: onnx.ModelProto, *arrays: np.ndarray) -> list[np.ndarray]:
    """Return what a model computes here, compiled for the CPU."""
    from .. import api
    from ..frontend.onnx import load

    with checking_here():
        results = api.compile(load(proto), "llvm", verify=False)(*arrays)
    return [np.asarray(result) for result in results]


def compare(
    proto: onnx.ModelProto,
    inputs: Mapping[str, np.ndarray],
    wanted: Sequence[np.ndarray] | None = None,
) -> None:
    """Assert that a model computes what onnxruntime does, or what is given.

    Parameters
    ----------
    proto : ModelProto
        The model.
    inputs : mapping of name to array
        In the model's order.
    wanted : sequence of array, optional
        The results, where onnxruntime lacks the operator or is wrong.
    """
    if wanted is None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
        wanted = session.run(None, dict(inputs))
    got = run(proto, *inputs.values())
    assert len(got) == len(wanted)
    for mine, right in zip(got, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (right.shape, right.dtype)
        np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)


def numbers(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Return normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def refused(proto: onnx.ModelProto, pattern: str, error: type[FusionError] = FusionError) -> None:
    """Assert that a model is refused in one line.

    Parameters
    ----------
    pattern : str
        Regular expression that the line has to match somewhere.
    error : type
        What is raised.
    """
    from ..frontend.onnx import load

    with checking_here():
        try:
            load(proto)
        except error as caught:
            text = str(caught)
        else:
            raise AssertionError("the model was imported")
    assert "\n" not in text, text
    assert re.search(pattern, text), text
