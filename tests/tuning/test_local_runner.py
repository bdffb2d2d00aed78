"""Measuring here: right candidates are timed, bad ones cost themselves."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tvm_fusion.build.library import export_library
from tvm_fusion.compat import relax, tirx, tvm
from tvm_fusion.tuning.build_worker import load_function
from tvm_fusion.tuning.local_runner import LocalRunner, device_lock, device_name
from tvm_fusion.tuning.measure import BuildRequest, Built, RunRequest


@pytest.fixture(scope="module")
def runner():
    """A runner on this machine's CPU."""
    with LocalRunner("llvm") as runner:
        yield runner


def calling(func: tirx.PrimFunc, name: str, *arguments) -> tirx.PrimFunc:
    """The function after a call of a C function."""
    call = tirx.Evaluate(tirx.call_extern("int32", name, *arguments))
    return func.with_body(tirx.SeqStmt([call, func.body]))


def export(func: tirx.PrimFunc, path: Path) -> Built:
    """A library of a function as it is."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    export_library(tvm.compile(mod, target="llvm"), path)
    return Built(path, path.stem)


@pytest.fixture
def bad(kernels, tmp_path):
    """Candidates of the dense kernel that crash, hang and compute something else, by name."""
    func = load_function(kernels.dense().func_json)
    other = kernels.of(
        [(32, 64), (64, 128), (128,)],
        "float32",
        lambda b, x, w, c: b.emit(relax.op.add(b.emit(relax.op.matmul(x, w)), c)),
    )
    return {
        "crashes": export(calling(func, "raise", 11), tmp_path / "crashes.so"),
        "hangs": export(calling(func, "pause"), tmp_path / "hangs.so"),
        "wrong": export(load_function(other.func_json), tmp_path / "wrong.so"),
        "missing": Built(tmp_path / "missing.so", "missing"),
    }


def test_good_candidates_are_timed_in_order(kernels, builder, references, runner):
    sources = [kernels.dense(), kernels.dense(rows=2048)]
    inputs = references.make(sources)
    built = builder.build([BuildRequest(source) for source in sources])
    order = [0, 1, 0]
    results = runner.run([RunRequest(built[i], inputs[i], "llvm") for i in order])
    assert [r.verdict for r in results] == ["ok"] * 3
    assert all(len(r.samples_us) >= 3 and min(r.samples_us) > 0 for r in results)
    # One has 64 times the work of the other, and what else runs on the machine only ever adds to a time.
    small, large, again = (min(r.samples_us) for r in results)
    assert large > 2 * small and large > 2 * again


def test_each_bad_candidate_costs_itself_and_is_named(
    kernels, builder, references, runner, bad, monkeypatch
):
    source = kernels.dense()
    (inputs,), (good,) = references.make([source]), builder.build([BuildRequest(source)])
    monkeypatch.setattr(runner, "_timeout_s", 5)
    built = [b for made in bad.values() for b in (good, made)]
    results = runner.run([RunRequest(b, inputs, "llvm") for b in built])
    assert [r.verdict for r in results[::2]] == ["ok"] * 4
    crashed, hung, wrong, missing = results[1::2]
    assert (crashed.verdict, crashed.message) == ("crashed", "died of SIGSEGV")
    assert (hung.verdict, hung.message) == ("timeout", "took more than 5 s")
    assert wrong.verdict == "wrong" and wrong.message.startswith("error ")
    assert missing.verdict == "error" and "does not exist" in missing.message
    assert all(not r.samples_us for r in results[1::2])


def test_an_output_that_is_not_written_is_wrong(kernels, references, runner, tmp_path):
    """A library that returns at once leaves what was there: never the last candidate's result."""
    source = kernels.dense()
    (inputs,) = references.make([source])
    func = load_function(source.func_json)
    idle = export(func.with_body(tirx.Evaluate(tirx.const(0, "int32"))), tmp_path / "idle.so")
    (result,) = runner.run([RunRequest(idle, inputs, "llvm")])
    assert result.verdict == "wrong" and "nan" in result.message


def test_a_permuted_constant_reaches_the_kernel_permuted(kernels, references, runner, tmp_path):
    inputs = references.make([kernels.dense()])[0]

    def make(builder, x, w, b):
        product = builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(w))))
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(product, b))))

    func = load_function(kernels.of([(32, 64), (128, 64), (128,)], "float32", make).func_json)
    plain = export(func, tmp_path / "packed.so")
    packed = dataclasses.replace(plain, packed=((1, (1, 0)),))
    good, bad = runner.run([RunRequest(b, inputs, "llvm") for b in (packed, plain)])
    assert good.verdict == "ok" and bad.verdict in ("error", "wrong")


def test_one_process_at_a_time_has_a_device(tmp_path):
    code = (
        "import sys, time, pathlib\n"
        "from tvm_fusion.tuning.local_runner import device_lock\n"
        "with device_lock('gpu-0', pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True); time.sleep(3600)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    held = threading.Event()

    def wait():
        with device_lock("gpu-0", tmp_path):
            held.set()

    with holder:
        assert holder.stdout.readline() == "held\n"
        with device_lock("gpu-1", tmp_path):
            pass  # another device is free
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not held.wait(0.5)
        holder.kill()  # the lock goes with its holder
        assert held.wait(60)
        waiter.join()


def test_devices_are_named_alike_in_all_processes(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [device_name("cuda", n) for n in (0, 3)] == ["gpu-0", "gpu-3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8f1e")
    assert [device_name("cuda", n) for n in (0, 1)] == ["gpu-3", "gpu-GPU-8f1e"]
    assert device_name("llvm", 0) == "cpu"
