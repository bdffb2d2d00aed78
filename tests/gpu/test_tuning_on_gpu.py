"""What only a GPU can show of tuning: candidates are checked and timed there, and bad ones cost themselves."""

from __future__ import annotations

import os
import statistics
import subprocess

import pytest
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.registry import spaces

from tvm_fusion.build.library import load_library
from tvm_fusion.compat import relax, tvm
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.groups import group_function, group_module
from tvm_fusion.tuning.build_worker import load_function
from tvm_fusion.tuning.builder import Builder
from tvm_fusion.tuning.kernels import kernel_digest
from tvm_fusion.tuning.local_runner import LocalRunner
from tvm_fusion.tuning.measure import BuildRequest, Built, KernelSource, RunRequest
from tvm_fusion.tuning.reference import References

pytestmark = pytest.mark.gpu


def source_of(make, *shapes, dtype="float16") -> KernelSource:
    """A kernel for this machine's GPU."""
    func = group_function(group_module(shapes, dtype, make))
    func = func.with_attr("tvm_fusion.strategy", "vertical")
    text = tvm.ir.save_json(tvm.IRModule({"main": func}))
    return KernelSource(kernel_digest(func), text, str(parse_target("cuda")))


def dense(rows: int) -> KernelSource:
    """relu(x · w + b)."""

    def make(builder, x, w, b):
        product = builder.emit(relax.op.matmul(x, w))
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(product, b))))

    return source_of(make, (rows, 256), (256, 512), (512,))


@pytest.fixture(scope="module")
def tools():
    """A builder, references and a runner on GPU 0."""
    with Builder() as builder, References() as references, LocalRunner("cuda") as runner:
        yield builder, references, runner


@pytest.fixture(scope="module")
def candidates(tools):
    """Some candidates of a kernel, ready to run."""
    builder, references, _ = tools
    source = dense(512)
    (inputs,) = references.make([source])
    space = spaces(load_function(source.func_json), parse_target(source.target))[0]
    built = builder.build(
        [BuildRequest(source, space.template, d) for d in space.points[0].options[:8]]
    )
    found = [RunRequest(b, inputs, "cuda") for b in built if isinstance(b, Built)]
    assert len(found) >= 4
    return found


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Makes libraries whose kernel is CUDA text of our own in the place of the generated one."""
    source = dense(512)
    folder = tmp_path_factory.mktemp("faulty")

    def make(name: str, body: str) -> Built:
        import tvm_ffi

        from tvm_fusion.build.cuda_source import COMPILE_HOOK
        from tvm_fusion.build.library import export_library

        target = parse_target(source.target)
        scheduled, _ = schedule(load_function(source.func_json), target)
        real = tvm.get_global_func(COMPILE_HOOK)

        def spoiled(code: str) -> bytes:
            # The last brace that opens a kernel is the definition's.
            start = code.index("{", code.rindex("__global__"))
            return bytes(real(f"{code[: start + 1]} {body} {code[start + 1 :]}"))

        tvm_ffi.register_global_func(COMPILE_HOOK, spoiled, override=True)
        try:
            mod = tvm.IRModule({"main": scheduled.with_attr("global_symbol", "main")})
            with tvm.transform.PassContext(opt_level=3, config={"tirx.use_async_copy": True}):
                built = tvm.compile(mod, target=target)
        finally:
            tvm_ffi.register_global_func(COMPILE_HOOK, real, override=True)
        path = folder / f"{name}.so"
        export_library(built, path)
        return Built(path, name)

    return make


def test_candidates_are_right_and_times_repeat(tools, candidates):
    """Medians of two measurements agree within a tenth; the rest of the noise is the device's."""
    runner = tools[2]
    first, second = runner.run(candidates), runner.run(candidates)
    assert {r.verdict for r in first} == {"ok"}
    for one, two in zip(first, second, strict=True):
        a, b = statistics.median(one.samples_us), statistics.median(two.samples_us)
        print(f"{a:8.3f} {b:8.3f} us, {len(one.samples_us)} samples")
        assert 0.5 < a < 1000 and abs(a - b) <= 0.1 * max(a, b)


def test_more_work_takes_longer(tools):
    builder, references, runner = tools
    sources = [dense(rows) for rows in (512, 16384)]
    inputs = references.make(sources)
    built = builder.build([BuildRequest(source) for source in sources])
    results = runner.run([RunRequest(b, i, "cuda") for b, i in zip(built, inputs, strict=True)])
    small, large = (statistics.median(r.samples_us) for r in results)
    assert large > 3 * small


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("return;", "wrong"),
        ("*(volatile int*)0 = 1;", "crashed"),
        ('asm volatile("trap;");', "crashed"),
        ("for (;;) __nanosleep(1000);", "timeout"),
    ],
)
def test_a_bad_kernel_costs_itself(tools, candidates, faulty, monkeypatch, body, verdict):
    runner = tools[2]
    monkeypatch.setattr(runner, "_timeout_s", 15)
    bad = RunRequest(faulty(f"{verdict}-{len(body)}", body), candidates[0].inputs, "cuda")
    before, result, after = runner.run([candidates[0], bad, candidates[0]])
    print(result.message)
    assert [before.verdict, result.verdict, after.verdict] == ["ok", verdict, "ok"]


def test_builders_make_no_context_on_the_gpu(tools, candidates):
    """Sixteen of them would take gigabytes of its memory."""
    builder = tools[0]
    listing = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listing.returncode or not listing.stdout.split():
        pytest.skip("nvidia-smi does not list processes here")
    on_gpu = set(map(int, listing.stdout.split()))
    assert not on_gpu & {worker.pid for worker in builder._pool.workers}


def test_artifacts_run_in_plain_tvm(candidates):
    """The runtime of RPC servers: TVM alone loads the machine code, without a compiler."""
    path = os.environ["PATH"]
    os.environ["PATH"] = ""
    try:
        library = tvm.runtime.load_module(str(candidates[0].built.artifact))
    finally:
        os.environ["PATH"] = path
    assert library.implements_function("main", True)
    assert load_library(candidates[0].built.artifact) is not None
