"""Running a model where graphs are no choice, and CuPy's arrays. A fake driver stands for the GPU."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest

from tvm_fusion.build import executable, frameworks, graph_runner
from tvm_fusion.build.graph_runner import GraphRunner
from tvm_fusion.build.program import NotStaticError
from tvm_fusion.build.vm_runner import VmRunner
from tvm_fusion.compat import tvm
from tvm_fusion.testing.fake_driver import FakeDriver

SHAPE = (1, 8, 9, 9)


@pytest.fixture
def as_if_cuda(monkeypatch, driver, model, values):
    """Let this machine's CPU pass for the GPU, for models that have not run yet."""
    model(values())
    monkeypatch.setattr(executable, "is_cuda", lambda device: True)
    monkeypatch.setattr(executable, "driver_of", lambda index: driver)
    return driver


def loaded(model, **options):
    return executable.LoadedModel(model._library, model.signature, **options)


def test_a_capture_that_fails_leaves_the_vm_with_one_warning(model, as_if_cuda, torch, values):
    as_if_cuda.refuse = "cuMemAlloc failed"
    one = loaded(model)
    with pytest.warns(RuntimeWarning, match="without a CUDA graph: .* cuMemAlloc failed"):
        (y,) = one(values())
    assert np.array_equal(y, model(values())[0]) and not one.cuda_graph
    as_if_cuda.calls.clear()
    (y,) = one(torch.from_numpy(values()))
    assert np.array_equal(y.numpy(), model(values())[0])
    assert as_if_cuda.names() == ["use"]


def test_graphs_are_on_unless_switched_off(model, as_if_cuda, values):
    assert isinstance(loaded(model)._start(), GraphRunner)
    plain = loaded(model, cuda_graph=False)
    assert np.array_equal(plain(values())[0], model(values())[0])
    assert "capture" not in as_if_cuda.names()
    plain.cuda_graph = True
    assert np.array_equal(plain(values())[0], model(values())[0])
    assert "capture" in as_if_cuda.names()


def test_a_model_without_graphs_refuses_to_be_captured(model, as_if_cuda, torch, monkeypatch):
    monkeypatch.setattr(frameworks.TorchTensors, "stream", lambda self: 7)
    as_if_cuda.capturing = {7}
    with pytest.raises(RuntimeError, match="cannot be captured"):
        loaded(model, cuda_graph=False)(torch.zeros(SHAPE))


def test_vm_calls_on_two_streams_wait_for_each_other(model, torch, monkeypatch):
    stream, driver = 7, FakeDriver()
    monkeypatch.setattr(frameworks.TorchTensors, "stream", lambda self: stream)
    one, two = (
        VmRunner(model._vm(tvm.cpu()), model.signature, "main", tvm.cpu(), driver) for _ in "ab"
    )
    one([torch.zeros(SHAPE)])
    stream = 8
    driver.calls.clear()
    two([torch.zeros(SHAPE)])
    assert driver.calls == [("order", 7, 8), ("use", 8)]


def test_launch_is_for_cuda(model):
    with pytest.raises(NotStaticError, match="compiled for CUDA"):
        model.launch([np.zeros(SHAPE, "float32")])


def test_times_of_both_kinds(model, as_if_cuda, values):
    assert loaded(model).time(values(), number=4, repeat=2) == [0.25, 0.25]
    as_if_cuda.refuse = "no"
    with pytest.warns(RuntimeWarning, match="without a CUDA graph"):
        assert len(loaded(model).time(values(), repeat=2)) == 2
    assert min(model.time(values(), repeat=2)) > 0


def test_numpy_users_need_no_torch(tmp_path, model):
    path = tmp_path / "model.so"
    model.export(path)
    script = (
        "import sys; sys.modules['torch'] = sys.modules['cupy'] = None\n"
        "import numpy as np, tvm_fusion as tf\n"
        f"y, = tf.load({str(path)!r})(np.zeros({SHAPE}, 'float32'))\n"
        f"assert y.shape == {SHAPE}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


# ------------------------------------------------------------------- a CuPy of straw


@pytest.fixture
def cupy(monkeypatch):
    """A module with the few names of CuPy that are used, over NumPy's memory."""
    module = types.ModuleType("cupy")

    class ndarray(np.ndarray):
        data = property(lambda self: types.SimpleNamespace(ptr=self.ctypes.data, device_id=0))
        flags = property(
            lambda self: types.SimpleNamespace(c_contiguous=np.asarray(self).flags.c_contiguous)
        )

        def __dlpack__(self, stream=None, **options):
            assert stream == -1
            return np.asarray(self).__dlpack__(**options)

    module.ndarray = ndarray
    module.current = types.SimpleNamespace(ptr=0)
    module.from_dlpack = lambda tensor: np.from_dlpack(tensor).view(ndarray)
    module.cuda = types.SimpleNamespace(get_current_stream=lambda: module.current)
    monkeypatch.setitem(sys.modules, "cupy", module)
    real = frameworks.framework_of

    def framework_of(kind):
        return frameworks.CupyArrays if kind is ndarray else real(kind)

    for user in (frameworks, graph_runner):
        monkeypatch.setattr(user, "framework_of", framework_of)
    return module


def aligned(array, kind):
    space = np.empty(array.nbytes + 64, "uint8")
    start = -space.ctypes.data % 64
    made = space[start : start + array.nbytes].view(array.dtype).reshape(array.shape).view(kind)
    made[...] = array
    return made


def test_arrays_of_cupy(model, runner, driver, cupy, values):
    want = model(values())[0]
    x = aligned(values(), cupy.ndarray)
    first = cupy.current = types.SimpleNamespace(ptr=7)
    for expected in (["capture", "launch"], ["capture", "launch"], ["launch"]):
        (y,) = runner([x])
        assert type(y) is cupy.ndarray and np.array_equal(y, want)
        assert driver.names() == expected
    cupy.current = types.SimpleNamespace(ptr=8)
    runner([x])
    assert driver.calls[0] == ("order", 7, 8)
    assert first in next(iter(runner._frameworks.values()))._streams  # not destroyed too early
    with pytest.raises(TypeError, match="must be float32, got float64"):
        runner([aligned(values(dtype="float64"), cupy.ndarray)])
