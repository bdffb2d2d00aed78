"""Worker process that checks and times candidates on this machine (see `local_runner`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..build.cuda_driver import driver_of
from ..build.library import load_library
from ..build.model import BUILD_ERRORS, last_line
from ..compat import tvm
from ..errors import FusionError
from .clock import CudaClock, Launched, evaluate
from .measure import Inputs
from .serve import Channel, Handler, serve
from .values import arguments


class RunHandler:
    """Carries out requests of `LocalRunner` on one device.

    Parameters
    ----------
    index : int
        Number of the GPU, for kernels of CUDA.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._clock: CudaClock | None = None

    def __call__(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Measure one candidate; the answer holds the fields of `RunResult`."""
        inputs = Inputs.from_dict(request["inputs"])
        packed = tuple((number, tuple(axes)) for number, axes in request["packed"])
        on_gpu = request["kind"] == "cuda"
        try:
            library = load_library(request["artifact"])
            arrays = arguments(inputs, packed)
            if not on_gpu:
                return evaluate(library, tvm.cpu(), arrays, inputs)
            return self._gpu_clock().measure(library["main"], arrays, inputs)
        except Launched as err:
            # After an error on the GPU its context fails everything.
            return {"verdict": err.verdict, "message": str(err), "fatal": True}
        except (FusionError, *BUILD_ERRORS) as err:
            return {"verdict": "error", "message": last_line(err), "fatal": on_gpu}

    def _gpu_clock(self) -> CudaClock:
        if self._clock is None:
            device = tvm.cuda(self._index)
            tvm.runtime.empty((1,), "float32", device)  # makes TVM's context current here
            self._clock = CudaClock(driver_of(self._index), device)
        return self._clock


def make_handler(channel: Channel) -> Handler:
    """What `serve` calls; the command line names the GPU."""
    return RunHandler(int(sys.argv[1]))


if __name__ == "__main__":
    serve(make_handler)
