"""What only a GPU can show of running a model: replays, streams, captures, and what a call costs.

``pytest -q -s tests/gpu/test_runner_on_gpu.py`` prints the times of calls; with the environment
variable ``OUT`` they are also written to ``runner_overhead.json`` in that folder.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.build.executable import LoadedModel
from tvm_fusion.build.graph_runner import OUTPUT_SETS, GraphRunner
from tvm_fusion.compat import relax, tvm
from tvm_fusion.testing.modules import ModuleBuilder

pytestmark = pytest.mark.gpu

SHAPE = (1, 16, 40, 40)


def stack(blocks, dtype="float32"):
    """Residual blocks: two kernels and more each, with intermediate results between them."""
    b = ModuleBuilder(dtype=dtype)
    x = b.input("x", SHAPE)
    for i in range(blocks):
        y = b.relu(f"r{i}", b.bias(f"b{i}", b.conv(f"c{i}", x, 16)))
        x = b.relu(f"s{i}", b.add(f"a{i}", b.bias(f"d{i}", b.conv(f"e{i}", y, 16)), x))
    return b.finish(x)


def sorting():
    """Kernels that need scratch memory beside TVM's plan, left to TVM's own schedules."""
    b = ModuleBuilder()
    x = b.input("x", (32, 256))
    total = b.op("cumsum", relax.op.cumsum(x, axis=1))
    return b.finish(b.op("sort", relax.op.sort(total, axis=-1)))


@pytest.fixture(scope="module")
def model():
    return tf.compile(stack(3), "cuda", verify=False)


@pytest.fixture(scope="module")
def other():
    return tf.compile(stack(4), "cuda", verify=False)


@pytest.fixture(scope="module")
def plain(model):
    """The same kernels, run by TVM's VM."""
    return LoadedModel(model._library, model.signature, cuda_graph=False)


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return module


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def values(seed=0, shape=SHAPE, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same(got, want):
    return np.array_equal(np.asarray(got), np.asarray(want))


def test_the_model_runs_as_a_graph(model):
    assert isinstance(model._start(), GraphRunner) and model.cuda_graph


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_replay_equals_an_uncaptured_run(dtype):
    compiled = tf.compile(stack(2, dtype), "cuda", verify=False)
    uncaptured = LoadedModel(compiled._library, compiled.signature, cuda_graph=False)
    from tvm_fusion.build.inputs import numpy_dtype

    for seed in range(3):
        x = values(seed).astype(numpy_dtype(dtype))
        assert same(compiled(x)[0], uncaptured(x)[0])
    assert compiled.cuda_graph


def test_an_exported_model(model, plain, tmp_path):
    path = tmp_path / "model.so"
    model.export(path)
    assert same(tf.load(path)(values())[0], plain(values())[0])
    assert same(tf.load(path, cuda_graph=False)(values())[0], plain(values())[0])


def test_torch_tensors(model, plain, torch):
    want = plain(values())[0]
    x = torch.from_numpy(values()).cuda()
    for _ in range(4):
        (y,) = model(x)
        assert y.is_cuda and same(y.cpu(), want)
    (y,) = model(torch.from_numpy(values()))
    assert not y.is_cuda and same(y, want)
    (y,) = plain(x)
    assert y.is_cuda and same(y.cpu(), want)


def test_torch_tensors_of_any_layout(model, plain, torch):
    x = torch.from_numpy(values(1, (1, 40, 40, 16))).cuda().permute(0, 3, 1, 2)
    flat = torch.zeros(x.numel() + 1, device="cuda")[1:].view(SHAPE).copy_(x)
    want = plain(x.cpu().contiguous().numpy())[0]
    for argument in (x, flat):
        assert same(model(argument)[0].cpu(), want)
        assert same(plain(argument)[0].cpu(), want)


def test_cupy_arrays(model, plain, cupy):
    want = plain(values())[0]
    x = cupy.asarray(values())
    for _ in range(4):
        (y,) = model(x)
        assert isinstance(y, cupy.ndarray) and same(y.get(), want)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        (y,) = model(x)
        stream.synchronize()
    del stream  # destroyed: the next call must not touch it
    gc.collect()
    assert same(model(x)[0].get(), want)
    assert same(model(cupy.asfortranarray(x))[0].get(), want)


def test_tensors_of_tvm_and_jax(model, plain):
    want = plain(values())[0]
    (y,) = model(tvm.runtime.tensor(values(), tvm.cuda(0)))
    assert same(y.numpy(), want)
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    (y,) = model(jax.numpy.asarray(values()))
    assert same(y.numpy(), want) and same(jax.numpy.from_dlpack(y), want)


def test_changed_buffers(model, plain, torch):
    kept = [torch.from_numpy(values(seed)).cuda() for seed in range(20)]
    for _ in range(3):
        for seed, x in enumerate(kept):
            assert same(model(x)[0].cpu(), plain(values(seed))[0])
    for seed in range(20, 40):
        x = torch.from_numpy(values(seed)).cuda()  # the allocator hands the same memory out again
        assert same(model(x)[0].cpu(), plain(values(seed))[0])
        del x


def test_changed_values_in_the_same_buffer(model, plain, torch):
    x = torch.empty(SHAPE, device="cuda")
    for seed in range(10):
        x.copy_(torch.from_numpy(values(seed)))
        assert same(model(x)[0].cpu(), plain(values(seed))[0])


def test_results_stay_while_they_are_held(model, plain, torch):
    x, held = torch.empty(SHAPE, device="cuda"), []
    for seed in range(OUTPUT_SETS + 4):
        x.copy_(torch.from_numpy(values(seed)))
        held.append(model(x)[0])
    for seed, y in enumerate(held):
        assert same(y.cpu(), plain(values(seed))[0])


def test_a_result_as_the_next_input(model, plain, torch):
    y, want = torch.from_numpy(values()).cuda(), values()
    for _ in range(6):
        (y,), (want,) = model(y), plain(want)
        assert same(y.cpu(), want)


def test_two_models_on_two_streams(model, other, torch):
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [torch.from_numpy(values(seed)).cuda() for seed in range(2)]
    wants = [m(x)[0].clone() for m, x in zip((model, other), inputs, strict=True)]
    torch.cuda.synchronize()
    bad = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    for _ in range(300):
        for k, one in enumerate((model, other)):
            with torch.cuda.stream(streams[k]):
                bad[k] += (one(inputs[k])[0] != wants[k]).sum()
    torch.cuda.synchronize()
    assert [int(b) for b in bad] == [0, 0]


def test_two_models_with_scratch_memory_on_two_streams(torch):
    x = torch.from_numpy(values(0, (32, 256))).cuda()
    models = [tf.compile(sorting(), "cuda", verify=False) for _ in range(2)]
    want = x.cumsum(1).sort(-1).values
    streams = [torch.cuda.Stream() for _ in models]
    torch.cuda.synchronize()
    for _ in range(50):
        for one, stream in zip(models, streams, strict=True):
            with torch.cuda.stream(stream):
                (y,) = one(x)
                assert torch.allclose(y, want, atol=1e-4)


def test_one_model_on_two_streams(model, plain, torch):
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [torch.from_numpy(values(seed)).cuda() for seed in range(2)]
    wants = [torch.from_numpy(plain(values(seed))[0]).cuda() for seed in range(2)]
    torch.cuda.synchronize()
    bad = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    for _ in range(200):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                bad[k] += (model(inputs[k])[0] != wants[k]).sum()
        assert same(model(values(3))[0], plain(values(3))[0])
    torch.cuda.synchronize()
    assert [int(b) for b in bad] == [0, 0]


def test_threads(model, plain, torch):
    wrong = []

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            x, want = torch.from_numpy(values(seed)).cuda(), plain(values(seed))[0]
            wrong.extend(i for i in range(50) if not same(model(x)[0].cpu(), want))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("warm", [True, False], ids=["called before", "first call"])
def test_inside_a_capture_of_torch(plain, torch, warm):
    """A model that is first called inside a capture loads and allocates on its own thread."""
    model = tf.compile(stack(3), "cuda", verify=False)
    x = torch.from_numpy(values()).cuda()
    if warm:
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y,) = model(x * 1)
        z = model(y)[0] + 1
    for seed in range(3):
        x.copy_(torch.from_numpy(values(seed)))
        graph.replay()
        model(torch.zeros_like(x))  # must not touch what the graph uses
        want = plain(plain(values(seed))[0])[0] + np.float32(1)
        assert same(z.cpu(), want)


def test_launches_in_a_capture_of_torch(model, plain, torch):
    """As the benchmarks do: twenty copies in one graph, on the caller's tensors."""
    x = torch.from_numpy(values()).cuda()
    y = torch.empty(SHAPE, device="cuda")
    model.launch([x], [y])
    assert same(y.cpu(), plain(values())[0])
    y.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            model.launch([x], [y])
    x.copy_(torch.from_numpy(values(1)))
    graph.replay()
    assert same(y.cpu(), plain(values(1))[0])


def test_launch_on_a_given_stream(model, plain, torch):
    stream = torch.cuda.Stream()
    x = torch.from_numpy(values()).cuda()
    y = torch.zeros(SHAPE, device="cuda")
    torch.cuda.synchronize()
    model.launch([x], [y], stream=stream.cuda_stream)
    stream.synchronize()
    assert same(y.cpu(), plain(values())[0])
    assert same(model.launch([x])[0].cpu(), plain(values())[0])


def test_bad_tensors_are_errors(model, torch):
    good = torch.zeros(SHAPE, device="cuda")
    for bad, error in [
        ((good.half(),), TypeError),
        ((good[:, :4],), ValueError),
        ((good, good), ValueError),
        ((), ValueError),
        ((good.to_sparse(),), TypeError),
        ((good.requires_grad_(),), ValueError),
    ]:
        with pytest.raises(error):
            model(*bad)
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match="is on"):
            model(torch.zeros(SHAPE, device="cuda:1"))


def test_a_model_is_dropped_while_it_runs(plain, torch):
    x = torch.from_numpy(values()).cuda()
    for _ in range(3):
        model = tf.compile(stack(3), "cuda", verify=False)
        for _ in range(20):
            (y,) = model(x)
        del model
        gc.collect()
        assert same(y.cpu(), plain(values())[0])


def test_another_gpu_stays_current(model, plain, torch):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    x = torch.from_numpy(values()).cuda(0)
    with torch.cuda.device(1):
        (y,) = model(x)
        torch.cuda.synchronize(0)
        assert torch.cuda.current_device() == 1
        assert torch.zeros(1, device="cuda").device.index == 1
    assert same(y.cpu(), plain(values())[0])


def test_what_a_call_costs(model, plain, torch):
    """Microseconds of the host per call, while the GPU keeps up or falls behind."""
    small = ModuleBuilder()
    x = small.input("x", (64,))
    one = tf.compile(small.finish(small.relu("r", x)), "cuda", verify=False)
    tiny, big = torch.zeros(64, device="cuda"), torch.from_numpy(values()).cuda()
    out = torch.empty(64, device="cuda")
    one(tiny), model(big), plain(big)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.launch([tiny], [out])
    stepped = LoadedModel(one._library, one.signature, cuda_graph=False)
    found = {
        "torch_graph_replay_1_kernel": per_call(torch, graph.replay),
        "model_call_1_kernel": per_call(torch, lambda: one(tiny)),
        "model_launch_1_kernel": per_call(torch, lambda: one.launch([tiny], [out])),
        "vm_call_1_kernel": per_call(torch, lambda: stepped(tiny)),
        "torch_relu": per_call(torch, lambda: torch.relu(tiny)),
        "model_call_3_blocks": per_call(torch, lambda: model(big)),
        "model_launch_3_blocks": per_call(torch, lambda: model.launch([big])),
        "vm_call_3_blocks": per_call(torch, lambda: plain(big)),
    }
    fresh = [torch.zeros(64, device="cuda") for _ in range(64)]
    turns = iter(range(10**9))
    found["model_call_changed_buffer"] = per_call(torch, lambda: one(fresh[next(turns) % 64]))
    print("\n" + "\n".join(f"{name:32} {us:8.2f} us" for name, us in found.items()))
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "runner_overhead.json").write_text(json.dumps(found, indent=1))
    assert found["model_call_1_kernel"] < found["torch_graph_replay_1_kernel"] + 25


def per_call(torch, call, count=2000):
    """Median microseconds per call over rounds of calls, each round waited for."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / count * 1e6)
    return float(np.median(times))
