"""Machine code that travels with a library: made where there is no GPU, found where there is one."""

from __future__ import annotations

import types

import pytest

import tvm_fusion as tf
from tvm_fusion.build import library, machine_code
from tvm_fusion.build.cuda_source import COMPILE_HOOK
from tvm_fusion.build.machine_code import cubins_of, digest, fits, known_code
from tvm_fusion.compat import tvm
from tvm_fusion.errors import CompilerError, InvalidModelError


@pytest.mark.parametrize(
    ("arch", "device", "expected"),
    [
        ("sm_90", "9.0", True),
        ("sm_90a", "9.0", True),
        ("sm_80", "8.6", True),
        ("sm_86", "8.0", False),
        ("sm_80", "9.0", False),
        ("sm_100a", "10.3", False),
        ("sm_100", "10.3", True),
        ("", "9.0", False),
        ("sm_90", "", False),
    ],
)
def test_which_gpus_code_runs_on(arch, device, expected):
    assert fits(arch, device) is expected


def test_known_sources_are_not_compiled_again():
    def asked(source):
        return bytes(tvm.get_global_func(COMPILE_HOOK)(source))

    real = tvm.get_global_func(COMPILE_HOOK)
    with known_code({digest("one"): b"\x7fELF one"}):
        assert asked("one") == b"\x7fELF one"
        with pytest.raises(RuntimeError):
            asked("another: no legal source")
    assert tvm.get_global_func(COMPILE_HOOK).same_as(real)


@pytest.fixture
def gpu(monkeypatch):
    """Let the loader see a GPU."""
    found = types.SimpleNamespace(exist=True, compute_version="9.0")
    monkeypatch.setattr(library, "tvm", types.SimpleNamespace(cuda=lambda index: found))
    return found


@pytest.mark.nvcc
@pytest.mark.skipif(tvm.cuda(0).exist, reason="with a GPU, TVM keeps machine code itself")
def test_a_library_for_cuda_brings_its_machine_code(tmp_path, residual, gpu):
    compiled = tf.compile(residual(), "cuda:sm_90", verify=False)
    path = tmp_path / "model.so"
    compiled.export(path)
    (source,) = compiled.cuda_sources()
    # The library holds the same text, which is what TVM will ask for.
    assert source.encode() in path.read_bytes()
    found = library._cubins(path)
    assert list(found) == [digest(source)] and found[digest(source)].startswith(b"\x7fELF")
    gpu.compute_version = "8.0"
    assert library._cubins(path) == {}


def test_a_library_for_the_cpu_brings_none(tmp_path, model, gpu):
    path = tmp_path / "model.so"
    model.export(path)
    assert library._cubins(path) == {}


@pytest.mark.nvcc
def test_equal_sources_are_compiled_once(monkeypatch):
    asked = []
    real = machine_code.assemble
    monkeypatch.setattr(
        machine_code, "assemble", lambda source, arch: asked.append(source) or real(source, arch)
    )
    kernel = 'extern "C" __global__ void k(float* x) { *x = 1.0f; }'
    assert len(cubins_of([kernel, kernel], "sm_80")) == len(asked) == 1
    with pytest.raises(CompilerError, match="nvcc rejects"):
        cubins_of(["__global__ void k( {"], "sm_80")


def test_damaged_machine_code_is_refused(tmp_path, model):
    path = tmp_path / "model.so"
    library.export_library(model._library, path, {digest("x"): b"code" * 10}, "sm_90")
    assert tf.load(path).signature == model.signature
    whole = bytearray(path.read_bytes())
    whole[whole.rindex(b"codecode")] ^= 1
    # Another file: the first one is loaded, and the process would fall over its own code when it ends.
    path = tmp_path / "damaged.so"
    path.write_bytes(bytes(whole))
    with pytest.raises(InvalidModelError, match="damaged"):
        tf.load(path)
