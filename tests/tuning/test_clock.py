"""The way to a GPU's clock, with a stand-in for its driver."""

from __future__ import annotations

import pytest

from tvm_fusion.build.cuda_driver import CudaError
from tvm_fusion.build.library import load_library
from tvm_fusion.compat import tvm
from tvm_fusion.testing.fake_driver import FakeDriver
from tvm_fusion.tuning.clock import CudaClock, Launched, Replays
from tvm_fusion.tuning.measure import BuildRequest
from tvm_fusion.tuning.run_worker import RunHandler
from tvm_fusion.tuning.values import arguments


@pytest.fixture
def dense(kernels, builder, references):
    """The kernel's function, its arguments, and what they are."""
    source = kernels.dense()
    (inputs,), (built,) = references.make([source]), builder.build([BuildRequest(source)])
    return load_library(built.artifact)["main"], arguments(inputs, ()), inputs


@pytest.fixture
def driver():
    """A driver for which every timed run takes 60 µs: a graph of twenty kernels of 3 µs."""
    driver = FakeDriver()
    driver.seconds = 60e-6
    return driver


def test_a_right_kernel_is_timed_in_a_graph_of_twenty(dense, driver):
    function, arrays, inputs = dense
    calls = []

    def counted(*tensors):
        calls.append(tensors)
        function(*tensors)

    answer = CudaClock(driver, tvm.cpu()).measure(counted, arrays, inputs)
    assert answer == {"verdict": "ok", "samples_us": [pytest.approx(3.0)] * 30}
    names = [call[0] for call in driver.calls]
    (captured,) = [call for call in driver.calls if call[0] == "capture"]
    assert captured[2] == 20
    # Run, timed once, then captured; uploads are waited for before the first run.
    assert names[:3] == ["synchronize", "use", "synchronize"]
    assert names.index("capture") < names.index("launch")
    # One graph that is checked, warm-up, two ahead and thirty timed.
    assert names.count("launch") >= 1 + 1 + 2 + 30


def test_every_candidate_gets_fresh_buffers(dense, driver):
    function, arrays, inputs = dense
    places = []

    def noted(*tensors):
        places.append([t.data_ptr() for t in tensors])
        function(*tensors)
        tensors[0].copyfrom(arrays[0] * 0)  # a kernel that spoils its input

    clock = CudaClock(driver, tvm.cpu())
    assert clock.measure(noted, arrays, inputs)["verdict"] == "wrong"
    assert clock.measure(function, arrays, inputs)["verdict"] == "ok"


def test_a_wrong_kernel_is_not_timed(dense, driver):
    _, arrays, inputs = dense
    answer = CudaClock(driver, tvm.cpu()).measure(lambda *tensors: None, arrays, inputs)
    assert answer["verdict"] == "wrong" and "nan" in answer["message"]
    assert [call[0] for call in driver.calls].count("launch") == 1


def test_a_kernel_that_is_right_only_the_first_time_is_wrong(dense, driver):
    function, arrays, inputs = dense
    calls = []

    def accumulating(*tensors):
        calls.append(0)
        if len(calls) == 1:
            function(*tensors)

    assert CudaClock(driver, tvm.cpu()).measure(accumulating, arrays, inputs)["verdict"] == "wrong"


def test_what_cannot_be_launched_or_captured_is_an_error(dense, driver):
    _, arrays, inputs = dense

    def refused(*tensors):
        raise RuntimeError("Traceback\nCUDA_ERROR_INVALID_VALUE")

    with pytest.raises(Launched, match=r"^CUDA_ERROR_INVALID_VALUE$") as info:
        CudaClock(driver, tvm.cpu()).measure(refused, arrays, inputs)
    assert info.value.verdict == "error"
    driver.refuse = "only 3 of 20 calls launched a kernel"
    with pytest.raises(Launched, match="only 3 of 20"):
        CudaClock(driver, tvm.cpu()).measure(lambda *tensors: None, arrays, inputs)


def test_a_kernel_that_crashes_takes_the_process_with_it(dense, driver, monkeypatch):
    function, _, inputs = dense

    def crashed(stream):
        if stream:
            raise CudaError("cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(driver, "synchronize", crashed)
    handler = RunHandler(0)
    handler._clock = CudaClock(driver, tvm.cpu())
    monkeypatch.setattr(
        "tvm_fusion.tuning.run_worker.load_library", lambda path: {"main": function}
    )
    request = {"inputs": inputs.to_dict(), "packed": (), "kind": "cuda", "artifact": "x.so"}
    assert handler(request) == {
        "verdict": "crashed",
        "message": "cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS",
        "fatal": True,
    }


@pytest.mark.parametrize(
    ("seconds", "copies", "replays", "ahead"),
    [(3e-6, 20, 30, 2), (1e-3, 20, 5, 2), (5e-3, 4, 5, 2), (0.03, 1, 3, 2), (0.2, 1, 1, 0)],
)
def test_slow_kernels_are_repeated_less(seconds, copies, replays, ahead):
    plan = Replays.of(seconds)
    assert (plan.copies, plan.replays, plan.ahead) == (copies, replays, ahead)
    if seconds < 0.01:
        assert seconds * copies * (replays + ahead) <= 0.2
