"""CUDA on the CPU: each thing that is checked, with a kernel that does it right beside one that does not."""

from __future__ import annotations

import numpy as np
import pytest
from tvm_fusion.schedules.cuda.tensor_core.device_code import SOURCES

from tvm_fusion.errors import CompilerError
from tvm_fusion.testing._cuda_device import device_functions
from tvm_fusion.testing.cuda_emulation import Launch, _clusters, emulate, sample_blocks

PARAMETERS = "float* __restrict__ a_ptr, float* __restrict__ b_ptr"
HEAD = f'extern "C" __global__ void __launch_bounds__(64) k({PARAMETERS}) {{\n  int t = (int)threadIdx.x;\n'


def run(body: str, *, before: str = "", shared: int = 0, threads: int = 64, **options):
    """Run a body on 64 numbers; the result, and what was written."""
    data = {"a": np.arange(64, dtype="float32"), "b": np.full(64, np.nan, "float32")}
    launch = Launch((1, 1, 1), (threads, 1, 1), shared)
    written = emulate(f"{before}{HEAD}{body}\n}}\n", launch, data, **options)
    return data["b"], written["b"]


DYNAMIC = "  extern __shared__ __align__(64) uchar m[];\n"
STATIC = "  __shared__ alignas(64) float s[64];\n"
LOCAL = "  alignas(64) float v[4];\n"

#: What a kernel may do, the same done wrong, and the error.
CASES = {
    "load": ("b_ptr[t] = a_ptr[t];", "b_ptr[t] = a_ptr[t + 1];", "a read out of range: byte 256"),
    "far load": (
        "b_ptr[t] = a_ptr[t];",
        "b_ptr[t] = a_ptr[t - 1000000];",
        "a read out of range: byte -",
    ),
    "store": (
        "b_ptr[t] = 1.0f;",
        "b_ptr[t * 2] = 1.0f;",
        "b written out of range: byte [0-9]+ of 256",
    ),
    "wide load": (
        "*(float4*)(b_ptr + t / 4 * 4) = *(float4*)(a_ptr + t / 4 * 4);",
        "*(float4*)(b_ptr + t / 4 * 4) = *(float4*)(a_ptr + (t & 1));",
        "not aligned to 16 bytes",
    ),
    "wide store": (
        "*(float2*)(b_ptr + t / 2 * 2) = make_float2(1.0f, 2.0f);",
        "*(float2*)(b_ptr + t) = make_float2(1.0f, 2.0f);",
        "not aligned to 8 bytes",
    ),
    "static shared memory": (
        STATIC + "s[t] = 1.0f; b_ptr[t] = s[t];",
        STATIC + "s[t + 1] = 1.0f; b_ptr[t] = s[t + 1];",
        "index 64 is out of range|byte 256 of s written, which is out of range",
    ),
    "cast shared memory": (
        STATIC + "*(float*)(s + t) = 1.0f; b_ptr[t] = 2.0f;",
        STATIC + "*(float*)(s + t + 1) = 1.0f; b_ptr[t] = 2.0f;",
        "byte 256 of s written, which is out of range",
    ),
    "dynamic shared memory": (
        DYNAMIC + "((float*)m)[t] = 1.0f; b_ptr[t] = ((float*)m)[t];",
        DYNAMIC + "((float*)m)[t + 1] = 1.0f; b_ptr[t] = ((float*)m)[t + 1];",
        "byte 256 of dynamic shared memory written, which is out of range",
    ),
    "local array": (
        LOCAL + "for (int i = 0; i < 4; ++i) v[i] = a_ptr[t]; b_ptr[t] = v[t & 3];",
        LOCAL + "for (int i = 0; i < 5; ++i) v[i] = a_ptr[t]; b_ptr[t] = v[t & 3];",
        "index 4 is out of range of 'float",
    ),
    "read before a write": (
        STATIC + "s[t] = 1.0f; __syncthreads(); if (t < 32) b_ptr[t] = s[t];\n"
        "__syncthreads(); if (t >= 32) s[t - 32] = 2.0f;",
        STATIC + "s[t] = 1.0f; __syncthreads(); if (t < 32) b_ptr[t] = s[t];\n"
        "if (t >= 32) s[t - 32] = 2.0f;",
        "written without a barrier after thread [0-9]+ read|read without a barrier after thread",
    ),
    "read by a warp before a write": (
        STATIC + "s[t] = 1.0f; __syncthreads(); b_ptr[t] = s[t / 32];\n"
        "__syncthreads(); s[t] = 2.0f;",
        STATIC + "s[t] = 1.0f; __syncthreads(); b_ptr[t] = s[t / 32];\n"
        "__shfl_sync(0xffffffffu, t, 0); s[t] = 2.0f;",
        "written without a barrier after warp [0-9] read|read without a barrier after thread",
    ),
    "write before a read": (
        STATIC + "s[t] = 1.0f; __syncthreads(); b_ptr[t] = s[t ^ 32];",
        STATIC + "s[t] = 1.0f; b_ptr[t] = s[t ^ 32];",
        "without a barrier after thread",
    ),
    "two writes": (
        STATIC + "if (t < 32) s[t] = 1.0f; __syncthreads();\nif (t >= 32) s[t - 32] = 2.0f;",
        STATIC + "s[t & 31] = 2.0f;",
        "written without a barrier after thread",
    ),
    "within a warp": (
        STATIC + "s[t] = 1.0f; __syncwarp(); b_ptr[t] = s[t ^ 1];",
        STATIC + "s[t] = 1.0f; b_ptr[t] = s[t ^ 1];",
        "without a barrier after thread",
    ),
    "a barrier of the warp is none of the block": (
        STATIC + "s[t] = 1.0f; __syncwarp(); b_ptr[t] = s[t ^ 31];",
        STATIC + "s[t] = 1.0f; __syncwarp(); b_ptr[t] = s[t ^ 32];",
        "without a barrier after thread",
    ),
    "atomics": (
        STATIC + "if (t == 0) s[0] = 0.0f; __syncthreads();\n"
        "atomicAdd(s, 1.0f); __syncthreads(); b_ptr[t] = s[0];",
        STATIC + "if (t == 0) s[0] = 0.0f; __syncthreads();\n"
        "s[0] += 1.0f; __syncthreads(); b_ptr[t] = s[0];",
        "without a barrier after thread",
    ),
    "exchange": (
        "b_ptr[t] = __shfl_xor_sync(0xffffffffu, a_ptr[t], 1);",
        "if (t < 16) b_ptr[t] = __shfl_xor_sync(0xffffffffu, a_ptr[t], 1);\n__syncthreads();",
        r"__shfl_xor_sync is not reached by every thread: thread \(\d+, 0, 0\) waits at a barrier",
    ),
    "part of a warp": (
        "if (t < 16) b_ptr[t] = __shfl_xor_sync(0xffffu, a_ptr[t], 1);",
        "if (t < 16) b_ptr[t] = __shfl_xor_sync(0xffu, a_ptr[t], 1);",
        "the lane is not in its own mask",
    ),
    "different instructions": (
        "float v = __shfl_sync(0xffffffffu, a_ptr[t], 0);\nb_ptr[t] = v;",
        "float v;\nif (t & 1) v = __shfl_sync(0xffffffffu, a_ptr[t], 0);\n"
        "else v = __shfl_sync(0xffffffffu, a_ptr[t], 1);\nb_ptr[t] = v;",
        "lanes of a warp meet at different instructions",
    ),
    "barriers": (
        "if (t >= 0) {\n__syncthreads(); }\nb_ptr[t] = 0.0f;",
        "if (t < 32) {\n__syncthreads(); } else {\n__syncthreads(); }\nb_ptr[t] = 0.0f;",
        "not reached by every thread: thread .* waits at another one",
    ),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_right_is_not_reported_and_wrong_is(name, backward):
    right, wrong, message = CASES[name]
    run(right, shared=256, backward=backward)
    with pytest.raises(RuntimeError, match=message):
        run(wrong, shared=256, backward=backward)


def test_a_kernel_runs_after_one_that_failed():
    with pytest.raises(RuntimeError):
        run("b_ptr[t] = a_ptr[t + 1];")
    result, _ = run("b_ptr[t] = a_ptr[t];")
    np.testing.assert_array_equal(result, np.arange(64))


def test_what_was_written():
    result, written = run("if (t % 3 == 0) b_ptr[t] = a_ptr[t] / 0.0f - a_ptr[t] / 0.0f;")
    np.testing.assert_array_equal(written, np.arange(64) % 3 == 0)
    assert np.isnan(result).all()  # a written NaN counts as written


def test_variables_start_with_nan():
    body = LOCAL + "if (t & 1) for (int i = 0; i < 4; ++i) v[i] = 1.0f;\nb_ptr[t] = v[t / 2 & 3];"
    result, _ = run(body)
    np.testing.assert_array_equal(np.isnan(result), np.arange(64) % 2 == 0)


def test_dynamic_shared_memory_needs_a_size():
    body = DYNAMIC + "((float*)m)[t] = 1.0f;"
    run(body, shared=256)
    with pytest.raises(ValueError, match="dynamic shared memory"):
        run(body)
    with pytest.raises(ValueError, match="more than is emulated"):
        run(body, shared=1 << 21)


def test_exchanges_in_a_block_of_part_of_a_warp():
    result, _ = run("b_ptr[t] = __shfl_down_sync(__activemask(), a_ptr[t], 4, 8);", threads=16)
    lanes = np.arange(16)
    np.testing.assert_array_equal(result[:16], np.where(lanes % 8 < 4, lanes + 4, lanes))


def test_votes():
    result, _ = run(
        "b_ptr[t] = __popc(__ballot_sync(0xffffffffu, t % 3 == 0))\n"
        "  + 100 * __any_sync(0xffffffffu, t == 40) + 1000 * __all_sync(0xffffffffu, t < 32);"
    )
    np.testing.assert_array_equal(result, [1011] * 32 + [111] * 32)


def test_fast_and_narrow_arithmetic():
    result, _ = run(
        "float x = a_ptr[t] * 0.01f + 0.5f;\n"
        "half2 h = __hfma2(__floats2half2_rn(x, x), __float2half2_rn(2.0f), __half2half2(__float2half(1.0f)));\n"
        "uint packed = __pack_half2(h.x, h.y);\n"
        "b_ptr[t] = __expf(__logf(x)) + rsqrtf(x) * x / __fdividef(x, 2.0f)\n"
        "  + __high2float(*(half2*)&packed) + __ldg(a_ptr + t) + fmaf(x, x, __frcp_rn(x));"
    )
    x = np.arange(64) * 0.01 + 0.5
    expected = x + 2 / np.sqrt(x) + (2 * x + 1) + np.arange(64) + x * x + 1 / x
    np.testing.assert_allclose(result, expected, atol=2e-3)


CLUSTER = """  extern __shared__ __align__(64) uchar m[];
  int rank = (int)blockIdx.x & 1;
  tvmf_cluster_begin();
  tvmf_cluster_wait();
  tvmf_store_cluster_4(m, t * 4, a_ptr[t] + 100 * rank, rank ^ 1);
  tvmf_cluster_arrive();
  tvmf_cluster_wait();
  b_ptr[(int)blockIdx.x * 64 + t] = ((float*)m)[t];
  /* end */"""
CLUSTER_FAULTS = {
    "no start": ("tvmf_cluster_begin();\n  tvmf_cluster_wait();", "", "may not have started"),
    "no wait": ("tvmf_cluster_arrive();\n  tvmf_cluster_wait();", "", "may have ended"),
    "arrival alone": (
        "tvmf_cluster_arrive();\n  tvmf_cluster_wait();",
        "tvmf_cluster_arrive();",
        "may end before another block|may have ended|without a barrier of the cluster",
    ),
    "no arrival": ("tvmf_cluster_arrive();", "", "barrier.cluster.wait without an arrive"),
    "two arrivals": (
        "tvmf_cluster_arrive();",
        "tvmf_cluster_arrive(); tvmf_cluster_arrive();",
        "arrive without a wait",
    ),
    "part of the threads": (
        "tvmf_cluster_arrive();\n  tvmf_cluster_wait();",
        "if (t < 32 || rank) {\ntvmf_cluster_arrive();\ntvmf_cluster_wait();\n} else\n__syncthreads();",
        "is not reached by every thread",
    ),
    "another place": (
        "t * 4, a_ptr",
        "t * 4 + 4, a_ptr",
        "byte 256 of dynamic shared memory written, which is out of",
    ),
    "no such block": ("rank ^ 1", "rank + 1", "a cluster of 2 blocks has none of number 2"),
    "written again": (
        "/* end */",
        "tvmf_store_cluster_4(m, t * 4, 0.0f, rank ^ 1);\ntvmf_cluster_arrive();\ntvmf_cluster_wait();",
        "without a barrier of the cluster after",
    ),
}


def run_clusters(body: str, backward: bool = False, blocks: list[int] | None = None) -> np.ndarray:
    """Run 4 blocks, pairs of which form clusters."""
    data = {"a": np.arange(64, dtype="float32"), "b": np.full(256, np.nan, "float32")}
    source = "".join(SOURCES.values()) + HEAD + body + "\n}\n"
    launch = Launch((4, 1, 1), (64, 1, 1), 256, (2, 1, 1))
    emulate(source, launch, data, backward=backward, blocks=blocks)
    return data["b"].reshape(4, 64)


@pytest.mark.parametrize("backward", [False, True])
def test_blocks_of_a_cluster_reach_each_other(backward):
    expected = np.arange(64) + 100 * np.array([[1], [0], [1], [0]])
    np.testing.assert_array_equal(run_clusters(CLUSTER, backward), expected)
    result = run_clusters(CLUSTER, backward, blocks=[3])
    np.testing.assert_array_equal(result[2:], expected[2:])
    assert np.isnan(result[:2]).all()


@pytest.mark.parametrize("backward", [False, True])
def test_a_barrier_of_the_cluster_is_one_of_the_block(backward):
    body = CLUSTER.replace("rank ^ 1", "rank").replace("m)[t]", "m)[63 - t]")
    expected = np.arange(63, -1, -1) + 100 * np.array([[0], [1], [0], [1]])
    np.testing.assert_array_equal(run_clusters(body, backward), expected)
    body = body.replace("tvmf_cluster_arrive();\n  tvmf_cluster_wait();", "")
    with pytest.raises(RuntimeError, match="without a barrier after thread"):
        run_clusters(body, backward)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CLUSTER_FAULTS)
def test_faults_of_clusters(name, backward):
    right, wrong, message = CLUSTER_FAULTS[name]
    assert right in CLUSTER
    with pytest.raises(RuntimeError, match=message):
        run_clusters(CLUSTER.replace(right, wrong), backward)


PLAIN = "__device__ __forceinline__ float tvmf_double(float x) { return 2.0f * x; }\n"
GUARDED = (
    "__device__ __forceinline__ float tvmf_double(float x) {\n#ifdef __CUDA_ARCH__\n"
    '  float y; asm("add.f32 %0, %1, %1;" : "=f"(y) : "f"(x)); return y;\n'
    "#else\n  return 2.0f * x;\n#endif\n}\n"
)
KNOWN = (
    "__device__ float tvmf_double(float x) {\n"
    '  float y; asm volatile("ex2.approx.ftz.f32 %0, %1;"\n'
    '    : "=f"(y) : "f"(x) : "memory");\n  return y;\n}\n'
)
UNKNOWN = (
    "__device__ float tvmf_double(float x) {\n"
    '  asm("add.f32 %0, %0, %0;" : "+f"(x)); return x;\n}\n'
)
NESTED = (
    "__device__ __forceinline__ float tvmf_outer(float x) {\n  return tvmf_double(x) + 1.0f;\n}\n"
)


@pytest.mark.parametrize(
    ("before", "function"), [(PLAIN, lambda x: 2 * x), (GUARDED, lambda x: 2 * x), (KNOWN, np.exp2)]
)
def test_device_functions(before, function):
    result, _ = run("b_ptr[t] = tvmf_outer(a_ptr[t] / 64);", before=before + NESTED)
    np.testing.assert_allclose(result, function(np.arange(64) / 64) + 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (UNKNOWN, "calls tvmf_double: its PTX instruction add.f32 %0, %0, %0; is not emulated"),
        ("", "calls tvmf_double, which the source does not define"),
    ],
)
def test_what_is_not_known_of_a_device_function_is_named(before, message):
    with pytest.raises(CompilerError, match=message):
        run("b_ptr[t] = tvmf_outer(a_ptr[t]);", before=before + NESTED)


@pytest.mark.parametrize("name", SOURCES)
def test_every_device_function_of_the_templates_is_known(name):
    made = device_functions("".join(SOURCES.values()), f"  {name}(0);")
    assert f"{name}(" in made
    assert "asm" not in made


STORES = """
__device__ __forceinline__ void tvmf_store(void* shared, int offset, const float* values) {
  unsigned address = (unsigned)__cvta_generic_to_shared((char*)shared + offset);
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(address), "f"(values[0]), "f"(values[1]) : "memory");
}
__device__ __forceinline__ void tvmf_load(float* values, const float* global) {
  unsigned* v = (unsigned*)values;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(global));
}
__device__ __forceinline__ float tvmf_tf32(float x) {
  asm("cvt.rna.tf32.f32 %0, %0;" : "+f"(x)); return x;
}
__device__ __forceinline__ float tvmf_tf32_even(float x) {
  unsigned bits;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x)); return __uint_as_float(bits);
}
"""


def test_loads_and_stores_by_instructions():
    body = """  __shared__ alignas(64) float s[128]; alignas(64) float v[2];
  tvmf_load(v, a_ptr + t / 2 * 2); v[1] = v[1] * 2.0f;
  tvmf_store(s, t * 8, v); __syncthreads();
  b_ptr[t] = s[(63 - t) * 2] + s[(63 - t) * 2 + 1];"""
    result, _ = run(body, before=STORES)
    even = (63 - np.arange(64)) // 2 * 2
    np.testing.assert_array_equal(result, even + 2 * (even + 1))
    with pytest.raises(RuntimeError, match=r"st\.shared: byte .* of s is not aligned to 8 bytes"):
        run(body.replace("t * 8", "t * 4"), before=STORES)
    with pytest.raises(RuntimeError, match="an address in global memory is not aligned to 8"):
        run(body.replace("t / 2 * 2", "t / 2"), before=STORES)
    with pytest.raises(RuntimeError, match="a read out of range: byte 256"):
        run(body.replace("t / 2 * 2", "t * 2"), before=STORES)


def test_rounding_to_tf32():
    result, _ = run("b_ptr[t] = tvmf_tf32(1.0f + a_ptr[t] / 16384);", before=STORES)
    np.testing.assert_array_equal(result, 1 + np.floor(np.arange(64) / 16 + 0.5) / 1024)
    result, _ = run("b_ptr[t] = tvmf_tf32_even(1.0f + a_ptr[t] / 16384);", before=STORES)
    np.testing.assert_array_equal(result, 1 + np.round(np.arange(64) / 16) / 1024)


@pytest.mark.parametrize("name", ["tvmf_tf32", "tvmf_tf32_even"])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000])
def test_rounding_to_tf32_keeps_what_is_no_number(name, bits):
    result, _ = run(f"b_ptr[t] = {name}(__uint_as_float({bits}u));", before=STORES)
    assert (result.view("uint32") == bits).all()


def test_sampled_blocks():
    assert sample_blocks((10, 1, 1), 1) == [0, 9]
    assert sample_blocks((10, 1, 1), 4) == [0, 3, 7, 9]
    assert sample_blocks((3, 3, 1), 5) == [0, 2, 4, 6, 8]
    assert sample_blocks((2, 2, 1), 100) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="not all of the grid"):
        run("b_ptr[t] = 0.0f;", blocks=[1])
    launch = Launch((3, 1, 1), (64, 1, 1), 0, (2, 1, 1))
    with pytest.raises(ValueError, match="has no clusters"):
        emulate(f"{HEAD}}}", launch, {"a": np.zeros(1), "b": np.zeros(1)})


def test_clusters_of_blocks():
    launch = Launch((4, 6, 2), (32, 1, 1), 0, (2, 3, 1))
    assert _clusters(launch, [0, 5, 11, 23, 24]) == [0, 1, 3, 4]
    assert _clusters(launch, range(48)) == list(range(8))


def test_a_matrix_instruction_needs_a_whole_warp():
    body = DYNAMIC + "  alignas(64) uint f[4];\n  tvmf_ldmatrix(f, 0, m, (t & 31) * 16);"
    before = "".join(SOURCES.values())
    run(body, before=before, shared=512)
    with pytest.raises(RuntimeError, match="ldmatrix is not reached by all 32 lanes of warp 1"):
        run(body, before=before, shared=512, threads=48)
