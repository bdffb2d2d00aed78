"""What a kernel must compute: the unscheduled function in float64 on the CPU, once per kernel.

No schedule of this package takes part but that outer loops run in parallel, and no sum or rounding
of the kernel's own type.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from ..build import tir_pipeline
from ..build.inputs import numpy_dtype
from ..build.signature import TensorSpec
from ..compat import tirx, tvm
from ..devices import TF32
from ..schedules.analysis import nodes_of, root_block
from ..schedules.base import CONSTANTS
from ..verification.reference import parallel_loops
from ..verification.verify import GROUP_TOLERANCE
from .builder import write_source
from .measure import Inputs, KernelSource
from .process import Answer, Worker, WorkerPool
from .serve import Channel, Handler, serve
from .values import input_arrays

#: Types that are computed in float64, narrowest first.
_FLOATS = ("bfloat16", "float16", "float32")

#: Share of the integers that floats decide (argmax) which may differ from the reference.
_DECIDED = 0.01


class References:
    """Makes and keeps the inputs and reference outputs of kernels.

    Parameters
    ----------
    workers : int
        Worker processes. The loops of one reference run in parallel, so few are best.
    timeout_s : float
        Seconds for one kernel.
    folder : Path, optional
        Where the outputs go and stay; a temporary folder, removed at `close`, when absent.
    seed : int
        Seed of the inputs.
    """

    def __init__(
        self,
        workers: int = 1,
        timeout_s: float = 300.0,
        folder: Path | None = None,
        seed: int = 0,
    ) -> None:
        self._timeout_s, self._seed = timeout_s, seed
        self._temporary = tempfile.TemporaryDirectory(prefix="tvm_fusion-") if not folder else None
        self._folder = Path(folder or self._temporary.name)
        self._folder.mkdir(parents=True, exist_ok=True)
        module, environment = "tvm_fusion.tuning.reference", {"CUDA_VISIBLE_DEVICES": ""}
        self._pool = WorkerPool([Worker(module, environment=environment) for _ in range(workers)])
        self._known: dict[str, Future[Inputs | str]] = {}

    def launch(self) -> None:
        """Start the workers, without waiting until they are ready."""
        self._pool.launch()

    def submit(self, sources: Sequence[KernelSource]) -> list[Future[Inputs | str]]:
        """Have inputs with reference outputs made in the background, once for each kernel.

        Returns
        -------
        list of Future
            Of the inputs, or of why there are none; in the order of the sources. They raise ``TuningError`` if a
            worker cannot be started.
        """
        for source in sources:
            if source.kernel not in self._known:
                request = {
                    "source": str(write_source(source, self._folder)),
                    "folder": str(self._folder),
                    "kernel": source.kernel,
                    "seed": self._seed,
                    "tf32": source.has_tf32,
                }
                self._known[source.kernel] = self._pool.submit(request, self._timeout_s, _result)
        return [self._known[source.kernel] for source in sources]

    def make(self, sources: Sequence[KernelSource]) -> list[Inputs | str]:
        """Inputs with reference outputs, for each kernel, or why there are none.

        Raises
        ------
        TuningError
            If a worker cannot be started.
        """
        return [future.result() for future in self.submit(sources)]

    def close(self) -> None:
        """End the workers and remove the outputs, unless the caller named their folder."""
        self._pool.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> References:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _result(answer: Answer) -> Inputs | str:
    if answer["verdict"] == "made":
        return Inputs.from_dict(answer["inputs"])
    return str(answer["message"])


def widened(func_json: str) -> tirx.PrimFunc:
    """A function with float64 in the place of all narrower floats.

    Types are shared nodes of TVM's JSON form, so each is changed in one place and casts between
    them become no-ops.
    """
    data = json.loads(func_json)
    for node in data["nodes"]:
        if node["type"] == "ir.PrimType" and node["data"]["dtype"] in _FLOATS:
            node["data"]["dtype"] = "float64"
    return tvm.ir.load_json(json.dumps(data))["main"]


def describe(
    func: tirx.PrimFunc, seed: int = 0, positive: bool = False, tf32: bool = False
) -> Inputs:
    """The inputs of a function (whose float32 products may be in TF32), without reference outputs yet."""
    params = tuple(
        TensorSpec(p.name, tuple(int(d) for d in p.ty.shape), str(p.ty.dtype)) for p in func.params
    )
    stores = nodes_of(func.body, tirx.BufferStore)
    written = {s.buffer.__chandle__() for s in stores}
    outputs = tuple(i for i, p in enumerate(func.params) if p.__chandle__() in written)
    constants = func.attrs.get(CONSTANTS, ()) if func.attrs is not None else ()
    dtypes = {spec.dtype for spec in params}
    narrowest = next((name for name in _FLOATS if name in dtypes), "")
    narrowest = TF32 if tf32 and narrowest == "float32" else narrowest
    tolerances = tuple(
        GROUP_TOLERANCE.get(narrowest, 0.0)
        if numpy_dtype(params[i].dtype).kind not in "iub"
        else (_DECIDED if narrowest else 0.0)
        for i in outputs
    )
    return Inputs(seed, positive, params, outputs, tuple(map(int, constants)), (), tolerances)


def compute(func: tirx.PrimFunc, inputs: Inputs) -> list[np.ndarray]:
    """Run a widened function on the CPU and return its outputs."""
    if root_block(func) is not None:
        func = parallel_loops(func)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    kernel = tvm.compile(mod, target="llvm", tir_pipeline=tir_pipeline.NAME)["main"]
    arrays = input_arrays(inputs)
    tensors = []
    for number, param in enumerate(func.params):
        dtype = numpy_dtype(str(param.ty.dtype))
        shape = inputs.params[number].shape
        array = arrays[number].astype(dtype) if number in arrays else np.zeros(shape, dtype)
        tensors.append(tvm.runtime.tensor(array))
    kernel(*tensors)
    return [tensors[number].numpy() for number in inputs.outputs]


class _ReferenceHandler:
    """Carries out requests of `References`."""

    def __call__(self, request: Mapping[str, Any]) -> dict[str, Any]:
        text = Path(request["source"]).read_text(encoding="utf-8")
        func = widened(text)
        original = tvm.ir.load_json(text)["main"]
        tf32 = bool(request["tf32"])
        inputs = describe(original, int(request["seed"]), tf32=tf32)
        outputs = compute(func, inputs)
        if not all(_is_finite(a) for a in outputs):
            # Roots or logarithms of negative values: with NaN expected, little would be compared.
            again = describe(original, inputs.seed, positive=True, tf32=tf32)
            other = compute(func, again)
            if sum(map(_finite_share, other)) > sum(map(_finite_share, outputs)):
                inputs, outputs = again, other
        files = []
        for number, array in zip(inputs.outputs, outputs, strict=True):
            path = Path(request["folder"], f"{request['kernel']}-{number}.npy")
            with np.errstate(over="ignore"):  # infinite, and compared as that
                np.save(path, array.astype(_kept_type(inputs.params[number].dtype)))
            files.append(str(path))
        return {"verdict": "made", "inputs": {**inputs.to_dict(), "references": files}}


def _kept_type(dtype: str) -> np.dtype:
    """Type in which a reference is kept: its rounding to float32 is far below every tolerance."""
    return np.dtype("float32") if dtype in _FLOATS else numpy_dtype(dtype)


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype.kind in "iub" or bool(np.isfinite(array).all())


def _finite_share(array: np.ndarray) -> float:
    return float(np.isfinite(array).mean()) if array.size else 1.0


def make_handler(channel: Channel) -> Handler:
    """What `serve` calls."""
    return _ReferenceHandler()


if __name__ == "__main__":
    serve(make_handler)
