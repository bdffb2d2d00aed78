"""What ptxas reports about kernels."""

from __future__ import annotations

import pytest

from tvm_fusion.build import ptxas
from tvm_fusion.build.ptxas import KernelResources, kernel_resources, parse_report
from tvm_fusion.errors import CompilerError

REPORT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 16 bytes cumulative stack size, 4608 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 352 bytes cmem[0]
"""


def test_report():
    assert parse_report(REPORT) == {
        "first": KernelResources(registers=64, spill_bytes=20, shared_bytes=4608, stack_bytes=16),
        "second": KernelResources(registers=10, spill_bytes=0, shared_bytes=0, stack_bytes=0),
    }


@pytest.mark.nvcc
def test_kernels_of_a_source():
    source = """
extern "C" __global__ void one(float* x) { __shared__ float s[64]; s[threadIdx.x] = x[0]; __syncthreads();
  x[threadIdx.x] = s[63 - threadIdx.x]; }
extern "C" __global__ void two(float* x) { x[threadIdx.x] = 0.0f; }
"""
    found = kernel_resources(source, "sm_80")
    assert set(found) == {"one", "two"}
    assert found["one"].shared_bytes == 256
    assert found["two"].registers > 0


@pytest.mark.nvcc
def test_rejected_source_gives_its_first_error():
    with pytest.raises(CompilerError, match=r"sm_90: kernels.cu\(1\): error: identifier") as info:
        kernel_resources('extern "C" __global__ void k() { missing(); }', "sm_90")
    assert "\n" not in str(info.value)


def test_no_compiler_says_how_to_get_one(monkeypatch):
    def missing():
        raise RuntimeError("Cannot find CUDA path")

    monkeypatch.setattr(ptxas.shutil, "which", lambda name: None)
    monkeypatch.setattr(ptxas.tvm.support.nvcc, "find_cuda_path", missing)
    monkeypatch.setattr(ptxas.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompilerError, match="tvm_fusion\\[cuda\\]"):
        ptxas.find_nvcc()
