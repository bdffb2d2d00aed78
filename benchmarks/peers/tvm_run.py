"""Compiled TVM modules under the protocol: calls of the virtual machine, or launches of a loaded model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from protocol import COPIES, CudaClock, Times, call_time, cpu_times
from tvm import relax

from .base import Ready


def versions() -> dict[str, str]:
    """Versions of TVM and of its interface library."""
    return {"tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__}


class TvmReady(Ready):
    """A function of TVM's tensors, captured on a stream of its own.

    Parameters
    ----------
    function : callable
        Enqueues one call on the stream that is current for TVM; returns a tensor or several.
    inputs : list of tvm.runtime.Tensor
        Its arguments.
    channels_last : bool
        Whether 4-d outputs are ``[N, H, W, C]``.
    public : callable, optional
        The same by replaying a graph of the model's own, whose time is reported too.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: list[Any],
        channels_last: bool,
        public: Callable[..., Any] | None = None,
    ) -> None:
        self._function, self._inputs, self._public = function, inputs, public
        self._channels_last = channels_last
        self._clock: CudaClock | None = None
        self._graphs: list[tuple[Any, Any]] = []
        if inputs[0].device.dlpack_device_type() == tvm.cuda(0).dlpack_device_type():
            tvm.cuda(0).sync()  # weights and inputs are copied on the default stream
            self._clock = shared_clock()
            with self._stream():
                for _ in range(3):  # loads kernels and fills memory pools, outside of captures
                    self.call()
            self._clock.sync()
            self._graphs = [self._captured(copies) for copies in (COPIES, 1)]

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        return tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), self._clock.stream.value)

    def _captured(self, copies: int) -> tuple[Any, Any]:
        """Capture some calls; return the graph and the outputs of the last one."""
        clock = self._clock
        clock.begin_capture()
        try:
            out = None
            with self._stream():
                for _ in range(copies):
                    out = None  # the next copy writes to the same buffers
                    out = self.call()
        finally:
            graph = clock.end_capture()
        return graph, out

    def call(self) -> Any:
        return self._function(*self._inputs)

    def outputs(self) -> list[np.ndarray]:
        if not self._graphs:
            return self._arrays(self.call())
        for graph, out in self._graphs:
            self._spoil(graph)
            for tensor in _tensors(out):  # what is not written must not look right
                tensor.copyfrom(np.full(tensor.shape, np.nan, str(tensor.dtype)))
            tvm.cuda(0).sync()
            self._clock.launch(graph)
            self._clock.sync()
            found = self._arrays(out)
            if not all(np.isfinite(a).all() for a in found):
                break
        return found

    def _spoil(self, graph: Any) -> None:
        """Run on NaN, so that what a kernel reads before it is written is not what an earlier run wrote."""
        kept = [tensor.numpy() for tensor in self._inputs]
        for tensor in self._inputs:
            if "float" in str(tensor.dtype):
                tensor.copyfrom(np.full(tensor.shape, np.nan, str(tensor.dtype)))
        tvm.cuda(0).sync()
        self._clock.launch(graph)
        self._clock.sync()
        for tensor, values in zip(self._inputs, kept, strict=True):
            tensor.copyfrom(values)

    def _arrays(self, out: Any) -> list[np.ndarray]:
        arrays = [t.numpy() for t in _tensors(out)]
        if self._channels_last:
            arrays = [a.transpose(0, 3, 1, 2) if a.ndim == 4 else a for a in arrays]
        return arrays

    def measure(self) -> Times:
        if not self._graphs:
            return cpu_times(self.call)
        clock, (many, one) = self._clock, (graph for graph, _ in self._graphs)
        with self._stream():
            times = clock.measure(lambda: clock.launch(many), lambda: clock.launch(one), self.call)
            if self._public is None:
                return times
            public = call_time(lambda: self._public(*self._inputs), clock.sync)
        return Times(times.warm, times.cold, times.call, public)

    def close(self) -> None:
        for graph, _ in self._graphs:
            self._clock.destroy(graph)
        self._graphs, self._inputs = [], []
        self._function = self._public = None  # type: ignore[assignment]


def _tensors(out: Any) -> list[Any]:
    return [out] if hasattr(out, "numpy") else list(out)


def vm_ready(library: Any, inputs: list[np.ndarray], channels_last: bool, device: str) -> TvmReady:
    """Run ``main`` of a library or an executable in TVM's virtual machine."""
    place = tvm.cuda(0) if device == "cuda" else tvm.cpu()
    function = relax.VirtualMachine(library, place)["main"]
    return TvmReady(function, [tvm.runtime.tensor(x, place) for x in inputs], channels_last)


_CLOCK: list[CudaClock] = []


def shared_clock() -> CudaClock:
    """This process's clock on TVM's CUDA context."""
    if not _CLOCK:
        tvm.runtime.empty((1,), "float32", tvm.cuda(0))  # makes TVM's context current here
        _CLOCK.append(CudaClock())
    return _CLOCK[0]
