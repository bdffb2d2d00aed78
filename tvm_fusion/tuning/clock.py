"""How a candidate is checked and timed: by a CUDA graph on a GPU here, else by TVM's evaluator.

On a GPU one graph holds 20 copies of the kernel on the same buffers, and its replays are enqueued
without waiting in between, so that neither the launch of a graph nor the host's speed is measured.
Of a kernel so slow that this takes long, there are fewer copies and replays.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..build.cuda_driver import CudaError
from ..build.model import BUILD_ERRORS, last_line
from ..build.program import tensor_bytes
from ..compat import tvm
from .measure import Inputs
from .values import difference, undefined_byte

#: Copies of a kernel in a graph, seconds that they may take, and seconds of the replays.
COPIES, GRAPH_SECONDS, REPLAY_SECONDS = 20, 0.02, 0.1
#: Replays of a graph, and those that are enqueued before the first timed one.
LEAST_REPLAYS, MOST_REPLAYS, AHEAD = 3, 30, 2
#: Seconds of replays in which the clocks rise.
WARM_UP = 0.02
#: Of TVM's evaluator: seconds of one measurement and of all, and how many there are.
_EVALUATION_SECONDS, _LEAST_REPEATS, _MOST_REPEATS = 0.01, 3, 10

Answer = dict[str, Any]


class Launched(Exception):
    """Something failed on the GPU; ``verdict`` says whether the kernel ran (``"crashed"``) or not."""

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


@dataclasses.dataclass(frozen=True)
class Replays:
    """How many copies of a kernel are in a graph, and how often that is replayed."""

    copies: int
    replays: int
    ahead: int

    @staticmethod
    def of(seconds: float) -> Replays:
        """Choose for a kernel that takes some seconds."""
        seconds = max(seconds, 1e-9)
        copies = max(1, min(COPIES, int(GRAPH_SECONDS / seconds)))
        replays = int(REPLAY_SECONDS / (seconds * copies))
        if replays < 1:  # a bad candidate: once is enough to know
            return Replays(1, 1, 0)
        return Replays(copies, max(LEAST_REPLAYS, min(MOST_REPLAYS, replays)), AHEAD)


class CudaClock:
    """Checks and times kernels on a GPU.

    Parameters
    ----------
    driver : CudaDriver
        The driver, or what stands in its place in a test.
    device : Device
        The GPU.
    """

    def __init__(self, driver: Any, device: Any) -> None:
        self._driver, self._device = driver, device
        self._stream = driver.create_stream()

    def measure(
        self, function: Callable[..., Any], arrays: Sequence[np.ndarray], inputs: Inputs
    ) -> Answer:
        """Check a kernel, and time it if it is right.

        The results that are checked are those of the graph which is then timed: copies that run
        into each other show there.

        Parameters
        ----------
        function : callable
            Launches the kernel on tensors.
        arrays : sequence of numpy.ndarray
            Values of all parameters; they are copied into new buffers.
        inputs : Inputs
            What they are, and what must come out.

        Raises
        ------
        Launched
            If the kernel cannot be launched or crashes. The GPU's context is of no use after that.
        """
        driver, stream = self._driver, self._stream
        tensors = [tvm.runtime.tensor(array, self._device) for array in arrays]
        driver.synchronize(0)  # TVM copies on the default stream, which ours does not wait for

        def call() -> None:
            function(*tensors)

        def once() -> None:
            with driver.use(stream):
                call()

        _launching(once)  # loads the kernel, which a capture must not do
        self._wait()
        plan = Replays.of(driver.time(once, stream))

        def copies() -> None:
            for _ in range(plan.copies):
                call()

        graph = _launching(lambda: driver.capture(copies, stream, plan.copies))
        outputs = [tensors[number] for number in inputs.outputs]
        for number, tensor in zip(inputs.outputs, outputs, strict=True):
            byte = undefined_byte(inputs.params[number].dtype)
            driver.clear(tensor.data_ptr(), tensor_bytes(tensor), stream, byte)
        driver.launch(graph, stream)
        self._wait()
        problem = difference(inputs, [tensor.numpy() for tensor in outputs])
        if problem:
            return {"verdict": "wrong", "message": problem}
        if plan.ahead:
            self._warm_up(graph)
        times = driver.times(lambda: driver.launch(graph, stream), stream, plan.replays, plan.ahead)
        return {"verdict": "ok", "samples_us": [t / plan.copies * 1e6 for t in times]}

    def _warm_up(self, graph: Any) -> None:
        end = time.perf_counter() + WARM_UP
        while True:
            self._driver.launch(graph, self._stream)
            self._wait()
            if time.perf_counter() >= end:
                return

    def _wait(self) -> None:
        try:
            self._driver.synchronize(self._stream)
        except CudaError as err:
            raise Launched("crashed", last_line(err)) from err


def _launching(launch: Callable[[], Any]) -> Any:
    try:
        return launch()
    except BUILD_ERRORS as err:  # CudaError is a RuntimeError
        raise Launched("error", last_line(err)) from err


def evaluate(module: Any, device: Any, arrays: Sequence[np.ndarray], inputs: Inputs) -> Answer:
    """Check a kernel, and time it by TVM's evaluator if it is right; here or on an RPC server.

    On a GPU the evaluator launches back to back, which takes two to three microseconds a launch: of
    kernels that are shorter, it is the launch that is timed.

    Parameters
    ----------
    module : tvm.runtime.Module
        Loaded artifact.
    device : Device
        Where it runs.
    arrays : sequence of numpy.ndarray
        Values of all parameters; they are copied into new buffers.
    inputs : Inputs
        What they are, and what must come out.
    """
    tensors = [tvm.runtime.tensor(array, device) for array in arrays]
    function = module["main"]
    function(*tensors)
    device.sync()
    problem = difference(inputs, [tensors[number].numpy() for number in inputs.outputs])
    if problem:
        return {"verdict": "wrong", "message": problem}
    begin = time.perf_counter()
    function(*tensors)
    device.sync()
    seconds = max(time.perf_counter() - begin, 1e-9)
    repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, int(REPLAY_SECONDS / seconds)))
    evaluator = module.time_evaluator(
        "main",
        device,
        number=1,
        repeat=1 if seconds > REPLAY_SECONDS else repeats,
        min_repeat_ms=math.ceil(_EVALUATION_SECONDS * 1e3),
    )
    return {"verdict": "ok", "samples_us": [t * 1e6 for t in evaluator(*tensors).results]}
