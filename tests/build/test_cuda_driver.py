"""The calls of the CUDA driver, on a library of straw that notes them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading

import pytest

from tvm_fusion.build import cuda_driver
from tvm_fusion.build.cuda_driver import CudaDriver, CudaError

CONTEXT, STREAM, EVENT, GRAPH, EXECUTABLE = 11, 22, 33, 44, 55


class Library:
    """Stands for ``libcuda.so.1``: every function succeeds, unless `codes` has a result for it."""

    def __init__(self, devices=1, nodes=3):
        self.calls, self.codes = [], {}
        self.results = {
            "cuDeviceGetCount": devices, "cuDevicePrimaryCtxRetain": CONTEXT,
            "cuStreamCreate": STREAM, "cuEventCreate": EVENT, "cuStreamEndCapture": GRAPH,
            "cuGraphGetNodes": nodes, "cuGraphInstantiateWithFlags": EXECUTABLE,
            "cuStreamIsCapturing": 1, "cuEventElapsedTime": 2.5, "cuGetErrorName": b"CUDA_ERROR_X",
        }  # fmt: skip

    def __getattr__(self, name):
        def function(*args):
            outs = [a for a in args if hasattr(a, "_obj")]
            if outs and name in self.results:
                outs[0]._obj.value = self.results[name]
            plain = [getattr(a, "value", a) for a in args if a not in outs]
            self.calls.append((name, *plain))
            found = self.codes.get(name, 0)
            return found.pop(0) if isinstance(found, list) else found

        return function

    def names(self):
        found = [name for name, *_ in self.calls]
        self.calls.clear()
        return found


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def driver(library, monkeypatch):
    return make(library, monkeypatch)


def make(library, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    made = CudaDriver(0)
    monkeypatch.setattr(made, "use", lambda stream: contextlib.nullcontext())
    library.calls.clear()
    return made


def test_a_capture_becomes_a_graph_that_is_destroyed_with_its_object(driver, library):
    graph = driver.capture(lambda: driver.copy(1, 2, 16, STREAM), STREAM, 3)
    assert ("cuMemcpyDtoDAsync_v2", 1, 2, 16, STREAM) in library.calls
    assert library.names() == [
        "cuStreamBeginCapture_v2", "cuMemcpyDtoDAsync_v2", "cuStreamEndCapture", "cuGraphGetNodes",
        "cuGraphInstantiateWithFlags", "cuGraphDestroy", "cuGraphUpload", "cuStreamSynchronize",
    ]  # fmt: skip
    driver.launch(graph, 7)
    assert library.calls == [("cuGraphLaunch", EXECUTABLE, 7)]
    library.calls.clear()
    del graph
    gc.collect()
    assert library.calls == [("cuGraphExecDestroy", EXECUTABLE)]


def test_a_call_that_ran_on_the_host_is_no_graph(driver, library):
    with pytest.raises(CudaError, match="only 3 of 4 calls launched a kernel"):
        driver.capture(lambda: None, STREAM, 4)
    assert library.names()[-1] == "cuGraphDestroy"


def test_a_capture_ends_when_what_is_captured_fails(driver, library):
    with pytest.raises(ZeroDivisionError):
        driver.capture(lambda: 1 / 0, STREAM, 1)
    assert library.names() == ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"]


class Contexts(Library):
    """Knows which context each thread has: calls that need one fail without, as in CUDA."""

    FREE = ("cuInit", "cuDevice", "cuCtx", "cuGetError", "cuThreadExchange")

    def __init__(self, devices=1):
        super().__init__(devices)
        self.failed, self._thread = [], threading.local()

    def __getattr__(self, name):
        function = super().__getattr__(name)

        def checked(*args):
            code = function(*args)
            held = self._thread.__dict__.setdefault("held", [])
            if name == "cuCtxSetCurrent":
                held[-1:] = [args[0].value]
            elif name == "cuCtxPushCurrent_v2":
                held.append(args[0].value)
            elif name == "cuCtxPopCurrent_v2":
                held.pop()
            elif name == "cuCtxGetCurrent":
                args[0]._obj.value = held[-1] if held else None
            elif not name.startswith(self.FREE) and not held:
                self.failed.append(name)
                code = 201
            return code

        return checked

    def take_away(self):
        self._thread.held.clear()

    def current(self):
        return self._thread.__dict__.get("held", [])


@pytest.mark.parametrize("devices", [1, 2])
def test_no_call_is_made_to_fail(monkeypatch, devices):
    library = Contexts(devices)
    driver = make(library, monkeypatch)  # on a thread that has not used the GPU
    driver.order(7, 8)
    other = threading.Thread(target=lambda: driver.copy(1, 2, 16, STREAM))
    other.start()
    other.join()
    assert ("cuMemcpyDtoDAsync_v2", 1, 2, 16, STREAM) in library.calls
    assert library.failed == []


def test_a_context_of_another_stays(monkeypatch):
    library = Contexts()
    library.cuCtxPushCurrent_v2(ctypes.c_void_p(99))
    make(library, monkeypatch).order(7, 8)
    assert library.current() == [99] and library.failed == []


def test_a_thread_whose_context_is_taken_away_gets_it_again(monkeypatch):
    library = Contexts()
    driver = make(library, monkeypatch)
    library.take_away()
    driver.synchronize(STREAM)
    assert library.failed == ["cuStreamSynchronize"] and library.current() == [CONTEXT]


def test_a_call_is_repeated_where_there_was_no_context(driver, library):
    graph = driver.capture(lambda: None, STREAM, 1)
    library.calls.clear()
    library.codes["cuGraphLaunch"] = [201, 0]
    driver.launch(graph, 0)
    assert library.calls == [
        ("cuGraphLaunch", EXECUTABLE, 0), ("cuCtxSetCurrent", CONTEXT),
        ("cuGraphLaunch", EXECUTABLE, 0),
    ]  # fmt: skip


def test_another_gpu_stays_current(monkeypatch):
    library = Library(devices=2)
    driver = make(library, monkeypatch)
    driver.order(7, 8)
    assert library.calls == [
        ("cuCtxPushCurrent_v2", CONTEXT), ("cuEventRecord", EVENT, 7), ("cuCtxPopCurrent_v2",),
        ("cuCtxPushCurrent_v2", CONTEXT), ("cuStreamWaitEvent", 8, EVENT, 0), ("cuCtxPopCurrent_v2",),
    ]  # fmt: skip


def test_an_error_names_the_call_and_the_reason(driver, library):
    library.codes["cuStreamSynchronize"] = 700
    with pytest.raises(CudaError, match="cuStreamSynchronize failed: CUDA_ERROR_X"):
        driver.synchronize(STREAM)
    library.codes["cuCtxSynchronize"] = 700
    driver.synchronize_all()  # nobody is there to be told


def test_times_come_from_events(driver, library):
    assert driver.time(lambda: None, STREAM) == pytest.approx(2.5e-3)
    assert library.names().count("cuEventDestroy_v2") == 2


def test_runs_are_enqueued_without_waiting(driver, library):
    runs = []
    times = driver.times(lambda: runs.append(len(library.calls)), STREAM, 3, ahead=2)
    assert times == [pytest.approx(2.5e-3)] * 3 and len(runs) == 5
    names = library.names()
    assert names.count("cuEventRecord") == 6 and names.count("cuEventSynchronize") == 1
    assert names.index("cuEventSynchronize") > 5 and names.count("cuEventDestroy_v2") == 6
    # Two runs before the first event, then one between the events of each pair.
    assert runs[0] == runs[1] and len(set(runs[1:])) == 4


def test_memory_is_set_to_any_byte(driver, library):
    driver.clear(1000, 8, STREAM)
    driver.clear(1000, 8, STREAM, 0xFF)
    calls = [call for call in library.calls if call[0] == "cuMemsetD8Async"]
    assert [call[2] for call in calls] == [0, 0xFF]


def test_a_machine_without_the_driver(monkeypatch):
    def fail(name):
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", fail)
    with pytest.raises(CudaError, match="cannot be loaded: libcuda"):
        CudaDriver(0)
