"""Running a compiled model: graphs, buffers, frameworks, streams. A fake driver stands for the GPU."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.build import frameworks
from tvm_fusion.build.graph_runner import INPUT_SETS, KEEP_CALLS, OUTPUT_SETS
from tvm_fusion.build.program import NotStaticError, record
from tvm_fusion.build.signature import TensorSpec
from tvm_fusion.compat import relax, tvm
from tvm_fusion.testing.fake_driver import FakeDriver
from tvm_fusion.testing.modules import ModuleBuilder

SHAPE = (1, 8, 9, 9)


def odd_outputs():
    """An input returned as it is, reshaped values, a constant, and one value twice."""
    b = ModuleBuilder()
    x = b.input("x", (4, 6))
    y = b.relu("r", x)
    view = b.op("view", relax.op.reshape(y, (24,)))
    fixed = b.op("fixed", relax.op.add(b.const(3), b.const(3)))
    soft = b.op("soft", relax.op.nn.softmax(b.op("flat", relax.op.reshape(x, (2, 12)))))
    return b.finish(y, x, view, y, fixed, soft)


# ------------------------------------------------------------------ the recording


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("private", [False, True])
def test_a_recording_repeats_the_vm_on_other_buffers(odd, private, model, values, owned):
    compiled = tf.compile(odd_outputs(), "llvm", verify=False) if odd else model
    vm = compiled._vm(tvm.cpu())
    specs = compiled.signature
    new = [tvm.runtime.empty(s.shape, s.dtype) for s in specs.inputs]
    program = record(vm, "main", new, owned(compiled))
    x = values(1, specs.inputs[0].shape)
    outputs = [tvm.runtime.empty(s.shape, s.dtype) for s in specs.outputs]
    place = tvm.cpu() if private else None
    bound = program.bind([tvm.runtime.tensor(x)], outputs, private=place)
    bound.run(lambda *what: FakeDriver().copy(*what, 0))
    for got, want in zip(outputs, compiled(x), strict=True):
        assert np.array_equal(got.numpy(), want)


def test_a_call_of_a_foreign_function_is_not_recorded(model, values):
    x = [tvm.runtime.tensor(values())]
    with pytest.raises(NotStaticError, match="it calls fused_vertical_0, which is no kernel"):
        record(model._vm(tvm.cpu()), "main", x, lambda name: False)
    assert np.array_equal(model._vm(tvm.cpu())["main"](*x).numpy(), model(values())[0])


def test_a_symbolic_shape_is_not_recorded(runner_of):
    b = ModuleBuilder()
    x = b.input("x", (tvm.tirx.Var("n", "int64"), 16))
    compiled = tf.compile(b.finish(b.relu("r", x)), "llvm", verify=False)
    with pytest.raises(NotStaticError, match="symbolic"):
        runner_of(compiled)


# ------------------------------------------------------------- values and buffers


def test_numpy_arrays_go_in_and_out(model, runner, driver, values):
    for seed in range(3):
        (out,) = runner([values(seed)])
        assert isinstance(out, np.ndarray) and np.array_equal(out, model(values(seed))[0])
    assert driver.names().count("capture") == 1


def test_odd_outputs_are_the_callers_own(torch, values, runner_of):
    compiled = tf.compile(odd_outputs(), "llvm", verify=False)
    x = values(0, (4, 6))
    want = compiled(x)
    for run in (runner_of(compiled), compiled._start()):
        tensor = torch.from_numpy(x.copy())
        for _ in range(2):
            outs = run([tensor])
            for got, expected in zip(outs, want, strict=True):
                assert np.array_equal(got.numpy(), expected)
            for out in outs:
                out.fill_(7.0)  # neither an input nor a weight may change
            assert np.array_equal(tensor.numpy(), x)


def test_the_first_buffers_are_read_in_place(model, runner, driver, torch, values):
    x = torch.from_numpy(values())
    x = x.clone()
    for _ in range(3):
        (y,) = runner([x])
        del y
    assert driver.names() == ["capture", "launch", "launch", "launch"]
    x.copy_(torch.from_numpy(values(5)))
    (y,) = runner([x])
    assert np.array_equal(y.numpy(), model(values(5))[0])
    assert driver.names() == ["launch"]


def test_other_buffers_are_copied_once_and_captured_when_they_come_again(
    model, runner, driver, torch, values
):
    first, other = torch.zeros(SHAPE), torch.from_numpy(values(1)).clone()
    runner([first])
    driver.calls.clear()
    for expected in (["copy", "capture", "launch"], ["capture", "launch"], ["launch"]):
        (y,) = runner([other])
        assert np.array_equal(y.numpy(), model(values(1))[0])
        del y
        assert driver.names() == expected


def test_buffers_that_never_come_again_are_only_copied(model, runner, driver, torch, values):
    kept = [torch.from_numpy(values(seed)).clone() for seed in range(12)]
    for seed, x in enumerate(kept):
        (y,) = runner([x])
        assert np.array_equal(y.numpy(), model(values(seed))[0])
        del y
    assert driver.names().count("capture") == 2  # the first one's, and that of the own buffers


def test_many_buffers_in_turn_are_not_captured_again_and_again(runner, driver, torch):
    kept = [torch.zeros(SHAPE) for _ in range(INPUT_SETS + 4)]
    for _ in range(5):
        for x in kept:
            runner([x])
    assert driver.names().count("capture") == INPUT_SETS + 1


def test_buffers_out_of_use_give_their_place_up(runner, driver, torch):
    kept = [torch.zeros(SHAPE) for _ in range(INPUT_SETS)]
    for x in [*kept, *kept]:
        runner([x])
    for _ in range(KEEP_CALLS + 1):
        runner([kept[0]])
    other = torch.zeros(SHAPE)
    for _ in range(2):
        runner([other])
    driver.calls.clear()
    runner([other])
    assert driver.names() == ["launch"]


def test_a_result_stays_while_it_is_held(model, runner, driver, torch, values):
    x = torch.zeros(SHAPE)
    held = []
    for seed in range(OUTPUT_SETS + 3):
        x.copy_(torch.from_numpy(values(seed)))
        held.append(runner([x])[0])
    for seed, y in enumerate(held):
        assert np.array_equal(y.numpy(), model(values(seed))[0])
    # The last three found every set of outputs held.
    assert driver.names().count("copy") == 3


def test_a_view_holds_the_result_and_its_end_frees_the_buffer(model, runner, driver, torch, values):
    x = torch.from_numpy(values()).clone()
    view = runner([x])[0][0, 3]
    kept = view.clone()
    address = view.untyped_storage().data_ptr()
    x.zero_()
    assert runner([x])[0].data_ptr() != address
    assert torch.equal(view, kept)
    del view
    driver.calls.clear()
    assert runner([x])[0].data_ptr() == address
    assert driver.names() == ["launch"]


def test_tensors_of_tvm_and_of_any_dlpack_package(model, runner, values):
    class Other:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    tensor = tvm.runtime.tensor(values())
    for run in (runner, model._start()):
        for argument in (tensor, Other(values())):
            (y,) = run([argument])
            assert isinstance(y, tvm.runtime.Tensor)
            assert np.array_equal(y.numpy(), model(values())[0])
            (again,) = run([tvm.runtime.tensor(values(3))])
            assert np.array_equal(y.numpy(), model(values())[0])
            assert np.array_equal(again.numpy(), model(values(3))[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_of_torch(torch, dtype, residual, values, runner_of):
    compiled = tf.compile(residual(dtype), "llvm", verify=False)
    x = torch.from_numpy(values()).to(getattr(torch, dtype))
    for run in (runner_of(compiled), compiled._start()):
        (y,) = run([x])
        assert y.dtype == x.dtype and y.shape == SHAPE and torch.isfinite(y).all()


def test_a_cpu_model_takes_and_returns_tensors_of_torch(model, torch, values):
    (y,) = model(torch.from_numpy(values()))
    assert isinstance(y, torch.Tensor) and np.array_equal(y.numpy(), model(values())[0])
    strided = torch.from_numpy(values(2, (1, 9, 9, 8))).permute(0, 3, 1, 2)
    (y,) = model(strided)
    assert np.array_equal(y.numpy(), model(strided.numpy())[0])


# -------------------------------------------------------------------- bad input


def on_both(model, runner):
    return [runner, model._start()]


def test_bad_tensors_are_one_sentence(model, runner, torch):
    good = torch.zeros(SHAPE)
    two = [TensorSpec("x", SHAPE, "float32"), TensorSpec("y", SHAPE, "float32")]
    for run in on_both(model, runner):
        run([good])  # so that the quick way is known
        for bad, error, message in [
            ([], ValueError, "takes 1 inputs"),
            ([good, good], ValueError, "takes 1 inputs"),
            ([good.double()], TypeError, "must be float32, got float64"),
            ([good[:, :4]], ValueError, "must have shape"),
            ([good.to("meta")], ValueError, "meta"),
            ([good.to_sparse()], TypeError, "cannot be read|must be"),
            ([torch.zeros(SHAPE, requires_grad=True)], ValueError, "no gradients"),
            ([object()], TypeError, "must be float32, got object"),
            (["text"], TypeError, "must be float32"),
            ([None], TypeError, "must be float32"),
        ]:
            with pytest.raises(error, match=message):
                run(bad)
        with torch.no_grad():
            (y,) = run([torch.zeros(SHAPE, requires_grad=True)])
        assert np.array_equal(y.numpy(), model(np.zeros(SHAPE, "float32"))[0])
    one = frameworks.TorchTensors(two, tvm.cpu())
    with pytest.raises(TypeError, match=r"'y' is a numpy.ndarray and another a torch.Tensor"):
        frameworks.sort_out(one, two, [good, good.numpy()])


def test_strided_and_misaligned_tensors_are_copied(model, runner, torch, values):
    strided = torch.from_numpy(values(2, (1, 9, 9, 8))).permute(0, 3, 1, 2)
    flat = torch.from_numpy(np.append(0, values(4).ravel()).astype("float32"))[1:].view(SHAPE)
    assert flat.data_ptr() % 64 != 0
    for x in (strided, flat):
        for _ in range(2):
            assert np.array_equal(runner([x])[0].numpy(), model(x.contiguous().numpy())[0])
    with pytest.raises(ValueError, match="takes contiguous tensors"):
        runner.launch([strided], None, None)


# ------------------------------------------------------------- streams and captures


def test_another_stream_waits_for_the_last(model, runner, driver, torch, monkeypatch, values):
    stream = 7
    monkeypatch.setattr(frameworks.TorchTensors, "stream", lambda self: stream)
    x = torch.from_numpy(values()).clone()
    runner([x])
    assert ("launch", 1, 7) in driver.calls
    driver.calls.clear()
    stream = 8
    runner([x])
    assert driver.calls == [("order", 7, 8), ("launch", 1, 8)]
    driver.calls.clear()
    runner([values()])
    assert driver.calls[0][:2] == ("order", 8) and driver.calls[1][0] == "synchronize"


def test_inside_a_foreign_capture_the_kernels_are_launched(
    model, runner, driver, torch, monkeypatch, values
):
    monkeypatch.setattr(frameworks.TorchTensors, "stream", lambda self: 7)
    x = torch.from_numpy(values()).clone()
    runner([x])
    driver.capturing = {7}
    driver.calls.clear()
    found = [runner([x])[0] for _ in range(OUTPUT_SETS + 1)]
    assert set(driver.names()) == {"use"}
    addresses = {y.data_ptr() for y in found}
    del found
    driver.capturing = set()
    assert runner([x])[0].data_ptr() not in addresses  # the foreign graph writes there


def test_launch_runs_on_the_callers_tensors(model, runner, driver, torch, values):
    x, y = torch.from_numpy(values()).clone(), torch.empty(SHAPE)
    driver.capturing = {7}
    assert runner.launch([x], [y], 7)[0] is y
    assert driver.calls == [("use", 7)]
    assert np.array_equal(y.numpy(), model(values())[0])
    assert np.array_equal(runner.launch([x], None, None)[0].numpy(), y.numpy())
    for bad in ([y.double()], [y[:, :4]], [], [y, y]):
        with pytest.raises((TypeError, ValueError)):
            runner.launch([x], bad, None)


def test_threads_take_turns(model, runner, values):
    wrong = []

    def work(seed):
        x, want = values(seed), model(values(seed))[0]
        wrong.extend(i for i in range(20) if not np.array_equal(runner([x])[0], want))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_models_thread_ends_with_it(model, values, runner_of):
    def serving():
        return [t for t in threading.enumerate() if t.name == "tvm_fusion model"]

    gc.collect()
    before = serving()
    made = runner_of(model)
    (new,) = [t for t in serving() if t not in before]
    made([values()])
    del made
    gc.collect()
    new.join(10)
    assert not new.is_alive()
