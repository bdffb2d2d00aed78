"""The conformance suite of the onnx package (``onnx.backend.test``), run through import, plan and llvm.

Run as a module it is a worker of `LastingWorker`: a request is the name of a case, the answer an
`Outcome` as a list.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper

from .lasting_worker import LastingWorker, WorkerDied, serve

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")

#: Seconds for one case; on two busy cores the slowest takes ten.
LIMIT = 120.0

#: Operands that only say sizes, axes, counts or a type (first position, and one after the last). Exporters
#: store them in the model; the suite passes them at run time to test interpreters.
_SETTINGS = {
    "AffineGrid": (1, 2), "BlackmanWindow": (0, 1), "CastLike": (1, 2), "CenterCropPad": (1, 2), "Clip": (1, 3),
    "Col2Im": (1, 3), "ConstantOfShape": (0, 1), "CumSum": (1, 2), "CumProd": (1, 2), "DFT": (1, 3),
    "Dropout": (1, 3), "Expand": (1, 2), "HammingWindow": (0, 1), "HannWindow": (0, 1),
    "If": (0, 1), "Loop": (0, 2), "MaxUnpool": (2, 3), "MelWeightMatrix": (0, 5), "OneHot": (1, 3),
    "Pad": (1, 4), "Range": (0, 3), "ReduceL1": (1, 2), "ReduceL2": (1, 2), "ReduceLogSum": (1, 2),
    "ReduceLogSumExp": (1, 2), "ReduceMax": (1, 2), "ReduceMean": (1, 2), "ReduceMin": (1, 2),
    "ReduceProd": (1, 2), "ReduceSum": (1, 2), "ReduceSumSquare": (1, 2), "Reshape": (1, 2),
    "Resize": (1, 4), "RoiAlign": (2, 3), "STFT": (1, 4), "Slice": (1, 5), "Split": (1, 2),
    "Squeeze": (1, 2), "Tile": (1, 2), "TopK": (1, 2), "Trilu": (1, 2), "Unsqueeze": (1, 2),
    "Upsample": (1, 2),
}  # fmt: skip


#: Two units in the last place, which the suite allows for bfloat16; its expected float16 values
#: are rounded after every step, too.
_TWO_UNITS = {"bfloat16": 2**-6, "float16": 2**-9}


@dataclass(frozen=True)
class Case:
    """One case of the suite.

    Attributes
    ----------
    name : str
        ``kind/test_name``.
    model : ModelProto
        The model.
    data : list of (inputs, outputs)
        Arrays, or other values where the model takes or returns sequences or optionals.
    rtol, atol : float
        Tolerances that the suite states.
    """

    name: str
    model: onnx.ModelProto
    data: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float

    @property
    def operator(self) -> str:
        """The operator of the model, or of the function that it is an expansion of."""
        operators = {node.op_type for node in self.model.graph.node} - {"Constant"}
        if self.name.startswith("node/") and "_expanded" in self.name:
            whole = cases().get(self.name.partition("_expanded")[0])
            return whole.operator if whole is not None else "several operators"
        return operators.pop() if len(operators) == 1 else "several operators"

    @property
    def is_float_inference(self) -> bool:
        """Whether all outputs are floating point tensors, and nothing is random or of training."""
        graph = self.model.graph
        plain = all(
            value.type.HasField("tensor_type") and value.type.tensor_type.elem_type in _FLOATS
            for value in graph.output
        )
        return plain and not any(
            "training" in node.domain
            or node.op_type in _RANDOM
            or any(a.name == "training_mode" and a.i for a in node.attribute)
            for node in graph.node
        )


_FLOATS = {
    onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16,
}  # fmt: skip

_RANDOM = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of a case: right, refused, wrong, crashed or raised; and why."""

    name: str
    operator: str
    verdict: str
    reason: str = ""


@functools.cache
def _operator_names() -> set[str]:
    """Return the names of all operators; that of an expanded one is among those it consists of."""
    return {schema.name for schema in onnx.defs.get_all_schemas_with_history()}


@functools.cache
def cases() -> dict[str, Case]:
    """Return all cases by name, in a fixed order. The suite computes its data: this takes 5 s."""
    from onnx.backend.test.loader import load_model_tests

    found = {}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # from how the suite computes its special values
        for kind in KINDS:
            for case in sorted(load_model_tests(kind=kind), key=lambda case: case.name):
                model, data = case.model, case.data_sets
                if model is not None:
                    data = [tuple(map(_arrays, pair)) for pair in data]
                else:
                    folder = Path(case.model_dir)
                    model = onnx.load(folder / "model.onnx")
                    data = [_stored(model, path) for path in sorted(folder.glob("test_data_set_*"))]
                name = f"{kind}/{case.name}"
                found[name] = Case(name, model, data, case.rtol, case.atol)
    return found


def _arrays(values: Iterable[Any]) -> list[Any]:
    """Return the values with arrays for numpy's scalars and for tensors of types that numpy lacks."""
    return [
        onnx.numpy_helper.to_array(value)
        if isinstance(value, onnx.TensorProto)
        else np.asarray(value)
        if isinstance(value, np.generic | np.ndarray)
        else value
        for value in values
    ]


def _stored(model: onnx.ModelProto, folder: Path) -> tuple[list[Any], list[Any]]:
    def read(values: Iterable[onnx.ValueInfoProto], stem: str) -> list[Any]:
        arrays = []
        for i, value in enumerate(values):
            path = folder / f"{stem}_{i}.pb"
            if not path.is_file():
                break
            kind = value.type.WhichOneof("value")
            proto = onnx.SequenceProto() if kind == "sequence_type" else onnx.TensorProto()
            proto.ParseFromString(path.read_bytes())
            arrays.append(
                onnx.numpy_helper.to_list(proto)
                if kind == "sequence_type"
                else onnx.numpy_helper.to_array(proto)
            )
        return arrays

    return read(model.graph.input, "input"), read(model.graph.output, "output")


def with_settings(case: Case) -> tuple[onnx.ModelProto, list[int]]:
    """Return the case's model with its settings stored, and the positions of the inputs that remain.

    Settings are the operands that only say sizes, axes, counts or a type (the first set of data gives
    them); free sizes of the other inputs are fixed to those of the data.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph, (inputs, _) = model.graph, case.data[0]
    # An expansion has the inputs of the operator that it expands.
    whole = cases().get(case.name.partition("_expanded")[0], case)
    settings = {
        name
        for node in whole.model.graph.node
        for name in node.input[slice(*_SETTINGS.get(node.op_type, (0, 0)))]
    }
    kept = []
    for i, (value, given) in enumerate(zip(graph.input, inputs, strict=False)):
        if value.name in settings and isinstance(given, np.ndarray | np.generic):
            array = np.asarray(given)
            graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        else:
            kept.append(i)
    for i in reversed([i for i in range(len(inputs)) if i not in kept]):
        del graph.input[i]
    return model, kept


def run_case(name: str) -> Outcome:
    """Import, plan, compile and run one case in this process, and compare it."""
    from .. import api
    from ..errors import FusionError
    from ..frontend.onnx import load

    case = cases()[name]
    outcome = functools.partial(Outcome, name, case.operator)
    model, kept = with_settings(case)
    try:
        mod = load(model, shape=_open_shapes(model, [case.data[0][0][i] for i in kept]))
        compiled = api.compile(mod, "llvm", verify=False)
    except (FusionError, ValueError) as error:
        if not isinstance(error, FusionError) and "positive integers" not in str(error):
            return outcome("raised", f"compiling: {type(error).__name__}: {_short(error)}")
        reason = str(error)
        named = set(re.findall(r"\w+", reason)) & _operator_names()
        clear = bool(named) or "computes nothing" in reason or "positive integers" in reason
        return outcome("refused" if clear else "unclear", reason)
    except Exception as error:  # noqa: BLE001 - what it is, is the verdict
        return outcome("raised", f"compiling: {type(error).__name__}: {_short(error)}")
    for inputs, wanted in case.data:
        try:
            results = compiled(*[inputs[i] for i in kept])
        except Exception as error:  # noqa: BLE001 - as above
            return outcome("raised", f"running: {type(error).__name__}: {_short(error)}")
        results = results if isinstance(results, list | tuple) else [results]
        problem = _difference(case, [np.asarray(r) for r in results], wanted)
        if problem:
            return outcome("wrong", problem)
    return outcome("right")


def _open_shapes(model: onnx.ModelProto, inputs: list[Any]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for value, array in zip(model.graph.input, inputs, strict=False):
        tensor = value.type.tensor_type
        # 0 is "any" in old files, so that it must be said.
        fixed = tensor.HasField("shape") and all(d.dim_value > 0 for d in tensor.shape.dim)
        if value.type.HasField("tensor_type") and not fixed and isinstance(array, np.ndarray):
            shapes[value.name] = array.shape
    return shapes


def _difference(case: Case, results: list[np.ndarray], wanted: list[Any]) -> str:
    """Compare as the suite's runner does; empty when equal within the tolerances."""
    if len(results) != len(wanted):
        return f"{len(results)} outputs instead of {len(wanted)}"
    for i, (got, right) in enumerate(zip(results, wanted, strict=True)):
        if not isinstance(right, np.ndarray | np.generic):
            return f"output {i} is not a tensor"
        if got.shape != right.shape or got.dtype != right.dtype:
            return f"output {i} is {got.dtype}{list(got.shape)} instead of {right.dtype}{list(right.shape)}"
        rtol = max(case.rtol, _TWO_UNITS.get(right.dtype.name, 0.0))
        if right.dtype.name == "bfloat16":
            got, right = got.astype("float32"), right.astype("float32")
        atol = case.atol
        if right.dtype.kind == "f" and right.dtype.itemsize >= 4:
            # Of sums that cancel the inputs' rounding is left, which no one can avoid.
            largest = np.abs(right, where=np.isfinite(right), out=np.zeros_like(right)).max(
                initial=0
            )
            atol = max(atol, float(np.finfo(right.dtype).eps * largest))
        try:
            np.testing.assert_allclose(got, right, rtol=rtol, atol=atol)
        except AssertionError as error:
            return f"output {i}: {_short(error)}"
        except TypeError as error:
            return f"output {i} cannot be compared: {_short(error)}"
    return ""


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[-300:] if len(lines) > 1 else (lines[0][:300] if lines else "")


def run_cases(names: Iterable[str], worker: LastingWorker) -> Iterator[Outcome]:
    """Run cases in a worker, one after the other; one that ends the worker has crashed."""
    for name in names:
        try:
            yield Outcome(*worker.ask(name))
        except WorkerDied as error:
            yield Outcome(name, cases()[name].operator, "crashed", str(error))


@contextlib.contextmanager
def checking_here() -> Iterator[None]:
    """Let ONNX's checker and simplifier run in this process: a child for each model takes most of the time."""
    from ..frontend import child, onnx_worker

    def run(worker: str, request: dict[str, Any], data: bytes, *, step: str, seconds: int) -> bytes:
        try:
            return onnx_worker.answer(request, data)
        except Exception as error:  # noqa: BLE001 - as child.serve does
            raise child.ChildFailure(str(error).strip() or type(error).__name__) from None

    before, child.run = child.run, run
    try:
        yield
    finally:
        child.run = before


def main() -> None:
    """Be a worker."""
    cases()
    with checking_here():  # this process is a child already
        serve(lambda name: astuple(run_case(name)))


if __name__ == "__main__":
    main()
