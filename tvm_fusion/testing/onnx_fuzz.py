"""Mutated ONNX models, each imported, compiled and run in a child process, against onnxruntime.

The seeds are the models of the backend suite (`onnx_suite`), the mutations those of `onnx_mutations`. What onnxruntime
takes and runs has to be right here, or refused by an error of this package; what it does not take must not crash the
process.

Run as a module this is a worker of `LastingWorker`. A request is ``[role, model, inputs, checks]``, files in base64;
the role is "oracle" (onnxruntime), "reference" (onnx's evaluator), "run" or "compile", the checks are "fast" where
onnx's checker may run in the same process.
"""

from __future__ import annotations

import base64
import contextlib
import io
import random
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from .lasting_worker import LastingWorker, WorkerDied, last_line, serve
from .onnx_mutations import mutate
from .onnx_suite import checking_here

#: Seconds for one model.
LIMIT = 90.0


@dataclass(frozen=True)
class Finding:
    """What became of a mutated model: right, refused, no_oracle, wrong, raised or crashed; and why."""

    verdict: str
    reason: str
    content: bytes
    inputs: dict[str, np.ndarray]


def random_inputs(content: bytes, chance: random.Random) -> dict[str, np.ndarray] | None:
    """Return inputs for a model; None where it has an input of unknown or great size."""
    try:
        graph = onnx.load_model_from_string(content).graph
        stored = {tensor.name for tensor in graph.initializer}
        inputs = {}
        rng = np.random.default_rng(chance.randrange(2**32))
        for value in graph.input:
            if value.name in stored:
                continue
            tensor = value.type.tensor_type
            dims = [dim.dim_value for dim in tensor.shape.dim]
            if not value.type.HasField("tensor_type") or any(d < 0 for d in dims):
                return None
            if not isinstance(value.name, str):  # protobuf's answer to a name that is no text
                return None
            if np.prod([float(d) for d in dims]) > 1e6:
                return None
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            if dtype.kind not in "fiub":
                return None
            scale = 1 if dtype.kind == "f" else 2
            array = scale * rng.standard_normal(dims)
            array = np.abs(array) if dtype.kind in "ub" else array
            inputs[value.name] = np.asarray(array.astype(dtype))
    except (DecodeError, UnicodeDecodeError, KeyError, ValueError, TypeError, AttributeError):
        return None
    return inputs


class Fuzzer:
    """Runs mutated models in two workers: this package's, and the one whose answers count.

    Parameters
    ----------
    models : list of ModelProto
        Valid models.
    """

    def __init__(self, models: list[onnx.ModelProto]) -> None:
        self.models = models
        self._own, self._other = (LastingWorker(__name__, LIMIT) for _ in range(2))

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._own.close()
        self._other.close()

    def run(self, seed: int, count: int) -> Iterator[Finding]:
        """Yield what becomes of ``count`` mutated models."""
        chance = random.Random(seed)
        for _ in range(count):
            content = mutate(chance.choice(self.models), chance)
            yield self.judge(content, random_inputs(content, chance))

    def judge(self, content: bytes, inputs: dict[str, np.ndarray] | None) -> Finding:
        """Run one model here and elsewhere."""
        given = inputs or {}
        wanted = None if inputs is None else self._ask_other("oracle", content, given)
        request = ["compile" if wanted is None else "run", _text(content), _packed(given)]
        try:
            try:
                status, answer = self._own.ask([*request, "fast"])
            except WorkerDied:  # onnx's checker may have, which users run in a process of its own
                status, answer = self._own.ask([*request, "careful"])
        except WorkerDied as error:
            return Finding("crashed", str(error), content, given)
        if status != "right":
            return Finding(status, answer, content, given)
        if wanted is None:
            return Finding("no_oracle", "", content, given)
        problem = difference(_unpacked(answer), wanted)
        if not problem:
            return Finding("right", "", content, given)
        # Two implementations that disagree leave open what is right: the order of NaN, a legal model's odd corner.
        second = self._ask_other("reference", content, given)
        agreed = second is None or not difference(second, wanted)
        return Finding("wrong" if agreed else "no_oracle", problem, content, given)

    def _ask_other(
        self, role: str, content: bytes, inputs: dict[str, np.ndarray]
    ) -> list[np.ndarray] | None:
        try:
            status, answer = self._other.ask([role, _text(content), _packed(inputs), ""])
        except WorkerDied:
            return None
        return _unpacked(answer) if status == "right" else None


def difference(got: list[np.ndarray], wanted: list[np.ndarray]) -> str:
    """Return how results differ; empty where they agree within the rounding of their types."""
    if len(got) != len(wanted):
        return f"{len(got)} outputs instead of {len(wanted)}"
    for number, (mine, right) in enumerate(zip(got, wanted, strict=True)):
        if (mine.shape, mine.dtype) != (right.shape, right.dtype):
            return (
                f"output {number} is {mine.dtype}{mine.shape} instead of {right.dtype}{right.shape}"
            )
        if right.dtype.kind != "f":
            if right.dtype.kind == "i" and (right < np.iinfo(right.dtype).min // 2).any():
                continue  # what x86 makes of a NaN or of a number out of range: C leaves it open
            if not np.array_equal(mine, right):
                return f"output {number} has other values: {mine.reshape(-1)[:5]}, {right.reshape(-1)[:5]}"
            continue
        with np.errstate(all="ignore"):
            a, b = mine.astype("float64"), right.astype("float64")
            largest = np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max(initial=0)
            relative = 1e-2 if right.dtype == np.float16 else 1e-3
            if not np.allclose(a, b, rtol=relative, atol=relative * largest + 1e-6, equal_nan=True):
                return f"output {number} differs: {a.reshape(-1)[:5]}, {b.reshape(-1)[:5]}"
    return ""


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _packed(arrays: dict[str, np.ndarray] | list[np.ndarray]) -> str:
    named = arrays if isinstance(arrays, dict) else {str(i): a for i, a in enumerate(arrays)}
    file = io.BytesIO()
    np.savez(
        file, **{f"v{i}": a for i, a in enumerate(named.values())}, names=np.array(list(named))
    )
    return _text(file.getvalue())


def _unpacked(text: str) -> list[np.ndarray]:
    stored = np.load(io.BytesIO(base64.b64decode(text)))
    return [stored[f"v{i}"] for i in range(len(stored["names"]))]


def _named(text: str) -> dict[str, np.ndarray]:
    names = np.load(io.BytesIO(base64.b64decode(text)))["names"]
    return dict(zip(map(str, names), _unpacked(text), strict=True))


def answer(request: list[str]) -> tuple[str, str]:
    """In the worker: run a model; (status, packed results or a reason)."""
    role, content, inputs = request[0], base64.b64decode(request[1]), _named(request[2])
    if role in ("oracle", "reference"):
        return (_onnxruntime if role == "oracle" else _reference)(content, inputs)
    # A process for each model's checks takes most of the time.
    with checking_here() if request[3] == "fast" else contextlib.nullcontext():
        return _here(content, inputs, role)


def _onnxruntime(content: bytes, inputs: dict[str, np.ndarray]) -> tuple[str, str]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(content, options)
        results = [np.asarray(a) for a in session.run(None, inputs)]
        if not _as_inferred(content, results):
            return "invalid", "onnx infers other sizes"
        return "right", _packed(results)
    except Exception as error:  # noqa: BLE001 - its errors have no common class
        return "invalid", type(error).__name__


def _as_inferred(content: bytes, results: list[np.ndarray]) -> bool:
    """Whether results have the sizes that onnx infers; onnxruntime takes negative axes for others at places."""
    inferred = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(content))
    for value, result in zip(inferred.graph.output, results, strict=True):
        shape = value.type.tensor_type.shape
        if value.type.tensor_type.HasField("shape") and (
            len(shape.dim) != result.ndim
            or any(
                dim.HasField("dim_value") and dim.dim_value != size
                for dim, size in zip(shape.dim, result.shape, strict=True)
            )
        ):
            return False
    return True


def _reference(content: bytes, inputs: dict[str, np.ndarray]) -> tuple[str, str]:
    from onnx.reference import ReferenceEvaluator

    try:
        results = ReferenceEvaluator(onnx.load_model_from_string(content)).run(None, inputs)
        return "right", _packed([np.asarray(a) for a in results])
    except Exception as error:  # noqa: BLE001 - as above
        return "invalid", type(error).__name__


def _here(content: bytes, inputs: dict[str, np.ndarray], role: str) -> tuple[str, str]:
    from .. import api
    from ..errors import FusionError
    from ..frontend import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(content)
        try:
            compiled = api.compile(load(path), "llvm", verify=False)
        except FusionError as error:
            if "\n" in str(error).strip():
                return "raised", f"a message of several lines: {error}"
            return "refused", str(error)
        except Exception as error:  # noqa: BLE001 - what it is, is the finding
            # A shape that the caller has to give is a wrong argument, not a wrong model.
            if type(error) is ValueError and "has an unknown shape: give it one" in str(error):
                return "refused", str(error)
            return "raised", f"{type(error).__name__}: {last_line(error)}"
    if role == "compile":
        return "right", _packed([])
    try:
        results = compiled(*inputs.values())
    except ValueError as error:
        # A size of 0 says "any" in ONNX; inputs without elements are refused when they come.
        status = "refused" if "has no elements" in str(error) else "raised"
        return status, f"running: {last_line(error)}"
    except Exception as error:  # noqa: BLE001 - as above
        return "raised", f"running: {type(error).__name__}: {last_line(error)}"
    results = results if isinstance(results, list | tuple) else [results]
    return "right", _packed([np.asarray(result) for result in results])


def main() -> None:
    """Be a worker."""
    warnings.simplefilter("ignore")
    serve(answer)


if __name__ == "__main__":
    main()
