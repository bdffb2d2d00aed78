"""The few calls of the CUDA driver that graphs need, through ctypes.

No package other than TVM is needed. Every method is one idea, so that a test can put another class
in its place (``tvm_fusion.testing.fake_driver``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tvm_ffi

_HANDLE, _OUT, _INT = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
_SIZE, _FLAGS = ctypes.c_size_t, ctypes.c_uint

#: Argument types. Where ``cuda.h`` renames a function to ``…_v2``, that name stands here.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_FLAGS,),
    "cuDeviceGet": (_OUT, _INT),
    "cuDeviceGetCount": (_OUT,),
    "cuDevicePrimaryCtxRetain": (_OUT, _INT),
    "cuCtxGetCurrent": (_OUT,),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuThreadExchangeStreamCaptureMode": (_OUT,),
    "cuStreamCreate": (_OUT, _FLAGS),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamIsCapturing": (_HANDLE, _OUT),
    "cuStreamBeginCapture_v2": (_HANDLE, _INT),
    "cuStreamEndCapture": (_HANDLE, _OUT),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, _FLAGS),
    "cuEventCreate": (_OUT, _FLAGS),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventElapsedTime": (_OUT, _HANDLE, _HANDLE),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuGraphGetNodes": (_HANDLE, _HANDLE, _OUT),
    "cuGraphInstantiateWithFlags": (_OUT, _HANDLE, ctypes.c_ulonglong),
    "cuGraphUpload": (_HANDLE, _HANDLE),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
    "cuGraphDestroy": (_HANDLE,),
    "cuGraphExecDestroy": (_HANDLE,),
    "cuMemcpyDtoDAsync_v2": (_HANDLE, _HANDLE, _SIZE, _HANDLE),
    "cuMemsetD8Async": (_HANDLE, ctypes.c_ubyte, _SIZE, _HANDLE),
    "cuCtxSynchronize": (),
    "cuGetErrorName": (_INT, _OUT),
    "cuGetErrorString": (_INT, _OUT),
}

_INVALID_CONTEXT = 201
_NON_BLOCKING_STREAM = 1
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class CudaError(RuntimeError):
    """A call of the CUDA driver failed; the message names the call and CUDA's reason."""


class Graph:
    """An executable CUDA graph; destroyed with this object.

    Parameters
    ----------
    handle : ctypes.c_void_p
        The driver's handle.
    destroy : callable
        Destroys the handle.
    """

    def __init__(self, handle: ctypes.c_void_p, destroy: Callable[[ctypes.c_void_p], Any]) -> None:
        self.handle = handle
        # Not at exit: the driver may be gone by then, and frees everything itself.
        weakref.finalize(self, destroy, handle).atexit = False


class _Thread(threading.local):
    """What is known of the calling thread: whether it was seen to have a context."""

    entered = False


class CudaDriver:
    """CUDA graphs, streams and copies on one GPU.

    Parameters
    ----------
    device : int
        Number of the GPU. Its primary context is used, as by TVM, PyTorch and CuPy.

    Raises
    ------
    CudaError
        If there is no driver, or no such GPU.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as err:
            raise CudaError(f"the CUDA driver cannot be loaded: {err}") from err
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function
        self._several, self._context, self._thread = False, None, _Thread()
        self._call("cuInit", 0)
        ordinal, count = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(ordinal), device)
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self._context = self._make("cuDevicePrimaryCtxRetain", ordinal.value)
        self._several = count.value > 1
        self._device = tvm_ffi.device("cuda", device)
        self._order = self._make("cuEventCreate", _NO_TIMING)

    def _call(self, name: str, *args: Any) -> None:
        """Call a function for this GPU, whichever one the caller's thread works on."""
        function = self._functions[name]
        if self._several:
            # Left as found: the caller may be at work on another GPU.
            self._functions["cuCtxPushCurrent_v2"](self._context)
            code = function(*args)
            self._functions["cuCtxPopCurrent_v2"](ctypes.byref(ctypes.c_void_p()))
        else:
            if not self._thread.entered and self._context is not None:
                self._enter()
            code = function(*args)
            if code == _INVALID_CONTEXT:  # someone took the thread's context away
                self._functions["cuCtxSetCurrent"](self._context)
                code = function(*args)
        if code:
            raise CudaError(f"{name} failed: {self._reason(code)}")

    def _enter(self) -> None:
        """Give this thread the GPU's context unless it has one.

        To wait for a call to fail would do, but tools such as compute-sanitizer report every call that fails.
        """
        current = ctypes.c_void_p()
        self._functions["cuCtxGetCurrent"](ctypes.byref(current))
        if not current.value:
            self._functions["cuCtxSetCurrent"](self._context)
        self._thread.entered = True

    def _make(self, name: str, *args: Any) -> ctypes.c_void_p:
        """Call a function whose first argument takes a handle, and return that."""
        out = ctypes.c_void_p()
        self._call(name, ctypes.byref(out), *args)
        return out

    def _reason(self, code: int) -> str:
        parts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if not self._functions[name](code, ctypes.byref(text)) and text.value:
                parts.append(text.value.decode())
        return ", ".join(parts) or f"CUDA error {code}"

    def enter_worker(self) -> None:
        """Prepare a thread that allocates and captures while others may be capturing.

        In relaxed mode an allocation here does not spoil a capture that another thread has begun.
        """
        self._functions["cuCtxSetCurrent"](self._context)
        self._functions["cuThreadExchangeStreamCaptureMode"](ctypes.byref(ctypes.c_int(_RELAXED)))

    def create_stream(self) -> int:
        """Return a new stream that does not wait for the default stream; it lives on."""
        return self._make("cuStreamCreate", _NON_BLOCKING_STREAM).value or 0

    def use(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        """Let TVM launch on a stream, on this thread, inside a ``with``."""
        return tvm_ffi.use_raw_stream(self._device, stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether someone captures a stream into a graph."""
        status = ctypes.c_int()
        self._call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0

    def capture(self, run: Callable[[], None], stream: int, kernels: int) -> Graph:
        """Capture what a function launches.

        Parameters
        ----------
        run : callable
            Launches kernels on ``stream``.
        stream : int
            A stream that nobody else uses.
        kernels : int
            Launches that there must be at least; fewer mean that something ran on the host.

        Raises
        ------
        CudaError
            If the work cannot be captured.
        """
        self._call("cuStreamBeginCapture_v2", stream, _RELAXED)
        graph = ctypes.c_void_p()
        try:
            with self.use(stream):
                run()
        except BaseException:
            # The capture must end, whatever it holds; the first error is the one that tells why.
            self._functions["cuStreamEndCapture"](stream, ctypes.byref(graph))
            if graph.value:
                self._functions["cuGraphDestroy"](graph)
            raise
        self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
        try:
            count = ctypes.c_size_t()
            self._call("cuGraphGetNodes", graph, None, ctypes.byref(count))
            if count.value < kernels:
                raise CudaError(
                    f"only {count.value} of {kernels} calls launched a kernel, the rest ran on the host"
                )
            handle = self._make("cuGraphInstantiateWithFlags", graph, 0)
        finally:
            self._functions["cuGraphDestroy"](graph)
        made = Graph(handle, self._functions["cuGraphExecDestroy"])
        self._call("cuGraphUpload", handle, stream)  # else the first replay does it
        self._call("cuStreamSynchronize", stream)
        return made

    def launch(self, graph: Graph, stream: int) -> None:
        """Replay a graph on a stream, without waiting for it."""
        self._call("cuGraphLaunch", graph.handle, stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy ``size`` bytes from one device address to another, in the order of a stream."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, stream)

    def clear(self, target: int, size: int, stream: int, byte: int = 0) -> None:
        """Set ``size`` bytes at a device address to zero, or to ``byte``, in the order of a stream."""
        self._call("cuMemsetD8Async", target, byte, size, stream)

    def order(self, before: int, after: int) -> None:
        """Let what comes on stream ``after`` wait for what is on stream ``before`` by now."""
        self._call("cuEventRecord", self._order, before)
        self._call("cuStreamWaitEvent", after, self._order, 0)

    def synchronize(self, stream: int) -> None:
        """Wait until a stream is done."""
        self._call("cuStreamSynchronize", stream)

    def synchronize_all(self) -> None:
        """Wait until the GPU is done; an error of earlier work is not this call's."""
        with contextlib.suppress(CudaError):
            self._call("cuCtxSynchronize")

    def time(self, run: Callable[[], None], stream: int) -> float:
        """Seconds that the work which a function puts on a stream takes there."""
        return self.times(run, stream, 1)[0]

    def times(
        self, run: Callable[[], None], stream: int, repeat: int, ahead: int = 0
    ) -> list[float]:
        """Seconds on a stream of each of several runs, enqueued without waiting in between.

        With some runs ``ahead``, which are not timed, the stream is busy when the first event is put on it, and the
        host's own time for the later runs is hidden behind earlier ones.
        """
        events = [self._make("cuEventCreate", 0) for _ in range(2 * repeat)]
        try:
            for _ in range(ahead):
                run()
            for first, last in zip(events[::2], events[1::2], strict=True):
                self._call("cuEventRecord", first, stream)
                run()
                self._call("cuEventRecord", last, stream)
            self._call("cuEventSynchronize", events[-1])
            passed, out = ctypes.c_float(), []
            for first, last in zip(events[::2], events[1::2], strict=True):
                self._call("cuEventElapsedTime", ctypes.byref(passed), first, last)
                out.append(passed.value * 1e-3)
        finally:
            for event in events:
                self._functions["cuEventDestroy_v2"](event)
        return out


@functools.cache
def driver_of(device: int) -> CudaDriver:
    """Return the driver of a GPU, one for all models."""
    return CudaDriver(device)
