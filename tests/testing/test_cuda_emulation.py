"""CUDA on the CPU: threads, barriers, exchanges, narrow types, and what it detects."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import s_tir, te, tvm
from tvm_fusion.errors import CompilerError
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.cuda_emulation import Launch, emulate, kernels, launch_of, run

HEAD = 'extern "C" __global__ void __launch_bounds__(64) '
ONE_BLOCK = Launch((1, 1, 1), (64, 1, 1))


def source(
    body: str, parameters: str = "float* __restrict__ a_ptr, float* __restrict__ b_ptr"
) -> str:
    """A kernel, declared first as TVM does it."""
    return f"#include <cuda.h>\n{HEAD}k({parameters});\n{HEAD}k({parameters}) {{\n{body}\n}}\n"


def arrays(count: int = 64) -> dict[str, np.ndarray]:
    """An input and an output."""
    return {"a": np.arange(count, dtype="float32"), "b": np.full(count, np.nan, "float32")}


REVERSE = """
  __shared__ alignas(64) float s[64];
  s[(int)threadIdx.x] = a_ptr[(int)threadIdx.x];
  %s
  b_ptr[(int)threadIdx.x] = s[63 - (int)threadIdx.x];
"""


@pytest.mark.parametrize("backward", [False, True])
def test_barriers(backward):
    data = arrays()
    emulate(source(REVERSE % "__syncthreads();"), ONE_BLOCK, data, backward=backward)
    np.testing.assert_array_equal(data["b"], data["a"][::-1])


@pytest.mark.parametrize("backward", [False, True])
def test_a_missing_barrier_shows(backward):
    data = arrays()
    emulate(source(REVERSE % ""), ONE_BLOCK, data, backward=backward, check_races=False)
    assert np.isnan(data["b"]).any()
    with pytest.raises(
        RuntimeError, match=r"without a barrier after thread \d+ read it at line 6: s"
    ):
        emulate(source(REVERSE % ""), ONE_BLOCK, data, backward=backward)


def test_shared_memory_is_fresh_in_every_block():
    body = """
  __shared__ alignas(64) float s[64];
  b_ptr[(int)blockIdx.x * 64 + (int)threadIdx.x] = s[(int)threadIdx.x];
  s[(int)threadIdx.x] = 1.0f;
"""
    data = arrays(128)
    emulate(source(body), Launch((2, 1, 1), (64, 1, 1)), data)
    assert np.isnan(data["b"]).all()


def test_a_barrier_that_not_every_thread_reaches_is_an_error():
    body = "  if ((int)threadIdx.x < 32) { __syncthreads(); }\n  b_ptr[(int)threadIdx.x] = 0.0f;"
    with pytest.raises(RuntimeError, match="not reached by every thread"):
        emulate(source(body), ONE_BLOCK, arrays())


@pytest.mark.parametrize(
    ("call", "lanes"),
    [
        ("__shfl_down_sync(m, v, 4, 32)", lambda i: np.where(i % 32 + 4 < 32, i + 4, i)),
        ("__shfl_up_sync(m, v, 4, 32)", lambda i: np.where(i % 32 >= 4, i - 4, i)),
        ("__shfl_xor_sync(m, v, 5, 32)", lambda i: i ^ 5),
        ("__shfl_sync(m, v, 3, 32)", lambda i: i // 32 * 32 + 3),
        ("__shfl_down_sync(m, v, 4, 8)", lambda i: np.where(i % 8 + 4 < 8, i + 4, i)),
    ],
)
def test_warp_exchanges(call, lanes):
    body = f"""
  float v = a_ptr[(int)threadIdx.x];
  uint m = __activemask();
  b_ptr[(int)threadIdx.x] = {call};
"""
    data = arrays()
    emulate(source(body), ONE_BLOCK, data, backward=True)
    np.testing.assert_array_equal(data["b"], data["a"][lanes(np.arange(64))])


def test_grid_and_block_have_three_dimensions():
    body = """
  int t = ((int)threadIdx.z * 2 + (int)threadIdx.y) * 4 + (int)threadIdx.x;
  b_ptr[((int)blockIdx.y * 2 + (int)blockIdx.x) * 16 + t] = a_ptr[t] + 100.0f * (int)blockIdx.y + (int)blockIdx.x;
"""
    data = arrays()
    emulate(source(body), Launch((2, 2, 1), (4, 2, 2)), data)
    expected = [block // 2 * 100 + block % 2 + t for block in range(4) for t in range(16)]
    np.testing.assert_array_equal(data["b"], np.array(expected, "float32"))


def test_half_rounds_like_numpy():
    body = "  b_ptr[(int)threadIdx.x] = max(a_ptr[(int)threadIdx.x] * __float2half_rn(1.1f), __float2half_rn(0.0f));"
    values = np.linspace(-3, 62000, 64).astype("float16")
    data = {"a": values, "b": np.zeros(64, "float16")}
    emulate(source(body, "half* __restrict__ a_ptr, half* __restrict__ b_ptr"), ONE_BLOCK, data)
    with np.errstate(over="ignore"):
        expected = (values.astype("float32") * np.float32(np.float16(1.1))).astype("float16")
    np.testing.assert_array_equal(data["b"], np.maximum(expected, 0))


def test_bfloat16_rounds_to_nearest_even():
    body = "  b_ptr[(int)threadIdx.x] = a_ptr[(int)threadIdx.x] + a_ptr[0];"
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.linspace(1, 3, 64).astype(ml_dtypes.bfloat16)
    data = {"a": values.view("uint16"), "b": np.zeros(64, "uint16")}
    emulate(
        source(body, "nv_bfloat16* __restrict__ a_ptr, nv_bfloat16* __restrict__ b_ptr"),
        ONE_BLOCK,
        data,
    )
    np.testing.assert_array_equal(data["b"].view(ml_dtypes.bfloat16), values + values[0])


def test_launch_and_run_of_a_scheduled_function():
    data = te.placeholder((6, 50), name="data")
    func = te.create_prim_func([data, te.compute((6, 50), lambda i, j: data[i, j] * 2)])
    sch = s_tir.Schedule(func)
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    row, column = sch.get_loops(block)
    sch.bind(row, "blockIdx.x")
    sch.bind(column, "threadIdx.x")
    scheduled = sch.mod["main"]
    assert launch_of(scheduled) == Launch((6, 1, 1), (50, 1, 1))
    array = np.random.default_rng(0).standard_normal((6, 50)).astype("float32")
    (result,) = run(scheduled, [array], parse_target("cuda:sm_90"))
    np.testing.assert_array_equal(result, array * 2)


def test_two_kernels_have_no_single_launch():
    data = te.placeholder((64,), name="data")
    double = te.compute((64,), lambda i: data[i] * 2)
    func = te.create_prim_func([data, te.compute((32,), lambda i: double[i] + 1)])
    sch = s_tir.Schedule(func)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        sch.bind(sch.get_loops(block)[0], "threadIdx.x")
    with pytest.raises(ValueError, match="one kernel at a time"):
        launch_of(sch.mod["main"])


def test_bad_arguments():
    text = source("")
    assert kernels(text) == ["k"]
    with pytest.raises(ValueError, match="defines the kernels"):
        emulate(text, ONE_BLOCK, arrays(), kernel="other")
    with pytest.raises(ValueError, match="parameter b has no array"):
        emulate(text, ONE_BLOCK, {"a": arrays()["a"]})
    with pytest.raises(ValueError, match="not contiguous"):
        emulate(text, ONE_BLOCK, {**arrays(), "a": arrays(128)["a"][::2]})
    with pytest.raises(CompilerError, match="rejects the kernel"):
        emulate(source("  wmma::fragment f;"), ONE_BLOCK, arrays())


def test_the_real_compiler_is_put_back(monkeypatch):
    def fail(*arguments, **options):
        raise OSError("compile")

    name = "tvm_callback_cuda_compile"
    before = tvm.get_global_func(name)
    data = te.placeholder((4,), name="data")
    func = te.create_prim_func([data, te.compute((4,), lambda i: data[i] * 2)])
    monkeypatch.setattr(cuda_emulation.tvm, "compile", fail)
    with pytest.raises(OSError, match="compile"):
        cuda_emulation.cuda_source(func, parse_target("cuda:sm_90"))
    assert tvm.get_global_func(name).same_as(before)


def test_fast_math_is_as_wrong_as_on_a_gpu():
    """``--use_fast_math``: powers of negative numbers are NaN, tanh has 10 bits, sines lose their turns."""
    x = np.array([-1.5, 0.3, 700.0, 0.0], "float32")
    data = {"a": x, "b": np.zeros(4, "float32")}
    body = """
  b_ptr[0] = powf(a_ptr[0], 2.0f); b_ptr[1] = tanhf(a_ptr[1]); b_ptr[2] = sinf(a_ptr[2]);
  b_ptr[3] = max(a_ptr[3], -CUDART_INF_F);
"""
    emulate(source(body), Launch((1, 1, 1), (1, 1, 1)), data)
    result = data["b"]
    assert np.isnan(result[0])
    assert 1e-6 < abs(result[1] - np.tanh(0.3)) < 2**-11
    assert 1e-6 < abs(result[2] - np.sin(700.0)) < 1e-3
    assert result[3] == 0
